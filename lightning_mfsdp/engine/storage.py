"""Where full-size memory comes from: the caching allocator, or fixed slots planned from a recorded step.

A `Slot` is a place for one full-size buffer (the gathered weights of a group, or its bucket of gradients). Every
`Client` has a slot of its own whose memory exists only while it is held. In pooled mode the holding times of one
training step are recorded and coloured, and from then on clients share a few fixed slots: addresses never change, the
allocator is never called, and reserved memory is peak memory.

The plan is a preference, not a script: nothing replays a recorded sequence. Whoever finds its fixed slot taken (a
validation pass, a skipped layer, a second forward) holds its own slot instead, and the next full step is recorded
again.

Alternatives considered: a private CUDA memory pool (frees fragmentation, keeps the allocator calls and gives no static
addresses); a trace that is replayed call by call (Megatron-FSDP's trace pool: a forward-only pass between two steps
breaks it).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.streams import Event

__all__ = ["Client", "Slot", "SlotPool", "color_intervals"]

_ALIGNMENT_BYTES = 512


class Slot:
    """Memory for one full-size buffer.

    Attributes:
        size_bytes: Room in it.
        fixed: Planned and shared (memory stays), or private to one client (memory only while held).
        released: After the last use of the memory; whoever writes next waits for it.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, fixed: bool) -> None:
        self.size_bytes = size_bytes
        self.fixed = fixed
        self._holder: weakref.ref[Client] | None = None
        self.released: Event = None
        self._device = device
        self._memory: Tensor | None = None

    @property
    def holder(self) -> Client | None:
        """Who holds the slot; not kept alive by it."""
        return self._holder() if self._holder is not None else None

    @holder.setter
    def holder(self, client: Client | None) -> None:
        self._holder = None if client is None else weakref.ref(client)

    @property
    def memory(self) -> Tensor:
        """`[size_bytes]` uint8; the same tensor for the slot's whole life, so views of it stay valid."""
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)
        return self._memory

    @property
    def allocated_bytes(self) -> int:
        """What the slot occupies at the moment."""
        return 0 if self._memory is None else self._memory.untyped_storage().size()

    def materialize(self) -> None:
        """Make sure the memory is there; allocated on the current stream."""
        storage = self.memory.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.size_bytes)

    def discard(self) -> None:
        """Give private memory back to the allocator; fixed memory stays."""
        if not self.fixed and self._memory is not None:
            self._memory.untyped_storage().resize_(0)


@dataclass(eq=False, kw_only=True)
class Client:
    """Someone who needs full-size memory for a while, again and again.

    Attributes:
        name: For messages.
        kind: "weight" and "bucket" never share slots: their memory is written on different streams.
        size_bytes: How much.
        evict: Called when another client must have the slot; gives it up if it only holds it in advance, and says
            whether it did.
    """

    name: str
    kind: Literal["weight", "bucket"]
    size_bytes: int
    evict: Callable[[], bool]
    slot: Slot = field(init=False)
    private: Slot = field(init=False)
    planned: Slot | None = field(init=False, default=None)


