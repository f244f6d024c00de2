"""Functions for users of a sharded module: hold back reductions, inspect unsharded weights, run a root's methods directly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError, ShardingError
from lightning_mfsdp.engine.core.buffer import FlatBuffer
from lightning_mfsdp.engine.core.conversion import refuse_moved
from lightning_mfsdp.engine.core.gradients import Sync
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.inspect import context_of, units_in, units_of_own
from lightning_mfsdp.engine.core.rows import gather_rows, join_parts
from lightning_mfsdp.engine.core.unit import Unit, unit_of

__all__ = [
    "around_backward",
    "gather_again",
    "gather_root",
    "make_replicas_equal",
    "no_sync",
    "record_ranges",
    "reduce_pending",
    "refresh_weights",
    "unshard",
    "watch_backward",
]


@contextmanager
def no_sync(module: nn.Module, *, keep_sharded: bool = False) -> Iterator[None]:
    """Backwards inside do not communicate gradients; the next backward outside reduces everything at once.

    Unreduced gradients are kept full-size in `main_grads_dtype`. `.grad` is a stand-in for them: `zero_grad()` drops them, and any read
    reduces them first (collective).

    Args:
        module: A sharded module; the setting holds for its whole root.
        keep_sharded: Save that memory where gradients are sharded: reduce over the shard axis in every backward and let
            only the outer axis of a 2-D mesh wait.
    """
    with context_of(module).reductions.synchronizing(Sync.SHARD if keep_sharded else Sync.NONE):
        yield


def reduce_pending(module: nn.Module) -> None:
    """Reduce now what `no_sync` held back, so that each `.grad` holds all backwards so far. All ranks call it, between backwards.

    Later backwards add to it. Trainable parameters that had no gradient get zero, as in a backward that communicates.
    """
    context_of(module).reduce_held_back()


@contextmanager
def unshard(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Inside, parameters are full plain tensors of the main weights, under all their names. Collective: enter it on every rank.

    It is meant for inspection and for surgery. A forward inside works as usual, on compute weights.

    Args:
        module: A sharded module, one that contains some, or a part of one; everything in it is gathered at once.
        writeback: Copy what was written to the full tensors to the main weights. Every rank keeps its own rows, so write the same on
            all.
    """
    tables = {id(child._parameters) for child in module.modules()}
    wanted: dict[ParameterGroup, list[int]] = {}
    for unit in units_in(module):
        unit.reshard()
        unit.context.writes.look()
        for group in unit.all_groups:
            inside = [any(id(table) in tables for table, _ in entry.sites) for entry in group.entries]
            if any(inside):
                wanted[group] = [index for index, is_inside in enumerate(inside) if is_inside]
    if not wanted:
        raise ShardingError(
            f"unshard: {type(module).__name__} has no sharded parameter; expected a module that fully_shard was "
            "called on"
        )
    refuse_moved(wanted, "unshard")
    shown = [_show_full(group, indices) for group, indices in wanted.items()]
    try:
        yield
    finally:
        for (group, indices), parameters in zip(wanted.items(), shown, strict=True):
            for index, parameter in zip(indices, parameters, strict=True):
                entry = group.entries[index]
                if writeback:
                    with torch.no_grad():
                        group.write(index, entry.piece.own_part(parameter.detach()))
                    if parameter._version:
                        group.weights.versions.outdate([index])
                    group.weights.know_row(index)
                entry.at_rest = entry.sharded
                entry.show(
                    entry.full if group.weights.registered else entry.sharded
                )  # a forward inside may wait for its backward
        if writeback:
            refresh_weights(module)


def _show_full(group: ParameterGroup, indices: list[int]) -> list[nn.Parameter]:
    """Gather main weights of a group into memory of their own and show them in the module."""
    entries = [group.entries[index] for index in indices]
    with torch.inference_mode(False), torch.no_grad():
        parameters = []
        for entry, value in zip(entries, _gathered(group, indices), strict=True):
            # With a version counter of its own, which begins at 0: views of a buffer share one.
            parameters.append(nn.Parameter(value.new_empty(0), requires_grad=entry.full.requires_grad))
            compat.set_data(parameters[-1], value)
    for entry, parameter in zip(entries, parameters, strict=True):
        entry.at_rest = parameter
        entry.show(parameter)
    return parameters


def _gathered(group: ParameterGroup, indices: list[int]) -> list[Tensor]:
    """Whole main weights: all of a group in one buffer, some of it one by one."""
    if len(indices) < len(group.entries):
        return [gather_rows(group, index, group.entries[index].local.detach()) for index in indices]
    full = FlatBuffer.empty(group.layout, group.full_extent, group.spec.main_dtype, group.device)
    for own, piece in zip(full.part(group.main_extent).segments, group.main.segments, strict=True):
        own.copy_(piece)
    if group.placement.outer_main and group.axes.outer is not None:
        group.axes.outer.gather(full.part(group.inner_extent).segments, full.part(group.main_extent).segments)
    if group.placement.main:
        group.axes.shard.gather(full.segments, full.part(group.inner_extent).segments)
    return [join_parts(view, group, index) for index, view in enumerate(full.views)]


@contextmanager
def gather_root(module: nn.Module) -> Iterator[None]:
    """Keep the weights of `module`'s own unit unsharded while code calls its methods directly (a LightningModule's `training_step`).

    Its forward hooks do not run then. The code sees sharded parameters: what it writes to them lasts, and gradients belong to them. Modules
    inside show unsharded ones during their forward, and what is computed from a parameter directly gets it unsharded (outside.py).
    In grad mode the weights stay until the backward of what was computed has ended.
    """
    unit = _unit(module, "gather_root")
    context = unit.context
    before = context.backward.num_ended
    try:
        unit.begin_step()
        yield
    except BaseException as error:  # an interrupt, too, must not leave weights pinned; re-raised
        context.end_forwards()
        unit.abandon()
        _explain_resharded(error, unit.context.groups)
        raise
    unit.end_step(had_backward=context.backward.num_ended != before)


