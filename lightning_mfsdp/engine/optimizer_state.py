"""What `optimizer.state_dict()` shows of an optimizer that holds local rows, and what its `load_state_dict` takes: as with FSDP2.

State that is shaped like a parameter is shown as a DTensor of the parameter's shape, over the memory that the optimizer has; so
`torch.distributed.checkpoint` and its `get_state_dict` see which rows are where.

All ranks have to show the same. A rank without rows of a parameter has no gradient of it, so the optimizer neither makes state nor counts
steps there. The first step of others gives it the state of no rows: with the keys of another parameter of the group, or else what the
optimizer's own step makes of a parameter without rows. Steps are counted here, and put in where state is shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.engine.errors import ShardingError
from lightning_mfsdp.engine.held_back import HeldBackGradient
from lightning_mfsdp.engine.local_rows import LocalRowsOptimizer
from lightning_mfsdp.engine.own_step import OwnStep
from lightning_mfsdp.engine.parameter import Entry, is_left_behind, owner_of
from lightning_mfsdp.engine.placed_tensor import own_rows
from lightning_mfsdp.engine.sharded_tensor import Rows

__all__ = ["ShownState", "refuse_left_behind", "shown_state_of"]

_STEP = "step"


@dataclass(eq=False)
class _Elsewhere:
    """A parameter without rows here.

    Attributes:
        entry: Of it. The optimizer keeps no module alive.
        steps: How many the optimizer has taken for it on other ranks.
        known_steps: After how many the numbers are that the optimizer has here.
        is_complete: The optimizer has all state of it that there is.
    """

    entry: weakref.ref[Entry]
    steps: int = 0
    known_steps: int = 0
    is_complete: bool = False

    def count(self) -> bool:
        """A step begins. Returns whether there is state to be seen to after it."""
        entry = self.entry()
        gradient = entry.local.grad if entry is not None else None
        if entry is None or (gradient is None and not (entry.sharded.has_empty_grad and entry.is_trained)):
            return False
        if gradient is None:
            self.steps += 1
            return not self.is_complete
        self.known_steps += 1  # the optimizer finds a gradient, too
        if isinstance(gradient, HeldBackGradient):
            self.steps += 1
        elif not entry.sharded.has_empty_grad:
            # PyTorch steps with gradients of zeros, so that there is state. Where other ranks have gradients they do not.
            self.steps = max(self.steps, 1)
        return True


class ShownState:
    """Hooks of one optimizer's `state_dict` and `load_state_dict`.

    Args:
        optimizer: Any over sharded parameters.
        local: It gets local rows of all, also of those it holds as DTensors until its next step.
    """

    def __init__(self, optimizer: Optimizer, *, local: bool) -> None:
        self._local = local
        self._elsewhere: dict[Tensor, _Elsewhere] = {}  # by what the optimizer holds
        self._is_incomplete = False
        self._replays = 0
        optimizer.register_state_dict_post_hook(self._show)
        optimizer.register_load_state_dict_pre_hook(self._take)
        optimizer.register_load_state_dict_post_hook(self._complete)

    @classmethod
    def of(cls, optimizer: Optimizer, *, local: bool) -> ShownState:
        """The one of an optimizer; made when it is asked for first."""
        known = _KNOWN.get(optimizer)
        if known is None:
            known = _KNOWN[optimizer] = cls(optimizer, local=local)
        known._local = local
        return known

    def adopt(self, optimizer: Optimizer) -> None:
        """The optimizer holds other parameters than before."""
        held = [entry for _, _, entry in _held(optimizer) if entry is not None] if self._local else []
        known = self._elsewhere
        self._elsewhere = {
            entry.local: known.get(entry.local) or _Elsewhere(weakref.ref(entry))
            for entry in held
            if _has_no_rows(entry)
        }

    def note_replay(self) -> None:
        """A CUDA graph has taken the last step again."""
        self._replays += 1

    def _count_replays(self) -> None:
        for one in self._elsewhere.values() if self._replays else ():
            entry = one.entry()
            if entry is not None and entry.sharded.has_empty_grad and entry.is_trained:
                one.steps += self._replays
        self._replays = 0

    def begin_step(self) -> None:
        """Note which parameters it is for."""
        self._count_replays()
        for one in self._elsewhere.values():
            if one.count():
                self._is_incomplete = True

    def end_step(self, optimizer: Optimizer) -> None:
        """See to the state of parameters whose first step it was."""
        if self._is_incomplete:
            self._is_incomplete = False
            self._complete(optimizer)

    def _complete(self, optimizer: Optimizer) -> None:
        """Have state of parameters without rows where other ranks have state of them."""
        shaped = _keys_of_rows(optimizer)
        for parameter, group, entry in _held(optimizer):
            one = self._elsewhere.get(parameter) if entry is not None else None
            if entry is None or one is None or one.is_complete:
                continue
            present = optimizer.state.pop(parameter, None) or {}
            if one.steps:
                values = {**_first_state(optimizer, group, entry, shaped), **present}
                one.known_steps = one.known_steps or 1
                one.is_complete = True
                if values:
                    optimizer.state[parameter] = values

    def _show(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        refuse_left_behind(optimizer, "state_dict")
        self._count_replays()
        present: dict[Any, Any] = state_dict["state"]
        shown: dict[Any, Any] = {}
        shaped = _keys_of_rows(optimizer)
        for number, (parameter, _, entry) in enumerate(_held(optimizer)):
            values = present.get(number)
            if entry is not None and isinstance(values, Mapping):
                one = self._elsewhere.get(parameter)
                if one is not None:
                    values = _up_to_date(optimizer, one, entry)
                values = {key: _shown(value, entry, key in shaped) for key, value in values.items()}
            if values is not None:
                shown[number] = values
        others = {key: value for key, value in present.items() if key not in shown}
        return {**state_dict, "state": {**shown, **others}}

    def _take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        refuse_left_behind(optimizer, "load_state_dict")
        state = dict(state_dict["state"])
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        self._replays = 0
        for one in self._elsewhere.values():
            one.steps, one.is_complete = 0, False
        for key, (parameter, _, entry) in zip(saved, _held(optimizer), strict=False):
            if entry is None or not isinstance(state.get(key), Mapping):
                continue
            state[key] = values = {name: _taken(value, parameter, entry) for name, value in state[key].items()}
            if self._local and _has_no_rows(entry):
                one = self._elsewhere.setdefault(entry.local, _Elsewhere(weakref.ref(entry)))
                one.steps = one.known_steps = int(_number(values.get(_STEP)) or 1)
        return {**state_dict, "state": state}


_KNOWN: weakref.WeakKeyDictionary[Optimizer, ShownState] = weakref.WeakKeyDictionary()


def shown_state_of(optimizer: Optimizer) -> ShownState | None:
    """Of an optimizer that was taken over."""
    return _KNOWN.get(optimizer)


def refuse_left_behind(optimizer: Optimizer, what: str) -> None:
    """Raise where the module of an optimizer is plain again, and so has other parameters. It may also just be gone.

    Args:
        optimizer: Any that was taken over.
        what: Was called.
    """
    if any(is_left_behind(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ShardingError(
            f"{type(optimizer).__name__}.{what}: unshard_model made the module plain whose rows the optimizer holds, so it has nothing to "
            "step any more; build a new optimizer from module.parameters(). State that it shall go on with is taken before unshard_model: "
            "get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))"
        )


def _held(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any], Entry | None]]:
    """What an optimizer holds, with its group, and its entry if the engine manages it; in the order of `state_dict`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            yield parameter, group, owner[1] if owner is not None else None