class SlotPool:
    """Hands out slots to clients; one for each root."""

    def __init__(self, device: torch.device, *, pooled: bool) -> None:
        self.pooled = pooled
        self._device = device
        self._clients: list[Client] = []
        self._intervals: dict[Client, list[list[float]]] = {}
        self._clock = 0
        self._recording = pooled
        self._fixed: list[Slot] = []
        self._last_release: dict[str, Event] = {}

    def add(self, client: Client) -> None:
        """Make a client known, maybe from the pool of a root that became a nested unit; it starts with its own slot."""
        client.planned = None
        client.private = client.slot = Slot(client.size_bytes, self._device, fixed=False)
        self._clients.append(client)
        self._recording = self.pooled

    @property
    def fixed_bytes(self) -> int:
        """Memory of all fixed slots; 0 until a step has been recorded."""
        return sum(slot.size_bytes for slot in self._fixed)

    @property
    def allocated_bytes(self) -> int:
        """All full-size memory at the moment."""
        return self.fixed_bytes + sum(client.private.allocated_bytes for client in self._clients)

    def acquire(self, client: Client, needed: Slot | None = None, *, apart: bool = False) -> Event:
        """Give the client a slot (`client.slot`); the memory is allocated on the current stream.

        Args:
            client: Holds no slot now.
            needed: The one slot that will do, because saved tensors of a forward point into it.
            apart: Keep out of shared slots: saved tensors of an earlier forward still wait for their backward there.

        Returns:
            An event to wait for before writing.

        Raises:
            EngineStateError: `needed` is in use by somebody else.
        """
        slot = needed or (client.private if apart else client.planned) or client.private
        if apart:
            self._record_again()
        if slot.holder is not None and slot.holder is not client and not slot.holder.evict():
            if needed is not None:
                raise EngineStateError(
                    f"{client.name}: its backward needs the memory its forward used, but {slot.holder.name} holds it. "
                    "This step runs units "
                    'together that ran one after another when the slots were planned; pass storage="dynamic" to fully_shard'
                )
            slot = client.private
            if torch.is_grad_enabled() or compat.backward_task() != -1:
                self._record_again()
        slot.holder = client
        client.slot = slot
        slot.materialize()
        if self._recording:
            self._clock += 1
            self._intervals.setdefault(client, []).append([self._clock, float("inf")])
        return slot.released if slot.fixed else self._last_release.get(client.kind)

    def _record_again(self) -> None:
        self._recording = self.pooled

    def release(self, client: Client, event: Event) -> None:
        """Take the slot back. `event` comes after the last use of the memory."""
        slot = client.slot
        slot.holder = None
        slot.released = event
        self._last_release[client.kind] = event
        slot.discard()
        if self._recording and self._intervals.get(client):
            self._clock += 1
            self._intervals[client][-1][1] = self._clock

    def finish_step(self, event: Event) -> None:
        """A training step is complete: plan fixed slots if they are wanted, not there yet, and nothing is held.

        Args:
            event: After all work issued so far; fixed memory may be reused blocks that earlier kernels still read.
        """
        if not self._recording or any(client.slot.holder is client for client in self._clients):
            return
        # Intervals of earlier recordings stay: a plan must suit every kind of step seen so far.
        intervals, self._recording, self._fixed = self._intervals, False, []
        for kind in ("weight", "bucket"):
            clients = [client for client in intervals if client.kind == kind]
            colors = color_intervals(
                [client.size_bytes for client in clients], [intervals[client] for client in clients]
            )
            for members in colors:
                size = max(clients[index].size_bytes for index in members)
                slot = Slot(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, self._device, fixed=True)
                slot.released = event
                slot.materialize()
                self._fixed.append(slot)
                for index in members:
                    clients[index].planned = slot


def color_intervals(sizes_bytes: Sequence[int], intervals: Sequence[Sequence[Sequence[float]]]) -> list[list[int]]:
    """Partition clients so that no two of one part hold memory at the same time; each part will share a slot.

    Args:
        sizes_bytes: Per client. Large ones are placed first, so that a slot is as large as its first member and little
            is wasted.
        intervals: Per client, its holding times `[start, stop]`; times are distinct integers, an open end is infinite.

    Returns:
        Client indices per slot. For a chain of equal units the number of slots is the most that are ever held at once.
    """
    order = sorted(range(len(sizes_bytes)), key=lambda index: (-sizes_bytes[index], intervals[index][0][0], index))
    slots: list[list[int]] = []
    for index in order:
        for members in slots:
            if not any(_overlap(intervals[index], intervals[other]) for other in members):
                members.append(index)
                break
        else:
            slots.append([index])
    return slots


def _overlap(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> bool:
    return any(a[0] < b[1] and b[0] < a[1] for a in first for b in second)
