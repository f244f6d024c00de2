"""GatherOrder: ranks issue the same gathers in the same order, or the step ends with an error that says which rank did what.

With sharded weights a gather needs every rank. If one runs another unit, its gather meets that of the others: they wait for ever, or
units of one size get each other's weights. Every rank knows what followed what before, and as long as all do as before nothing has to
be asked. A rank that is about to do something else cannot know whether the others are, too. So it first does what came last time, as
any rank that did not change its mind will, and contributes bytes that are no weights. If all ranks contributed those, all go on with
something else, and tell each other with what; if not, it raises. The others computed with NaN by then, and fail when this rank has gone.

Where gathers and reductions share a communicator (gloo), reductions are part of the order. One that is due, of a unit that this rank did
not use, is issued at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.buffer import FlatBuffer
from lightning_mfsdp.engine.collectives import Axis
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.group import ParameterGroup

if TYPE_CHECKING:
    from lightning_mfsdp.engine.reduction_schedule import ReductionSchedule

__all__ = ["REDUCTION", "GatherOrder", "naming_others"]

REDUCTION = 2  # beside the planes of a gather, 0 and 1
_KINDS = 3
_NO_WEIGHTS = 0xFF  # every byte: NaN with a payload that no computation makes
_NO_GRADIENT = 64.0  # in every cell; what is summed is exact in every dtype


_Event = tuple[int, str, bool]  # a collective, how far gradients are reduced, and whether a backward runs
_NOTHING: _Event = (-1, "", False)
_MEMORY = 3  # under reentrant checkpointing of pairs, two do not tell what comes next


class GatherOrder:
    """What followed what on this rank, and so on all."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[ParameterGroup]] = []
        # What decides what comes next must be the same on all ranks: what was issued, each with what this rank was doing, and no more.
        self._next: dict[tuple[_Event, ...], _Event] = {}
        self._recent: tuple[_Event, ...] = (_NOTHING,) * _MEMORY
        self._is_needed = False

    def add(self, groups: Sequence[ParameterGroup]) -> None:
        """Number the groups of a unit; all ranks add the same in the same order."""
        for group in groups:
            group.number = len(self._groups)
            self._groups.append(weakref.ref(group))
            self._is_needed = self._is_needed or (
                group.placement.weight and compat.carries_data(group.shard_axis.group)
            )

    def note(self, group: ParameterGroup, kind: int, mode: str) -> None:
        """A collective is about to be issued.

        Args:
            group: Whose; of a reduction, the first one of the unit.
            kind: Plane of a gather, or `REDUCTION`.
            mode: How far gradients are reduced, which decides what comes next.

        Raises:
            EngineStateError: Other ranks issue another one.
        """
        axis = group.shard_axis
        if not self._is_needed or axis.size == 1 or axis.gather_group is not None:
            return
        if kind == REDUCTION and axis.reduce_group is not None:
            return
        context = group.context
        assert context is not None, "a unit of it runs"
        event = (_KINDS * group.number + kind, mode, context.in_backward)
        expected = self._next.get(self._recent)
        while expected is not None and expected != event and self._catches_up(expected[0], context.reductions):
            expected = self._next.get(self._recent)
        if expected != event:
            if not compat.is_capturing(group.device):
                with group.streams.on(group.streams.gather), torch.no_grad():
                    self._agree(event[0], None if expected is None else expected[0])
            self._next[self._recent] = event
        self._recent = (*self._recent[1:], event)

    def _catches_up(self, expected: int, reductions: ReductionSchedule) -> bool:
        group, kind = self._collective(expected)
        return kind == REDUCTION and reductions.reduce_unused(group)

    def _collective(self, number: int) -> tuple[ParameterGroup, int]:
        group = self._groups[number // _KINDS]()
        assert group is not None, "units of a root live as long as it"
        return group, number % _KINDS

    def _agree(self, number: int, expected: int | None) -> None:
        if expected is not None:
            last, kind = self._collective(expected)
            others = self._ranks_that_reduce(last) if kind == REDUCTION else _ranks_that_gather(last)
            if others:
                self._refuse(number, dict.fromkeys(others, expected))
        axis, device = self._collective(number)[0].shard_axis, self._collective(number)[0].device
        found = torch.empty(axis.size, dtype=torch.int64, device=device)
        compat.all_gather_flat(found, torch.tensor([number], device=device), axis.group)
        others_now = {rank: other for rank, other in enumerate(found.tolist()) if other != number}
        if others_now:
            self._refuse(number, others_now)

    def _ranks_that_reduce(self, group: ParameterGroup) -> list[int]:
        """Take part in the reduction of a unit without gradients; returns the positions of all others if one of them gave some."""
        unit = group.unit()
        assert unit is not None, "it was reduced in this root"
        alone = True
        for one in unit.groups:
            if one.shard_axis.size > 1 and unit.context.reductions.communicates(one):
                alone = _all_give_the_same(one) and alone
        axis = group.shard_axis
        return [] if alone else [rank for rank in range(axis.size) if rank != axis.rank]

    def _refuse(self, number: int, others: dict[int, int]) -> NoReturn:
        axis = self._collective(number)[0].shard_axis
        ranks = dist.get_process_group_ranks(axis.group)
        described = "; ".join(f"rank {ranks[rank]} {self._described(other)}" for rank, other in others.items())
        told = (
            f"rank {ranks[axis.rank]} {self._described(number)} where {described}, and with sharded weights all ranks run the same units "
            "in the same order and use their results"
        )
        compat.tell_others(axis.group, told)
        raise EngineStateError(
            f"{told}. Draw what is skipped alike on all ranks, run skipped units and multiply their results by zero, or use "
            'sharding="optim_grads", where weights are whole'
        )

    def _described(self, number: int) -> str:
        group, kind = self._collective(number)
        return f"{'reduces' if kind == REDUCTION else 'gathers'} {group.name}"


class naming_others:  # noqa: N801 - a context manager, written out because it runs around every collective
    """Around a collective of a group: where it fails because another rank went another way, say that."""

    __slots__ = ("_group",)

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, EngineStateError):
            group = self._group
            if told := compat.told_by_others(group.shard_axis.group):
                raise EngineStateError(
                    f"{group.name}: a collective of rank {dist.get_rank()} failed because another rank had gone: {told}"
                ) from error