def _has_no_rows(entry: Entry) -> bool:
    return not entry.local.numel() and bool(entry.sharded.numel())


def _keys_of_rows(optimizer: Optimizer) -> set[str]:
    """Names of state that is shaped like its parameter."""
    found: set[str] = set()
    for parameter, _, entry in _held(optimizer):
        if entry is not None and parameter.dim():
            values = optimizer.state.get(parameter) or {}
            found |= {key for key, value in values.items() if _is_like(value, entry)}
    return found


def _is_like(value: Any, entry: Entry) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape in (entry.local.shape, entry.sharded.shape)


def _shown(value: Any, entry: Entry, shaped: bool) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != entry.local.shape:
        return value
    return Rows.over(value, entry.sharded) if shaped or value.dim() else value


def _taken(value: Any, parameter: Tensor, entry: Entry) -> Any:
    """A loaded value as the optimizer has it: local rows, or a DTensor where it holds DTensors. Collective for DTensors of equal parts."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        rows = value._local_tensor if isinstance(value, Rows) else own_rows(value.full_tensor(), entry.sharded).clone()
    elif value.dim() and value.shape == entry.sharded.shape and value.shape != entry.local.shape:
        rows = own_rows(value, entry.sharded).clone()
    else:
        rows = value
    is_shaped = rows.shape == entry.local.shape and (rows.dim() or isinstance(value, DTensor))
    return Rows.over(rows, entry.sharded) if isinstance(parameter, Rows) and is_shaped else rows


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _first_state(optimizer: Optimizer, group: dict[str, Any], entry: Entry, shaped: set[str]) -> dict[str, Any]:
    """Of a parameter without rows, after one step."""
    parameter = entry.local
    if isinstance(optimizer, LocalRowsOptimizer):
        return optimizer.state_without_rows(parameter, group)
    present = (optimizer.state.get(other) for other in group["params"] if other.numel())
    model: dict[str, Any] = next((state for state in present if state), {})
    if not model or any(key not in shaped and key != _STEP for key in model):
        return _stepped(optimizer, parameter, {}, 1)
    return {
        key: _as_number(1, like=value)
        if key == _STEP
        else torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        for key, value in model.items()
    }


def _up_to_date(optimizer: Optimizer, one: _Elsewhere, entry: Entry) -> dict[str, Any]:
    """The state of a parameter without rows, after as many steps as on other ranks."""
    values: dict[str, Any] = optimizer.state[entry.local]
    missing = one.steps - one.known_steps
    if missing > 0 and any(key != _STEP and not _is_like(value, entry) for key, value in values.items()):
        optimizer.state[entry.local] = values = _stepped(optimizer, entry.local, values, missing)
    if _STEP in values:
        values[_STEP] = _as_number(one.steps, like=values[_STEP])
    one.known_steps = one.steps
    return values


def _as_number(number: int, *, like: Any) -> Any:
    return torch.full_like(like, number) if isinstance(like, Tensor) else type(like)(number)


def _stepped(optimizer: Optimizer, parameter: nn.Parameter, before: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What becomes of the state of a parameter without rows in some steps of an optimizer; nothing else is stepped."""
    with _alone(optimizer, parameter), torch.no_grad():
        if before:
            optimizer.state[parameter] = dict(before)
        for _ in range(steps):
            OwnStep(optimizer, (), {})()
        stepped: dict[str, Any] = optimizer.state.pop(parameter, {})
        return stepped


@contextmanager
def _alone(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[None]:
    """Let one parameter have a gradient."""
    others = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [one.grad for one in others]
    for one in others:
        one.grad = None
    parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        parameter.grad = None
        for one, gradient in zip(others, gradients, strict=True):
            one.grad = gradient
