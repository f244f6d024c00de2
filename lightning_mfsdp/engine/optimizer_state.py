"""What `optimizer.state_dict()` shows of an optimizer that holds local rows, and what its `load_state_dict` takes: as with FSDP2.

State that is shaped like a parameter is shown as a DTensor of the parameter's shape, over the memory that the optimizer has; so
`torch.distributed.checkpoint` and its `get_state_dict` see which rows are where. On a rank without rows of a parameter the optimizer keeps
no state for it. There the same keys are shown over no rows, since all ranks have to show the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.engine.errors import ShardingError
from lightning_mfsdp.engine.parameter import Entry, is_left_behind, owner_of
from lightning_mfsdp.engine.placed_tensor import own_rows
from lightning_mfsdp.engine.sharded_tensor import Rows

__all__ = ["ShownState", "refuse_left_behind"]

_STEP = "step"


@dataclass(eq=False)
class _Elsewhere:
    """A parameter without rows here.

    Attributes:
        entry: Of it. The optimizer keeps no module alive.
        steps: How many the optimizer has taken for it, as far as this rank saw.
        values: What `load_state_dict` brought that is no tensor of rows.
    """

    entry: weakref.ref[Entry]
    steps: int = 0
    values: dict[str, Any] = field(default_factory=dict)

    def count(self) -> None:
        """A step begins."""
        entry = self.entry()
        if entry is not None and (entry.sharded.has_empty_grad or entry.local.grad is not None):
            self.steps += 1


class ShownState:
    """Hooks of one optimizer's `state_dict` and `load_state_dict`.

    Args:
        optimizer: Any over sharded parameters.
        local: It gets local rows of all, also of those it holds as DTensors until its next step.
    """

    def __init__(self, optimizer: Optimizer, *, local: bool) -> None:
        self._local = local
        self._elsewhere: dict[Tensor, _Elsewhere] = {}  # by what the optimizer holds
        optimizer.register_state_dict_post_hook(self._show)
        optimizer.register_load_state_dict_pre_hook(self._take)

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
        entries = [entry for _, _, entry in _held(optimizer) if entry is not None and _has_no_rows(entry)]
        known = self._elsewhere
        self._elsewhere = {entry.local: known.get(entry.local) or _Elsewhere(weakref.ref(entry)) for entry in entries}

    def begin_step(self) -> None:
        """Note which parameters it is for."""
        for one in self._elsewhere.values():
            one.count()

    def _show(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        refuse_left_behind(optimizer, "state_dict")
        present: dict[Any, Any] = state_dict["state"]
        shown: dict[Any, Any] = {}
        shaped = _keys_of_rows(optimizer)
        for number, (parameter, group, entry) in enumerate(_held(optimizer)):
            values = present.get(number)
            found = None
            if entry is not None and parameter in self._elsewhere:
                found = self._without_rows(optimizer, group, self._elsewhere[parameter], entry, shaped)
            if found is not None:
                values = found
            elif entry is not None and isinstance(values, Mapping):
                values = {key: _shown(value, entry, key in shaped) for key, value in values.items()}
            if values is not None:
                shown[number] = values
        others = {key: value for key, value in present.items() if key not in shown}
        return {**state_dict, "state": {**shown, **others}}

    def _without_rows(
        self, optimizer: Optimizer, group: Mapping[str, Any], one: _Elsewhere, entry: Entry, shaped: set[str]
    ) -> dict[str, Any] | None:
        """The same keys as on ranks that have rows; what is one number is that of another parameter at the same step."""
        if not one.steps:
            return None
        alike = [optimizer.state[other] for other in group["params"] if other.numel() and optimizer.state.get(other)]
        steps = [_number(state.get(_STEP)) for state in alike]
        taken = one.steps if len(set(steps)) != 1 else steps[0]
        model = next((state for state, step in zip(alike, steps, strict=True) if step == taken), None)
        model = model or next((state for state in (*alike, *optimizer.state.values()) if state), None)
        if model is None:
            return None
        values: dict[str, Any] = {}
        for key, value in model.items():
            if key in shaped:
                rows = torch.empty_like(entry.local, dtype=value.dtype, requires_grad=False)
                values[key] = Rows.over(rows, entry.sharded)
            elif key == _STEP and taken is not None:
                values[key] = torch.full_like(value, taken) if isinstance(value, Tensor) else type(value)(taken)
            else:
                known = one.values.get(key, value)
                values[key] = known.clone() if isinstance(known, Tensor) else known
        return values

    def _take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        refuse_left_behind(optimizer, "load_state_dict")
        state = dict(state_dict["state"])
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (parameter, _, entry) in zip(saved, _held(optimizer), strict=False):
            if entry is None or not isinstance(state.get(key), Mapping):
                continue
            values = {name: _taken(value, parameter, entry) for name, value in state[key].items()}
            if not (self._local and _has_no_rows(entry)):
                state[key] = values
                continue
            one = self._elsewhere.setdefault(entry.local, _Elsewhere(weakref.ref(entry)))
            del state[key]
            one.values = {
                name: value for name, value in values.items() if not isinstance(value, Tensor) or not value.dim()
            }
            one.steps = int(_number(values.get(_STEP)) or 1)
        return {**state_dict, "state": state}


_KNOWN: weakref.WeakKeyDictionary[Optimizer, ShownState] = weakref.WeakKeyDictionary()


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
