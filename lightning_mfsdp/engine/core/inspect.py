"""Read-only views of a sharded module and of single parameters, for checkpoints, callbacks, summaries and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.group import ParameterGroup, owner_of, place_of
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor
from lightning_mfsdp.engine.core.unit import Unit, unit_of

__all__ = [
    "FlatGradient",
    "ParameterView",
    "UnitView",
    "collectives_begun",
    "context_of",
    "flat_gradients",
    "gradients_at_hand",
    "is_copy",
    "is_sharded",
    "local_gradients",
    "placed_as",
    "refuse_unsharded",
    "sharded_parameters",
    "units",
    "units_in",
    "units_of_own",
    "unsharded_of",
    "unsharded_parameters",
    "view_of",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterView:
    """One sharded parameter as this rank sees it.

    Attributes:
        name: First full name inside the inspected module.
        names: All names (tied weights have several).
        shape: Global shape.
        dtype: Of the main weight.
        compute_dtype: Of the unsharded weight in forward.
        piece: Where the numbers that this rank owns lie in the parameter.
        unit: Name of the unit that owns it.
        main: The owned rows of the main weight, `[len(rows), *shape[1:]]`, or of this rank's part.
        dtensor: What `module.parameters()` yields.
        local: What an elementwise optimizer steps; shares memory with `main`.
        requires_grad: Whether it is trainable.
    """

    name: str
    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    compute_dtype: torch.dtype
    piece: Piece
    unit: str
    main: Tensor
    dtensor: Tensor
    local: nn.Parameter
    requires_grad: bool

    @property
    def rows(self) -> range:
        """Rows of dim 0 this rank owns, or has a part of; a 0-D parameter counts as one row. Of packed weights, see `piece`."""
        return self.piece.row_range

    @property
    def grad(self) -> Tensor | None:
        """The owned rows of the reduced gradient, if there is one."""
        return self.local.grad


@dataclass(frozen=True, kw_only=True)
class UnitView:
    """One unit on this rank.

    Attributes:
        name: Full name inside the root, or the class name of the root.
        module_class: Class name of its module; of several, their number and the class name of the first.
        num_parameters: Elements of all its parameters, whole.
        padding_fraction: Cells of its address spaces that belong to no parameter, relative to `num_parameters`.
        main_bytes: Main weights; in host memory under offload="optimizer".
        held_bytes: Compute weights that stay in memory in addition.
        gradient_bytes: Gradient buffers at the moment; none once gradients were cleared and the next forward has begun.
        full_bytes: Gathered weights while the unit runs.
        stays_gathered: They also stay between forward and backward.
    """

    name: str
    module_class: str
    num_parameters: int
    padding_fraction: float
    main_bytes: int
    held_bytes: int
    gradient_bytes: int
    full_bytes: int
    stays_gathered: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGradient:
    """Reduced gradients of one group on this rank. Cells between parameters are zero, so `tensors` may be checked whole."""

    unit: str
    tensors: list[Tensor]
    parameters: list[ParameterView]


def collectives_begun(module: nn.Module) -> int:
    """How many gathers and reductions this rank has begun for `module`'s root: equal on ranks that have done the same; 0 if not sharded."""
    unit = unit_of(module)
    return unit.context.lane.ranges.collectives if unit is not None and unit.context is not None else 0


