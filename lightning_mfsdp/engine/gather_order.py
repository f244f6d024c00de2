"""GatherOrder: the collectives of a root's units in the order that all ranks share, where weights are sharded.

What to issue next is decided in order.py. Here is what its events are, how ranks tell each other what they want, and what a rank issues
for the others: a gather whose result it drops, a reduction of a unit that it did not use.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.collectives import Mesh
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.order import BACKWARD, KINDS, NOTHING, PAUSE, REDUCTION, SharedOrder, Want
from lightning_mfsdp.engine.streams import Streams

if TYPE_CHECKING:
    from lightning_mfsdp.engine.context import Context
    from lightning_mfsdp.engine.group import ParameterGroup
    from lightning_mfsdp.engine.unit import Unit

__all__ = ["GatherOrder"]

_ASKING_S = 0.002


class GatherOrder:
    """What the units of one root issue, as all ranks do.

    Args:
        context: Of the root.
        mesh: Of the root. Ranks along its shard axis agree.
        streams: Of the root.

    Attributes:
        is_on: Some weights are sharded over several ranks. Otherwise ranks may do what they like.
    """

    def __init__(self, context: Context, mesh: Mesh, streams: Streams) -> None:
        self.is_on = False
        self._is_stopped = mesh.shard.size == 1 or not compat.carries_data(mesh.shard.group)
        self._ranks = _Ranks(context, mesh, streams)
        self._order = SharedOrder(self._ranks)
        self._is_open = False

    def add(self, unit: Unit, *, is_root: bool) -> None:
        """Number the groups of a unit: as all ranks take units in, but for the root, which runs first."""
        known, new = self._ranks.groups, [weakref.ref(group) for group in unit.groups]
        self._ranks.groups = new + known if is_root else known + new
        for number, reference in enumerate(self._ranks.groups):
            if (group := reference()) is not None:
                group.number = number
        sharded = any(group.placement.weight and group.shard_axis.size > 1 for group in unit.groups)
        self.is_on = not self._is_stopped and (self.is_on or sharded)

    def stop(self) -> None:
        """Let ranks do what they like from now on. All ranks do so at the same time."""
        self.is_on, self._is_stopped = False, True

    # -- what this rank does -------------------------------------------------------------------------------------------

    def gathers(self, group: ParameterGroup, *, for_backward: bool) -> None:
        """This rank is about to gather sharded weights.

        Raises:
            EngineStateError: The others do something else, and will not come to this.
        """
        self._order.note(_gather_of(group, for_backward=for_backward))

    def allows(self, group: ParameterGroup, *, for_backward: bool) -> bool:
        """Whether weights may be gathered in advance."""
        if not (self.is_on and group.placement.weight):
            return True
        return self._order.allows(_gather_of(group, for_backward=for_backward))

    def reduces(self, unit: Unit) -> None:
        """This rank is about to reduce gradients.

        Raises:
            EngineStateError: The others do something else, and will not come to this.
        """
        if self.is_on:
            self._order.note(_reduction_of(unit))

    def expects(self, unit: Unit) -> bool:
        """Whether it is known that the gradients of a unit are to be reduced now."""
        return self.is_on and self._order.expects(_reduction_of(unit))

    def begin(self) -> None:
        """A forward or a backward begins; what was open before is over."""
        if self.is_on:
            self.end()
            self._is_open = True

    def end(self) -> None:
        """A forward or a backward is over: take part in what is left of it on other ranks."""
        if self.is_on and self._is_open:
            self._is_open = False
            self._order.note(PAUSE)
            self._ranks.forget_early()

    def told(self) -> str:
        """What a rank that could not go on left word of; empty if there is nothing."""
        return self._ranks.told() if self.is_on else ""


def _gather_of(group: ParameterGroup, *, for_backward: bool) -> int:
    phase = 0 if compat.backward_task() == -1 else BACKWARD
    return KINDS * group.number + phase + group.spec.plane(for_backward=for_backward)


def _reduction_of(unit: Unit) -> int:
    return KINDS * unit.groups[0].number + REDUCTION


class _Ranks:
    """The ranks along the shard axis; see `order.Others`."""

    def __init__(self, context: Context, mesh: Mesh, streams: Streams) -> None:
        self.groups: list[weakref.ref[ParameterGroup]] = []
        self._context = weakref.ref(context)
        self._axis, self._device = mesh.shard, context.device
        self._streams = streams
        self._name = ""  # of this order, on all its ranks and in no other
        self._last_place = ""
        self._with_early: list[weakref.ref[ParameterGroup]] = []

    @property
    def size(self) -> int:
        return self._axis.size

    @property
    def context(self) -> Context:
        context = self._context()
        assert context is not None, "a unit of it runs"
        return context

    def _of(self, event: int) -> tuple[ParameterGroup, Unit]:
        group = self.groups[event // KINDS]()
        assert group is not None, "units of a root live as long as it"
        unit = group.unit()
        assert unit is not None, "units of a root live as long as it"
        return group, unit

    # -- what ranks say ------------------------------------------------------------------------------------------------

    def exchange(self, want: Want) -> list[Want]:
        """All ranks come here, because what they know says so."""
        streams, axis = self._streams, self._axis
        with streams.on(streams.gather), torch.inference_mode(False), torch.no_grad():
            row = torch.tensor([*want, random.SystemRandom().getrandbits(62)], device=self._device)
            found = torch.empty(axis.size * len(row), dtype=row.dtype, device=self._device)
            compat.all_gather_flat(found, row, axis.group)
            rows = found.view(axis.size, -1).tolist()
        self._name = self._name or f"lightning_mfsdp/order/{rows[0][-1]:x}"
        return [Want(*row[:-1]) for row in rows]

    def announce(self, place: str) -> None:
        compat.default_store().add(f"{self._name}/{place}", 1)

    def announced(self, place: str) -> int:
        self._streams.wait_for_collectives()
        store = compat.default_store()
        if self._last_place:  # all who counted there have read it, since they have issued what came through now
            store.delete_key(f"{self._name}/{self._last_place}")
        self._last_place = place
        return int(store.add(f"{self._name}/{place}", 0))

    def wait_for_all(self, place: str) -> None:
        self.announce(place)
        until = time.monotonic() + compat.default_store().timeout.total_seconds()
        while self.announced(place) < self.size:
            if time.monotonic() > until:
                self.refuse(PAUSE, None, ())
            time.sleep(_ASKING_S)
            self._last_place = ""

    def told(self) -> str:
        return compat.word_in_store(f"{self._name}/word") if self._name else ""

    def refuse(self, want: int, expected: int | None, others: Sequence[int]) -> NoReturn:
        """Tell the others why, and raise."""
        ranks = dist.get_process_group_ranks(self._axis.group)
        here = ranks[self._axis.rank]
        if others:
            found = "; ".join(f"rank {ranks[rank]} {self._described(event)}" for rank, event in enumerate(others))
        else:
            passed = "" if expected is None else f" and {self._described(expected)}"
            found = f"rank {here} {self._described(want)} where another rank goes on as in earlier passes{passed}"
        told = (
            f"{found}. With sharded weights a rank may leave out units that others run in the order of earlier passes, and no more than that"
        )
        compat.default_store().set(f"{self._name}/word", told)
        raise EngineStateError(
            f"{told}. Let all ranks run what only one of them needs and multiply its result by zero, or use "
            'sharding="optim_grads", where weights are whole and ranks may run any units in any order'
        )

    def _described(self, event: int) -> str:
        if event == PAUSE:
            return "has ended its forward or backward"
        group, unit = self._of(event)
        if event & REDUCTION:
            return f"reduces gradients of {unit.name}"
        return f"gathers weights of {group.name} {'in backward' if event & BACKWARD else 'in forward'}"

    # -- what is done for others ---------------------------------------------------------------------------------------

    def possible_reduction(self) -> int:
        context = self.context
        unit = context.reductions.due_unit() if context.in_backward else None
        return NOTHING if unit is None else _reduction_of(unit)

    def is_seen_by_all(self, event: int) -> bool:
        group, _ = self._of(event)
        return group.shard_axis.size == self.size

    def is_needless(self, event: int) -> bool:
        group, unit = self._of(event)
        return group.has(event % BACKWARD) or bool(event & BACKWARD and unit.is_done)

    def take_part(self, event: int) -> None:
        group, unit = self._of(event)
        if event & REDUCTION:
            self.context.reductions.reduce_now(unit)
            return
        plane = event % BACKWARD
        keeps = bool(event & BACKWARD) and not self.is_needless(event)
        if keeps:
            self._with_early.append(weakref.ref(group))
        self.context.take_part(group, plane, keeps=keeps)

    def forget(self, event: int) -> None:
        group, _ = self._of(event)
        group.forget_early()

    def forget_early(self) -> None:
        """What was gathered for others and might have been of use here is dropped."""
        while self._with_early:
            if (group := self._with_early.pop()()) is not None:
                group.forget_early()

    def spoil(self, event: int) -> None:
        _, unit = self._of(event)
        self.context.reductions.spoil(unit)

    def unused(self, seen: set[int]) -> list[tuple[int, int]]:
        found = []
        for number, reference in enumerate(self.groups):
            group = reference()
            unit = group.unit() if group is not None and group.placement.weight and number not in seen else None
            if unit is not None and unit is not self.context.root:
                found.append((number, unit.groups[0].number))
        return found
