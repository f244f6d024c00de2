"""MemoryPlanner: after the first backwards, decides where gathered weights live and which of them stay between forward and backward.

Fixed slots are planned when a step shows something new (storage.py). Memory that would be unused may be spent on weights that
stay gathered: what a step needs is known once two of them have run, the optimizer's state included. What is left then, less a
reserve, goes to units from the last one backwards: their backward comes first, so they hold memory for the shortest time.
All ranks decide alike, because a unit is gathered by all of them or by none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.streams import Event
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.communicators import Channels
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.core.storage import SlotPool

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.unit import Unit

__all__ = ["MemoryPlanner", "spare_bytes", "those_that_fit"]

# Backwards in which all ranks are certain to plan slots at the same time: the first, which shows the units, the second, which shows
# what is prefetched, and the one after the decision which weights stay unsharded.
_PLANNED_TOGETHER = 2
# Part of the device's memory that is left free, for later needs (a larger batch, a metric, another library).
_RESERVE = 0.1


class MemoryPlanner:
    """Plans a root's memory when a backward has ended."""

    def __init__(self, pool: SlotPool, channels: Channels, mesh: Mesh, device: torch.device) -> None:
        self._pool, self._channels, self._mesh, self._device = pool, channels, mesh, device
        self._decided_at: int | None = None

    def after_backward(self, number: int, units: Sequence[Unit], event: Event, *, has_stepped: bool) -> None:
        """Make the decisions that are due.

        Args:
            number: How many backwards have ended.
            units: Of the root, in backward order.
            event: After all work issued so far.
            has_stepped: An optimizer has stepped, so its state exists and a step's memory is known.
        """
        if self._pool.pooled and not self._pool.is_plan_held:
            self._pool.finish_step(event, self._allocator(number, units))
        if has_stepped and self._decided_at is None:
            self._decided_at = number
            if any(unit.reshard_after_forward == "auto" for unit in units):
                self._spend_spare_memory(units)

    def _spend_spare_memory(self, units: Sequence[Unit]) -> None:
        """Let weights of some units stay, in memory that no other unit uses. Collective."""
        wanted = [
            unit
            for unit in units
            if unit.reshard_after_forward == "auto" and unit.full_bytes and not unit.keeps_after_forward
        ]
        count = those_that_fit([unit.full_bytes for unit in wanted], spare_bytes(self._device, self._mesh.all_axes))
        for unit in wanted[:count]:
            unit.stay_unsharded()

    def _allocator(self, number: int, units: Sequence[Unit]) -> Callable[[int], Tensor] | None:
        """Where fixed slots come from: symmetric memory in the first steps, while all ranks plan alike.

        Symmetric memory is made by all ranks together; a plan that changes later may do so on one rank alone.
        """
        if not self._channels.symmetric:
            return None
        after_decision = self._decided_at is not None and number == self._decided_at + 1
        if number > _PLANNED_TOGETHER and not after_decision:
            if self._pool.is_outdated:
                warnings.warn(
                    "fully_shard: this step runs units at the same time that did not do so before, so the slots of gathered weights are "
                    "planned again, in ordinary memory: gathers use the compute cores from now on. Run such a step as one of the first "
                    "two, or do not pass symmetric_memory",
                    stacklevel=2,
                )
            return None
        axis = next((group.axes.shard for unit in units for group in unit.groups), self._mesh.shard)
        own = (self._pool.is_outdated, self._pool.described_plan())
        everyone: list[tuple[bool, list[str]]] = [own for _ in range(axis.size)]
        dist.all_gather_object(everyone, own, group=axis.group)
        if any(outdated for outdated, _ in everyone):
            self._pool.outdate()  # if one plans, all plan: allocating symmetric memory needs all ranks
        return self._channels.allocator(axis) if all(plan == own[1] for _, plan in everyone) else None


def spare_bytes(device: torch.device, axes: Sequence[Axis]) -> int:
    """Free memory of the device, less a reserve; the minimum over all ranks. Collective over `axes`; 0 on CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.tensor(max(0, int(free - _RESERVE * total)), dtype=torch.int64, device=device)
    for axis in axes:
        dist.all_reduce(spare, op=dist.ReduceOp.MIN, group=axis.group)
    return int(spare.item())


def those_that_fit(sizes_bytes: Sequence[int], budget_bytes: int) -> int:
    """How many of the first sizes fit into the budget together."""
    count = 0
    for size in sizes_bytes:
        if size > budget_bytes:
            break
        budget_bytes -= size
        count += 1
    return count