def context_of(module: nn.Module) -> Context:
    """The context of a sharded module, or of the sharded modules inside it if they share one.

    Raises:
        ShardingError: Nothing in it is sharded, or its parts belong to several roots.
    """
    found = {id(unit.context): unit.context for child in module.modules() if (unit := unit_of(child)) is not None}
    if not found:  # all its parameters may belong to a unit around it
        found = {id(unit.context): unit.context for unit in units_in(module)}
    if len(found) == 1:
        return next(iter(found.values()))
    problem = "no part of it was given to fully_shard" if not found else f"its parts belong to {len(found)} roots"
    raise ShardingError(
        f"{type(module).__name__}: expected one sharded module, but {problem}; call fully_shard on the module around "
        "them"
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard(module)` was called on exactly this module."""
    return unit_of(module) is not None


def sharded_parameters(module: nn.Module) -> list[ParameterView]:
    """Every sharded parameter inside `module`, once each, in module order."""
    names = _names(module)
    found = [
        (group, entry)
        for unit in units_in(module)
        for group in unit.groups
        for entry in group.entries
        if id(entry) in names
    ]
    order = {key: position for position, key in enumerate(names)}
    return [
        _view(group, entry, names[id(entry)]) for group, entry in sorted(found, key=lambda pair: order[id(pair[1])])
    ]


def view_of(tensor: Tensor) -> ParameterView | None:
    """The sharded parameter that a tensor is, in any representation, or was made of, such as an entry of a state dict.

    Returns:
        A view whose name is the one inside the module that was given to `fully_shard`, and whose `local` is the same object for the same
        parameter; `None` for all other tensors.
    """
    owner = owner_of(tensor)
    return None if owner is None else _view(*owner, (owner[1].name,))


def unsharded_of(tensor: Tensor) -> nn.Parameter | None:
    """What forward and autograd see of the parameter that `view_of` finds."""
    owner = owner_of(tensor)
    return None if owner is None else owner[1].full


def placed_as(rows: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a tensor that is distributed as `like`: a DTensor if that is sharded, otherwise `rows` in its shape. No copy.

    Args:
        rows: As many as this rank has of `like`.
        like: Of a sharded parameter, or any tensor that every rank has whole.
    """
    return ShardedTensor.over(rows, like) if isinstance(like, ShardedTensor) else rows.reshape(like.shape)


def unsharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that came into a sharded module later, by each of their names, without those in `ignored_parameters`."""
    ignored = context_of(module).ignored
    return {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if (place_of(parameter) is None or is_copy(parameter))
        and (id(parameter) not in ignored or ignored[id(parameter)]() is not parameter)
    }


def is_copy(parameter: Tensor) -> bool:
    """Whether a program has made it of a sharded tensor, `nn.Parameter(layer.weight.detach().clone())`, so that no unit has it."""
    return isinstance(parameter, ShardedTensor) and not isinstance(parameter, ShardedParameter)


def refuse_unsharded(module: nn.Module) -> None:
    """Refuse parameters that were added to a sharded module later: they would be neither sharded nor reduced.

    Raises:
        ShardingError: With their names. Those in `ignored_parameters` are permitted.
    """
    if names := list(unsharded_parameters(module)):
        raise ShardingError(
            f"{type(module).__name__}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''} came into the model after it was sharded, "
            "by a new, replaced or wrapped layer, so they would be neither sharded nor reduced and ranks would drift apart; expected the "
            "parameters that were sharded. Build such layers before fit or between two fits; with a tensor or expert axis, or compile, "
            "call unshard_model(module) on all ranks before the next fit"
        )


def units(module: nn.Module) -> list[UnitView]:
    """Every unit inside `module`, in module order."""
    members: dict[Unit, list[nn.Module]] = {}
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None:
            members.setdefault(unit, []).append(child)
    return [_unit_view(unit, found) for unit, found in members.items()]


def flat_gradients(module: nn.Module) -> list[FlatGradient]:
    """Reduced gradients by group, in the order in which backward reduces them. Groups without a gradient are left out."""
    names = _names(module)
    return [
        FlatGradient(
            unit=unit.name,
            tensors=tensors,
            parameters=[_view(group, entry, names[id(entry)]) for entry in group.entries if id(entry) in names],
        )
        for unit in context_of(module).units_in_backward_order
        for group in unit.groups
        if (tensors := local_gradients(group))
    ]


def local_gradients(group: ParameterGroup, entries: list[int] | None = None) -> list[Tensor]:
    """What this rank holds of the gradients of a group. Reduces what is held back, which is collective.

    Args:
        group: Of a sharded module.
        entries: Which parameters, in order; `None`: all.

    Returns:
        Whole flat segments if every parameter is requested and has a gradient, otherwise one tensor for each.
        Cells between parameters are zero in the segments, so norms and finite checks may read them.
    """
    group.reduce_held_back()
    return gradients_at_hand(group, list(range(len(group.entries))) if entries is None else entries)


def gradients_at_hand(group: ParameterGroup, entries: list[int]) -> list[Tensor]:
    """`local_gradients` of what is reduced already."""
    all_entries = group.entries
    if len(entries) == len(all_entries) and group.gradients.is_open:
        main = group.gradients.main
        for entry, view in zip(all_entries, main.views, strict=True):  # a generator costs host time, in every step
            if entry.local.grad is not view:
                break
        else:
            return main.of_optimizer.segments if main.of_optimizer.holds_rows else []
    return [grad for index in entries if (grad := all_entries[index].local.grad) is not None and grad.numel()]


def units_in(module: nn.Module) -> list[Unit]:
    """Units whose parameters may show inside `module`: nested ones, those they share parameters with, and those around it."""
    found: dict[int, Unit] = {}
    for child in module.modules():
        unit = unit_of(child)
        groups = list(unit.shared_groups) if unit is not None else []
        if unit is not None:
            found.setdefault(id(unit), unit)
        places = (place_of(parameter) for parameter in child._parameters.values() if parameter is not None)
        groups += [place[0] for place in places if place is not None]
        for group in groups:
            owner = group.unit()
            if owner is not None:
                found.setdefault(id(owner), owner)
    return list(found.values())


def units_of_own(module: nn.Module) -> list[Unit]:
    """The units whose weights the forward of `module` reads: its own, or those around it. Units inside it are entered by their hooks."""
    own = unit_of(module)
    if own is not None:
        return [own]
    found: dict[int, Unit] = {}
    for parameter in module._parameters.values():
        place = place_of(parameter) if parameter is not None else None
        owner = place[0].unit() if place is not None else None
        if owner is not None:
            found[id(owner)] = owner
    for child in module.children():
        if unit_of(child) is None:
            found.update((id(unit), unit) for unit in units_of_own(child))
    return list(found.values())


def _names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Names inside `module` by entry (its id), in module order."""
    by_site: dict[tuple[int, str], Entry] = {}
    for unit in units_in(module):
        for group in unit.groups:
            for entry in group.entries:
                for table, key in entry.sites:
                    by_site[id(table), key] = entry
    found: dict[int, tuple[str, ...]] = {}
    for prefix, child in module.named_modules():
        for key in child._parameters:
            entry_here = by_site.get((id(child._parameters), key))
            if entry_here is not None:
                name = f"{prefix}.{key}" if prefix else key
                found[id(entry_here)] = (*found.get(id(entry_here), ()), name)
    return found


def _view(group: ParameterGroup, entry: Entry, names: tuple[str, ...]) -> ParameterView:
    owner = group.unit()
    return ParameterView(
        name=names[0],
        names=names,
        shape=entry.shape,
        dtype=group.spec.main_dtype,
        compute_dtype=group.spec.compute_dtype,
        piece=entry.piece,
        unit=owner.name if owner is not None else "",
        main=entry.local.detach(),
        dtensor=entry.sharded,
        local=entry.local,
        requires_grad=entry.full.requires_grad,
    )


def _unit_view(unit: Unit, modules: list[nn.Module]) -> UnitView:
    kind = type(modules[0]).__name__
    layouts = [group.layout for group in unit.groups]
    total = sum(layout.numel_total for layout in layouts)
    padded = sum(layout.padded_numel for layout in layouts)
    return UnitView(
        name=unit.name,
        module_class=kind if len(modules) == 1 else f"{len(modules)} x {kind}",
        num_parameters=sum(entry.shape.numel() for group in unit.groups for entry in group.entries),
        padding_fraction=(padded - total) / total if total else 0.0,
        main_bytes=sum(group.main.size_bytes for group in unit.groups),
        held_bytes=sum(group.weights.extra_bytes for group in unit.groups),
        gradient_bytes=sum(group.gradients.allocated_bytes for group in unit.groups),
        full_bytes=unit.full_bytes,
        stays_gathered=not unit.reshard_after_forward and unit.full_bytes > 0,
    )
