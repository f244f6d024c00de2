"""StagedGroup: copies the main weight and the optimizer's state of one group to the device for as long as it takes to step them.

    host memory  --copy in-->  staging area  --the optimizer steps, the compute shard is cast-->  staging area  --copy out-->  host memory

While a staged group is shown, the optimizer finds the copies in the staging area under its own parameters and in its own table.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.base.streams import Event
from lightning_mfsdp.engine.core.buffer import FlatBuffer
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.host_memory import aligned
from lightning_mfsdp.engine.core.storage import Slot
from lightning_mfsdp.engine.features.offload.offloaded_state import OffloadedState, StateTensor, state_of

__all__ = ["Area", "Chunk", "StagedGroup"]


class StagedGroup:
    """One group's main weight and state in a staging area.

    Attributes:
        state: What is staged besides the main weight; `None` if the optimizer has no state for the group yet.
        size_bytes: Room it needs.
    """

    def __init__(self, group: ParameterGroup, state: OffloadedState | None) -> None:
        self._group = weakref.ref(group)
        self.state = state
        self._main_bytes = 0 if group.host_buffer is None else group.host_buffer.size_bytes
        self._state_bytes = 0 if state is None else state.memory.size_bytes
        self.size_bytes = aligned(self._main_bytes) + aligned(self._state_bytes)
        self._main: FlatBuffer | None = None
        self._views: list[Tensor] = []

    @property
    def living_group(self) -> ParameterGroup | None:
        """The group that is staged, `None` once it was deleted."""
        return self._group()

    @property
    def group(self) -> ParameterGroup:
        """The group that is staged, for use during a step, which keeps it alive."""
        group = self._group()
        assert group is not None, "the step keeps it alive"
        return group

    def place(self, memory: Tensor) -> None:
        """Take `memory`, `[size_bytes]` uint8, as its room."""
        group, start = self.group, aligned(self._main_bytes)
        self._main_room, self._state_room = memory[: self._main_bytes], memory[start : start + self._state_bytes]
        if group.host_buffer is not None:
            self._main = FlatBuffer.over(group.layout, group.main_extent, self._main_room.view(group.spec.main_dtype))
            _ = self._main.views  # created now, and not while the optimizer steps
        if self.state is not None:
            self._views = self.state.views_in(self._state_room)

    def bring(self) -> None:
        """Copy everything to the device, on the current stream."""
        host_buffer = self.group.host_buffer
        if host_buffer is not None:
            self._main_room.copy_(host_buffer.host, non_blocking=True)
        if self.state is not None:
            self._state_room.copy_(self.state.memory.host, non_blocking=True)

    def show(self, optimizer: Optimizer) -> None:
        """Show the optimizer the copies in the room."""
        if self._main is not None:
            _point(self.group, self._main)
        if self.state is not None:
            self.state.show(optimizer, self._views)

    def finish(self, optimizer: Optimizer) -> list[StateTensor]:
        """Bring the compute shard up to date after the step.

        Returns:
            All state, if it does not fit what was staged (it is new, or some was added or removed); otherwise nothing.
        """
        if self._main is not None:
            self.group.weights.cast_from(self._main)
        if self.state is not None:
            self.state.keep_in(optimizer, self._views)
        state_tensors = state_of(optimizer, self.group)
        return state_tensors if self.state is None or not self.state.is_all(state_tensors, self._views) else []

    def take_back(self, *, with_state: bool) -> None:
        """Copy to host memory, on the current stream."""
        host_buffer = self.group.host_buffer
        if host_buffer is not None:
            host_buffer.host.copy_(self._main_room, non_blocking=True)
        if self.state is not None and with_state:
            self.state.memory.host.copy_(self._state_room, non_blocking=True)

    def hide(self, optimizer: Optimizer) -> None:
        """Show the optimizer, and all other code, what is in host memory."""
        host_buffer = self.group.host_buffer
        if host_buffer is not None:
            _point(self.group, self.group.main)
        if self.state is not None:
            self.state.replace(optimizer, self._views)


def _point(group: ParameterGroup, main: FlatBuffer) -> None:
    """Let the parameters that optimizers hold be views of `main`."""
    with torch.inference_mode(False), torch.no_grad():
        for entry, view in zip(group.entries, main.views, strict=True):
            entry.local.data = view


@dataclass(eq=False)
class Area:
    """Staging memory that chunks use in turn.

    Attributes:
        slot: The memory; allocated during a step only.
        left: Event after everything in it was copied out.
        kept: What is still being copied out and not referenced elsewhere.
    """

    slot: Slot
    left: Event = None
    kept: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Chunk:
    """Groups that are staged together.

    Attributes:
        staged_groups: Of each.
        area: Where they are staged.
        arrived: Event after they were copied in.
    """

    staged_groups: list[StagedGroup]
    area: Area
    arrived: Event = None

    @staticmethod
    def plan(staged_groups: list[StagedGroup], device: torch.device, *, together_bytes: int, areas: int) -> list[Chunk]:
        """Put neighboring groups together up to `together_bytes`, and assign `areas` staging areas to the chunks in turn."""
        together: list[list[StagedGroup]] = []
        room = 0
        for staged in staged_groups:
            room -= staged.size_bytes
            if room < 0 or not together:
                together.append([])
                room = together_bytes - staged.size_bytes
            together[-1].append(staged)
        sizes = [sum(staged.size_bytes for staged in members) for members in together]
        staging_areas = [
            Area(Slot(max(sizes[turn::areas]), device, fixed=False)) for turn in range(min(areas, len(sizes)))
        ]
        chunks = [Chunk(members, staging_areas[number % areas]) for number, members in enumerate(together)]
        for chunk in chunks:
            start = 0
            for staged in chunk.staged_groups:
                staged.place(chunk.area.slot.memory[start : start + staged.size_bytes])
                start += staged.size_bytes
        for area in staging_areas:
            area.slot.discard()  # views stay valid
        return chunks
