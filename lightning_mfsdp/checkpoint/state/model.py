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

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.write import tensor_bytes
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.index import FullNames, ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.on_disk import Reads, UnreadObject
from lightning_mfsdp.checkpoint.state.state_dict import (
    check_names,
    check_restored,
    identity_of,
    module_versions,
    rows_by_name,
)
from lightning_mfsdp.engine import is_sharded, make_replicas_equal
from lightning_mfsdp.engine.internals import placed_as

__all__ = ["ModelPlan", "finish_model", "known_names", "load_model", "plan_model"]

_ADVICE = (
    "Load it into the model it was saved from; translate names in on_load_checkpoint or load_state_dict; or, to ignore other names, set "
    "strict_loading=False on the LightningModule (strict=False under Fabric)"
)
# These notify the engine, which loading does anyway, or only put names of wrappers into names.
_OURS = ("lightning_mfsdp.", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
# Their code loads what it is given: it neither leaves entries out nor compares them with the values so far.
_LIBRARIES = ("torch.", "torchmetrics.", "transformer_engine.")


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
    return lambda name: plain_name(name) in present and not _drops_extra_state(plain_name(name), present)


def _drops_extra_state(name: str, present: Mapping[str, Any]) -> bool:
    """Whether what a checkpoint holds under a name is a module's extra state, and the module here has none.

    Some checkpoints hold that of Transformer Engine's modules, which only these could use, and only if they trust any code in it.
    """
    value = present.get(name)
    has_some = name in present and not (isinstance(value, Tensor) and not value.numel())
    return name.rpartition(".")[2] == "_extra_state" and not has_some


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
    _settle(module)
    code, state = LoadCode.of(module), module.state_dict()
    rows = rows_by_name(state, index, f"loading {path}")
    full_names = FullNames(state)
    present = {plain_name(name): value for name, value in rows.items()}
    saved = {plain_name(name): value for name, value in entries.items()}
    saved = {name: value for name, value in saved.items() if not _drops_extra_state(name, present)}
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
    own = {identity_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    fills: dict[Any, tuple[Tensor, Tensor]] = {}
    for name, value in ((name, saved[name]) for name in dict.fromkeys((*present, *saved)) if name in saved):
        target, full_name = present.get(name), full_names[name]
        if not isinstance(value, Tensor) or not isinstance(target, Tensor) or value.shape != target.size():
            if code.runs or name in present:
                plan.handed[full_name] = value
            continue
        shown = state[full_name]
        if code.may_change(name):
            shown, target = _apart(shown, target)
            plan.handed[full_name] = shown
        elif code.runs or not (isinstance(target, (DcpShard, DTensor)) or identity_of(shown) in own):
            plan.handed[full_name] = shown  # if only because a hook put a copy into the state dict
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
    copied = ByteCount(progress, tensor_bytes([value for _, value in plan.copies]))
    with torch.no_grad():
        for target, value in plan.copies:
            _copy(target, value)
            copied.add(tensor_bytes(value))
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
            problems = " ".join(str(error).split())
            raise RuntimeError(
                f"the checkpoint {plan.path} does not fit the model, of which a part may be loaded already: {problems[:300]}. {_ADVICE}"
            ) from error
        _settle(module)
    # Main weights were written. Code of the program may have written other values on each rank, such as random numbers; replicas would then
    # train apart.
    if any(is_sharded(part) for part in module.modules()):
        make_replicas_equal(module)


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


def _settle(module: nn.Module) -> None:
    """Make ordinary tensors of those that code took out of a checkpoint as they are, as buffers or attributes of modules."""
    for part in module.modules():
        for table in (vars(part), part._buffers):
            for name, value in list(table.items()):
                if isinstance(value, StandIn):
                    table[name] = value.whole()


def _apart(shown: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same entry in memory of its own, as `load_state_dict` gets it and as it is filled."""
    if isinstance(target, DcpShard):
        local = torch.empty_like(target.local, requires_grad=False)
        return placed_as(local, shown), target.with_local(local)
    copy = torch.empty_like(shown.detach())
    return copy, copy


def _copy(target: Tensor, value: Tensor) -> None:
    if isinstance(value, StandIn):
        value = value.whole()
    if isinstance(target, DcpShard):
        target.fill_from(value.full_tensor() if isinstance(value, DTensor) else value)
    elif isinstance(value, DTensor) and not isinstance(target, DTensor):
        target.copy_(value.full_tensor())
    else:
        target.copy_(value)


@dataclass
class LoadCode:
    """Which code of a model takes part when its state dict is loaded: overridden methods and hooks, of any module in it.

    Attributes:
        runs: Whether there is any.
        prefixes: Plain names of the modules, with a dot, whose code sees the entries below them before they are loaded.
        changing: Those among them whose code is the program's own, and may need present values as well.
    """

    runs: bool = False
    prefixes: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> LoadCode:
        """Look through a model."""
        code = cls()
        if getattr(module.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
            code._add("", module.load_state_dict)
        for name, part in module.named_modules(remove_duplicate=False):
            before, after = compat.load_code(part)
            for function in before:
                code._add(plain_name(f"{name}." if name else ""), function)
            own_state = getattr(part.set_extra_state, "__func__", None) is not nn.Module.set_extra_state
            code.runs |= own_state or any(not _origin(function).startswith(_OURS) for function in after)
        return code

    def sees(self, name: str) -> bool:
        """Whether such code sees the entry of a plain name, and may have it loaded in another form."""
        return name.startswith(tuple(self.prefixes))

    def may_change(self, name: str) -> bool:
        """Whether the program's own code sees it."""
        return name.startswith(tuple(self.changing))

    def _add(self, prefix: str, function: Any) -> None:
        origin = _origin(function)
        if origin.startswith(_OURS):
            return
        self.runs = True
        self.prefixes.add(prefix)
        if not origin.startswith(_LIBRARIES):
            self.changing.add(prefix)


def _origin(function: Any) -> str:
    """The module of a function, a method, a partial or a callable object."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", None) or type(function).__module__)