def gather_again(module: nn.Module) -> None:
    """Inside a backward, unshard the weights of `module` for a forward of it whose hooks do not run: its activations are recomputed.

    They are resharded when the backward of their unit has ended. Outside of a backward, and where nothing is sharded, nothing happens.
    Units inside `module` behave as usual.
    """
    if compat.backward_task() == -1:
        return
    for unit in units_of_own(module):
        unit.enter_again()


def watch_backward(module: nn.Module, loss: Tensor) -> None:
    """Notify the engine when the backward of `loss` begins, for a root whose forward hooks did not run.

    Raises:
        ShardingError: `module` is not sharded itself.
    """
    unit = _unit(module, "watch_backward")
    if loss.requires_grad:
        loss.register_hook(lambda _: unit.context.begin_backward())


@contextmanager
def around_backward(*modules: nn.Module) -> Iterator[None]:
    """If a backward inside raises, code after it sees sharded weights at once, so that `module.zero_grad()` clears their gradients.

    Without it the engine detects this as soon as autograd has released the backward. For a GPU that happens on autograd's own thread,
    and code that caught the exception may run first.

    Raises:
        EngineStateError: The backward read weights that had been resharded. Without this function it is PyTorch's own error: "modified by
            an inplace operation", a tensor "is at version" 2147483648 or more, or another multiple of 1024; or, inside of `torch.func`,
            "setStorage: ... out of bounds for storage of size 0".
    """
    try:
        yield
    except BaseException as error:
        contexts = dict.fromkeys(unit.context for module in modules for unit in units_in(module))
        for context in contexts:
            context.backward_raised()
        _explain_resharded(error, [group for context in contexts for group in context.groups])
        raise


def make_replicas_equal(module: nn.Module) -> None:
    """Have all ranks with the same rows of a main weight take those of the first of them, as when `module` was sharded. Collective."""
    context = context_of(module)
    for group in context.groups:
        group.make_replicas_equal()
    refresh_weights(module)


def refresh_weights(module: nn.Module) -> None:
    """Note that main weights were written by other means than a sharded optimizer or `load_state_dict`."""
    context = context_of(module)
    context.weights_changed()
    context.refresh_shown()


def record_ranges(module: nn.Module, enabled: bool = True) -> bool:
    """Name what the engine does to the units of `module`'s root in profiles: `mfsdp gather|reduce|forward|backward <unit>`.

    Off by default. `torch.profiler` shows the ranges; so does Nsight Systems under `torch.autograd.profiler.emit_nvtx()`.

    Returns:
        Whether it was on before.
    """
    ranges = context_of(module).lane.ranges
    before, ranges.enabled = ranges.enabled, enabled
    return before


_MOVED_ON = re.compile(r"\[[^\[\]]*\[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)")
# Of a view that `torch.func` has made of a weight for another level: it does not share the weight's version.
_FREED = re.compile(r"setStorage: sizes \[([\d, ]*)\].* out of bounds for storage of size 0")
_SHOWN = 3  # units, in messages


def _explain_resharded(error: BaseException, groups: Iterable[ParameterGroup]) -> None:
    """Raise an error in our words if `error` is PyTorch's, which found a saved weight resharded.

    Raises:
        EngineStateError: It is. Names the unit, or those that it may be, and the parameters that have the shape of what was saved.
    """
    match = _MOVED_ON.search(str(error)) or _FREED.search(str(error)) if isinstance(error, RuntimeError) else None
    if match is None:
        return
    shape = tuple(map(int, re.findall(r"\d+", match[1])))
    weights = {group: _weights_of_shape(group, shape) for group in groups}
    if match.re is _MOVED_ON:
        found, expected = int(match[2]), int(match[3])
        those = [group for group in weights if group.weights.versions.were_resharded(found, expected)]
        # Two groups may have the same versions in memory.
        those = sorted(those, key=lambda group: not weights[group])[:1]
    else:
        those = [group for group in weights if weights[group] and not group.weights.present]
    if those:
        unit = those[0].unit()
        keeps = unit is not None and not unit.reshard_after_forward
        when = " (it stays until the next backward, evaluation or state dict)" if keeps else ""
        alike = " or ".join(weights[those[0]]) or f"(a view of shape {list(shape)})"
        names = list(dict.fromkeys(group.unit_name for group in those))
        more = f" or {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        ways = [] if unit is None or unit.side_doors.choice == "follow" else ['side_doors="follow"']
        ways += [] if keeps else ["reshard_after_forward=False"]
        instead = f"Pass {' or '.join(ways)}, recompute" if ways else "Recompute"
        raise EngineStateError(
            f"{' or '.join(names[:_SHOWN])}{more}: a backward read its weight {alike} after the unit was resharded{when}. Of a gradient "
            'that was taken with create_graph=True (gradients of gradients): pass sharding="optim_grads", which keeps weights whole. Of '
            f"something that its forward computed and did not return, or of torch.func: {instead} the unit (Recompute), or return that "
            "tensor"
        ) from error


def _weights_of_shape(group: ParameterGroup, shape: tuple[int, ...]) -> list[str]:
    """Names of its parameters that have this shape, or are transposed to it."""
    named = {entry.name: tuple(entry.piece.part_shape) for entry in group.entries}
    return [name for name, one in named.items() if one in (shape, shape[::-1])]


def _unit(module: nn.Module, function: str) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise ShardingError(f"{function}: {type(module).__name__} is not sharded; call fully_shard on it first")
    return unit
