"""Loading a state dict into a sharded model: from a directory, from one file, or as a program has changed it.

    nothing overridden, no hooks    rows are read straight into main weights; nothing else is copied
    otherwise                       `load_state_dict` of the module is called with tensors that are filled already, sharded ones as DTensors

What the program's own code sees before it is loaded lies in memory of its own, since that code may leave entries out, or compare them with
present values. What only libraries' code sees (batch norms, metrics) is the module's own memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.progress import CountingReads
from lightning_mfsdp.checkpoint.state.index import FullNames, ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.load_code import LoadCode
from lightning_mfsdp.checkpoint.state.on_disk import Reads, UnreadObject
from lightning_mfsdp.checkpoint.state.piece_shard import PieceShard
from lightning_mfsdp.checkpoint.state.sharded import (
    check_names,
    check_restored,
    drops_extra_state,
    identity_of,
    module_versions,
    refresh,
    rows_by_name,
)
from lightning_mfsdp.engine.internals import placed_as

__all__ = ["ModelPlan", "finish_model", "known_names", "load_model", "plan_model", "settle"]

_ADVICE = (
    "Load it into the model it was saved from; translate names in on_load_checkpoint or load_state_dict; or, to ignore other names, set "
    "strict_loading=False on the LightningModule (strict=False under Fabric)"
)


@dataclass
class ModelPlan:
    """What will be loaded into a model; it was checked to fit, as far as no code of the model decides that.

    Attributes:
        path: Of the checkpoint.
        strict: Names must match.
        calls: Whether `load_state_dict` is called with everything.
        handed: What it is called with, by full name.
        copies: Where tensors in memory are copied to.
    """

    path: Location | Path
    strict: bool
    calls: bool
    handed: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def fill(self, target: Tensor, value: Tensor, reads: Reads) -> None:
        """Have a target filled with an entry."""
        if reads.takes(value):
            reads.add(value, target)
        else:
            self.copies.append((target, value))


def known_names(module: nn.Module) -> Callable[[str], bool]:
    """Whether a model has an entry of a name, and what it has is not an extra state that it would not read."""
    present = {plain_name(name): value for name, value in module.state_dict().items()}
    return lambda name: plain_name(name) in present and not drops_extra_state(plain_name(name), present)


def plan_model(
    path: Location, entries: Mapping[str, Any], index: ParameterIndex, reads: Reads, *, strict: bool
) -> ModelPlan:
    """Compare a state dict with a model; changes nothing. All ranks call it.

    Args:
        path: Of the checkpoint, for messages.
        entries: By name: `TensorOnDisk`, whole tensors, DTensors, other values.
        index: Of the model.
        reads: Is told what to read, and where to.
        strict: Names must be the same.

    Raises:
        RuntimeError: Names or shapes differ where no code of the model could change that; all of them are listed. With `strict=False` only
            shapes count, and a warning says which parameters keep their values.
    """
    module = index.module
    settle(module)
    code, state = LoadCode.of(module), module.state_dict()
    rows = rows_by_name(state, index, f"loading {path}")
    full_names = FullNames(state)
    present = {plain_name(name): value for name, value in rows.items()}
    saved = {plain_name(name): value for name, value in entries.items()}
    saved = {name: value for name, value in saved.items() if not drops_extra_state(name, present)}
    shapes = {name: value.shape for name, value in saved.items() if isinstance(value, Tensor)}
    certain = {name: value for name, value in present.items() if not code.sees(name)}
    check_names(path, certain, [name for name in saved if not code.sees(name)], shapes, strict=strict, advice=_ADVICE)
    check_restored(path, index, [*saved, *(name for name in index.views if code.sees(name))], strict=strict)
    plan = ModelPlan(path, strict, calls=code.runs)
    versions = module_versions(entries)
    if versions is not None:
        names = (name for name, _ in module.named_modules(remove_duplicate=False))
        plan.handed._metadata = {  # type: ignore[attr-defined]
            name: versions[plain_name(name)] for name in names if plain_name(name) in versions
        }
    own = {identity_of(one) for one in (*module.parameters(), *module.buffers())}
    fills: dict[Any, tuple[Tensor, Tensor]] = {}
    for name, value in ((name, saved[name]) for name in dict.fromkeys((*present, *saved)) if name in saved):
        target, full = present.get(name), full_names[name]
        if not isinstance(value, Tensor) or not isinstance(target, Tensor) or value.shape != target.size():
            if code.runs or name in present:
                plan.handed[full] = value
            continue
        shown = state[full]
        if code.may_change(name):
            shown, target = _apart(shown, target)
            plan.handed[full] = shown
        elif code.runs or not (isinstance(target, (PieceShard, DTensor)) or identity_of(shown) in own):
            plan.handed[full] = shown  # if only because a hook put a copy into the state dict
        fills[identity_of(shown) or name] = target, value  # of a weight's names the last one counts, as in PyTorch
    for target, value in fills.values():
        plan.fill(target, value, reads)
    if code.runs:  # of a tensor without elements nothing was saved
        for name, value in present.items():
            if name not in saved and isinstance(value, Tensor) and not value.size().numel():
                plan.handed[full_names[name]] = state[full_names[name]]
    return plan


def finish_model(plan: ModelPlan, module: nn.Module, progress: Progress | None = None) -> None:
    """After everything planned was read. All ranks call it.

    Raises:
        RuntimeError: `load_state_dict` of the model found that names or shapes differ.
    """
    counting = CountingReads(progress, [value for _, value in plan.copies])
    with torch.no_grad():
        for target, value in plan.copies:
            _copy(target, value)
            counting.took(value)
    plan.copies.clear()
    for name, value in plan.handed.items():
        if isinstance(value, UnreadObject):
            plan.handed[name] = value.read()
    if plan.calls or plan.handed:
        try:
            module.load_state_dict(plan.handed, strict=plan.strict and plan.calls)
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            found = " ".join(str(error).split())
            raise RuntimeError(
                f"the checkpoint {plan.path} does not fit the model, of which a part may be loaded already: {found[:300]}. {_ADVICE}"
            ) from error
        settle(module)
    refresh(module)


def load_model(
    path: Location,
    entries: Mapping[str, Any],
    index: ParameterIndex,
    *,
    strict: bool,
    progress: Progress | None = None,
) -> None:
    """Load a state dict in memory. All ranks call it."""
    reads = Reads(None)
    plan = plan_model(path, entries, index, reads, strict=strict)
    finish_model(plan, index.module, progress)


def settle(module: nn.Module) -> None:
    """Make ordinary tensors of those that code took out of a checkpoint as they are, as buffers or attributes of modules."""
    for part in module.modules():
        for table in (vars(part), part._buffers):
            for name, value in list(table.items()):
                if isinstance(value, StandIn):
                    table[name] = value.whole()


def _apart(shown: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same entry in memory of its own, as `load_state_dict` gets it and as it is filled."""
    if isinstance(target, PieceShard):
        local = torch.empty_like(target.local, requires_grad=False)
        return placed_as(local, shown), target.with_local(local)
    made = torch.empty_like(shown.detach())
    return made, made


def _copy(target: Tensor, value: Tensor) -> None:
    if isinstance(value, StandIn):
        value = value.whole()
    if isinstance(target, PieceShard):
        target.fill_from(value.full_tensor() if isinstance(value, DTensor) else value)
    elif isinstance(value, DTensor) and not isinstance(target, DTensor):
        target.copy_(value.full_tensor())
    else:
        target.copy_(value)