def _all_give_the_same(group: ParameterGroup) -> bool:
    """Whether nobody brought gradients to a reduction over the shard axis to which all who do something else bring the same number."""
    policy, axis = group.policy, group.shard_axis
    source = FlatBuffer.empty(group.layout, group.full_extent, policy.comm_dtype, group.device)
    for segment in source.segments:
        segment.fill_(_NO_GRADIENT)
    precise, result = policy.high_precision_reduce, source
    if group.placement.main:
        dtype = torch.float32 if precise else source.dtype
        result = FlatBuffer.empty(group.layout, group.inner_extent, dtype, group.device)
        (axis.sum_scatter_high_precision if precise else axis.reduce_scatter)(result.segments, source.segments, 1.0)
    else:
        (axis.all_reduce_high_precision if precise else axis.all_reduce)(source.segments, 1.0)
    expected = torch.full((), _NO_GRADIENT * axis.size, dtype=result.dtype, device=group.device)
    return all(bool((segment == expected).all()) for segment in result.segments)


def _ranks_that_gather(group: ParameterGroup) -> list[int]:
    """Take part in a gather without weights; returns the positions on the shard axis of those that gave some."""
    full = FlatBuffer.empty(group.layout, group.full_extent, group.spec.storage_dtype, group.device)
    own = full.part(group.inner_extent)
    for segment in own.segments:
        segment.view(torch.uint8).fill_(_NO_WEIGHTS)
    axis: Axis = group.shard_axis
    axis.gather(full.segments, own.segments)
    length = len(group.inner_extent)
    gave = [
        torch.stack([(segment.view(torch.uint8) != _NO_WEIGHTS).any() for segment in part.segments]).any()
        for part in (full.part(range(rank * length, (rank + 1) * length)) for rank in range(axis.size))
    ]
    return [rank for rank, weights in enumerate(torch.stack(gave).tolist()) if weights]
