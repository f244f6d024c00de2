"""Where full-size memory comes from: the caching allocator, or fixed slots planned from a recorded step.

A `Slot` is a place for one buffer. Gathered weights have a `Client` for each group, which has a slot of its own whose
memory exists only while it is held. In pooled mode the first training step shows which clients hold memory at the same time;
those that never do share a fixed slot from then on. Addresses do not change, the allocator is not called for gathered
weights, and what is reserved is what is used.

Gradients are not planned: they exist only from backward to the optimizer's step, when activations are being freed, so
they live in memory of the caching allocator that activations have just freed (see gradients.py).

The plan is a preference, not a script: nothing replays a recorded sequence. A client that finds its fixed slot taken (a
validation pass, a skipped layer, a second forward) holds its own slot instead; if that was a training step, the next plan
includes it.

Alternatives considered: a private CUDA memory pool (removes fragmentation, keeps the allocator calls and gives no static
addresses); a trace that is replayed call by call (Megatron-FSDP's trace pool: a forward-only pass between two steps
breaks it).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.streams import Event

__all__ = ["Client", "Slot", "SlotPool", "color"]

_ALIGNMENT_BYTES = 512


class Slot:
    """Memory for one buffer, whose views stay valid while the memory is freed and allocated again.

    Attributes:
        size_bytes: Room in it.
        fixed: Its memory stays, since it is planned. Otherwise it has memory only while it is held.
        is_own: It is one client's; others are planned, or were in an earlier plan, and have several.
        holder: The client that holds it, by weak reference: a `Client.reference`.
        released: Event after the last use of the memory; the next writer waits for it.
        is_allocated: It has memory at the moment. Only the slot's own methods change that.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, fixed: bool, memory: Tensor | None = None) -> None:
        self.size_bytes = size_bytes
        self.fixed = fixed
        self.is_own = not fixed
        self.holder: weakref.ref[Client] | None = None
        self.released: Event = None
        self._device = device
        self._memory = memory  # made when it is first needed
        self._storage = None if memory is None else memory.untyped_storage()  # of the memory
        self._own_users = 0  # tensors of its client that share the memory; 0: not counted
        self.is_allocated = memory is not None

    @property
    def memory(self) -> Tensor:
        """`[size_bytes]` uint8; the same tensor for the slot's whole life, so views of it stay valid."""
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)
            self._storage = self._memory.untyped_storage()
            self.is_allocated = True
        return self._memory

    @property
    def allocated_bytes(self) -> int:
        """What the slot occupies at the moment."""
        return 0 if self._storage is None else self._storage.size()

    def materialize(self) -> None:
        """Allocate the memory if necessary, on the current stream."""
        if self.is_allocated:
            return
        if self._storage is None:
            _ = self.memory
        else:
            self._storage.resize_(self.size_bytes)
            self.is_allocated = True

    def retire(self) -> None:
        """No longer fixed. Saved tensors may still point here: their gather allocates the memory again."""
        if self._storage is not None and self._storage.resizable():
            self.fixed = False
            if self.holder is None or self.holder() is None:
                self.discard()

    def count_own_users(self) -> None:
        """Note how many references to the memory belong to its client, before the client shows it to anything for the first time."""
        if self.is_own and not self._own_users:
            self._own_users = compat.storage_users(self.memory)

    @property
    def is_referenced(self) -> bool:
        """Whether anything but its client may refer to the memory: what a program has taken of a weight, or an autograd function keeps."""
        return not self._own_users or compat.storage_users(self.memory) > self._own_users

    def leave(self) -> None:
        """Nothing is written here any more. Memory is freed when nothing refers to it, and work on the current stream has ended."""
        if self._memory is not None and self._memory.is_cuda:
            compat.free_after_work_so_far(self._memory)

    def discard(self) -> None:
        """Return private memory to the allocator; fixed memory stays."""
        if self.is_allocated and not self.fixed and self._storage is not None:
            self._storage.resize_(0)
            self.is_allocated = False


@dataclass(eq=False, kw_only=True)
class Client:
    """A user of full-size memory that acquires and releases it repeatedly.

    Attributes:
        name: For messages.
        size_bytes: How much.
        evict: Called when another client wants the slot, with whether it has to have it; gives it up in that case, and if no unit
            computes with what is in it, and says whether it did.
        slot: What it holds, or held last.
        home: The slot that it takes unless saved tensors point elsewhere: planned, or its own, which has memory only while it is held
            (before the first plan, and where weights come to stay between forward and backward). `None`: no saved tensor points into
            its memory (side_doors.py), so it may be any, and is in no plan.
        reference: Weak reference to itself, for holders that must not keep it alive.
    """

    name: str
    size_bytes: int
    evict: Callable[[bool], bool]
    slot: Slot = field(init=False)
    home: Slot | None = field(init=False)
    reference: weakref.ref[Client] = field(init=False)

    def __post_init__(self) -> None:
        self.reference = weakref.ref(self)


class SlotPool:
    """Hands out slots to clients; one for each root."""

    def __init__(self, device: torch.device, *, pooled: bool) -> None:
        self.pooled = pooled
        self._device = device
        self._clients: list[Client] = []
        # Pairs of clients seen holding memory at the same time, in order of first appearance. It only grows, and only by new pairs.
        self._conflicts: dict[Client, dict[Client, None]] = {}
        self._outdated = False
        self._fixed: list[Slot] = []
        self._last_release: Event = None
        self._held: dict[Client, None] = {}
        self._plan_users: weakref.WeakSet[object] = weakref.WeakSet()

    def add(self, client: Client) -> None:
        """Register a client, maybe from the pool of a root that became a nested unit; it starts with its own slot."""
        client.home = client.slot = self._slot_for(client)
        self._clients.append(client)

    def _slot_for(self, client: Client) -> Slot:
        """A slot of its own."""
        return Slot(client.size_bytes, self._device, fixed=False)

    def unshare(self, client: Client) -> None:
        """A client shares its home with no other from now on, until there is another plan."""
        client.home = self._slot_for(client)

    def exclude_from_plan(self, client: Client) -> None:
        """No saved tensor points into a client's memory any more: it has some while it holds it, and none otherwise."""
        if client.home is not None:
            client.home = None
            self._outdated = True

    @property
    def fixed_bytes(self) -> int:
        """Memory of all fixed slots; 0 until a step has been recorded."""
        return sum(slot.size_bytes for slot in self._fixed)

    @property
    def allocated_bytes(self) -> int:
        """All full-size memory at the moment."""
        own = dict.fromkeys(client.slot for client in self._clients if not client.slot.fixed)
        return self.fixed_bytes + sum(slot.allocated_bytes for slot in own)

    def clear(self, client: Client, needed: Slot | None = None) -> Slot:
        """Choose a slot for a client that holds none, and evict who has it. Called on the stream that reads what is evicted.

        Args:
            client: Will hold it.
            needed: The only usable slot, because saved tensors of a forward point into it.
        """
        slot = needed or client.home
        if slot is not None:
            other = None if slot.holder is None or slot.holder is client.reference else slot.holder()
            # Not every backward shows where it ends. If the evicted weights are read after all, autograd raises (versions.py).
            if other is None or other.evict(needed is not None):
                return slot
        # A new one where the client was at home last: that happens in evaluations that the plan has not seen, since training plans again.
        return client.slot if client.slot.is_own else self._slot_for(client)

    def is_free(self, slot: Slot, client: Client) -> bool:
        """Whether no other client uses it."""
        if slot.holder is None or slot.holder is client.reference:
            return True
        other = slot.holder()
        return other is None or other not in self._held

    def acquire(self, client: Client, slot: Slot, *, training: bool = True) -> Event:
        """Give the client a slot that was cleared for it (`client.slot`); the memory is allocated on the current stream.

        Args:
            client: Holds no slot now.
            slot: Free.
            training: Part of a step that the plan should suit; passes without gradients are not.

        Returns:
            An event to wait for before writing.
        """
        slot.holder = client.reference
        client.slot = slot
        if not slot.is_allocated:
            slot.materialize()
        self._held[client] = None
        if self.pooled and training:
            self._note_conflicts(client)
        return slot.released if slot.fixed else self._last_release

    def _note_conflicts(self, client: Client) -> None:
        """Record which other clients hold memory now: they cannot share a slot."""
        conflicts = self._conflicts.get(client)
        if conflicts is None:
            conflicts = self._conflicts[client] = {}
            self._outdated = True
        for other in self._held:
            if other is not client and other not in conflicts:
                conflicts[other] = None
                self._conflicts.setdefault(other, {})[client] = None
                self._outdated = True

    def pause(self, client: Client) -> None:
        """The client does not use its slot for now, and leaves its values there until another client must have it."""
        self._held.pop(client, None)

    def resume(self, client: Client, *, training: bool) -> None:
        """It uses the slot again in which its values rest; `training` as for `acquire`."""
        self._held[client] = None
        if self.pooled and training:
            self._note_conflicts(client)

    def release(self, client: Client, event: Event) -> bool:
        """Take the slot back. `event` comes after the last use of the memory. Returns whether the memory was left to others."""
        slot = client.slot
        slot.holder = None
        slot.released = event
        self._last_release = event
        self._held.pop(client, None)
        # Ranks may differ in that. It decides about memory alone: no call expects the weights of one without a home in a slot.
        if client.home is None and slot.is_own and slot.is_referenced:
            slot.leave()
            client.slot = self._slot_for(client)
            return True
        if not slot.fixed:
            slot.discard()
        return False

    def forget_events(self) -> None:
        """All work is done: no client has to wait for the last use of a slot."""
        self._last_release = None
        for slot in self._fixed:
            slot.released = None

    def hold_plan(self, user: object) -> None:
        """Something that cannot see a new plan (a CUDA graph) uses the fixed slots, until `let_go_of_plan` or as long as it lives."""
        self._plan_users.add(user)

    def let_go_of_plan(self, user: object) -> None:
        """The opposite of `hold_plan`."""
        self._plan_users.discard(user)

    @property
    def is_plan_held(self) -> bool:
        """Whether fixed slots must stay in place. A client that finds its slot taken then holds memory of its own, every time."""
        return bool(self._plan_users)

    @property
    def is_outdated(self) -> bool:
        """Whether a step showed something that the plan of fixed slots does not include."""
        return self._outdated

    def outdate(self) -> None:
        """Plan again at the end of this step."""
        self._outdated = True

    def described_plan(self) -> list[str]:
        """The fixed slots that the next plan will have: bytes and the clients that share them."""
        return [f"{size}: {', '.join(client.name for client in clients)}" for size, clients in self._coloring()]

    def _coloring(self) -> list[tuple[int, list[Client]]]:
        """Size and clients of each fixed slot."""
        clients = [client for client in self._conflicts if client.home is not None]
        conflicts = [
            {number for number, other in enumerate(clients) if other in self._conflicts[client]} for client in clients
        ]
        slots = []
        for indices in color([client.size_bytes for client in clients], conflicts):
            size = max(clients[index].size_bytes for index in indices)
            slots.append((-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, [clients[index] for index in indices]))
        return slots

    def finish_step(self, event: Event, allocate: Callable[[int], Tensor] | None = None) -> None:
        """A training step is complete: plan fixed slots if it showed anything new and nothing holds the plan.

        That happens once or twice in a training. What the caching allocator keeps of the unplanned step is freed then:
        it lies on the gather stream, where it cannot be reused, and would fragment what the optimizer's state is about to need.

        Args:
            event: After all work issued so far; fixed memory may be reused blocks that earlier kernels still read.
            allocate: Where fixed memory comes from; `None`: the caching allocator.
        """
        if not self._outdated or self.is_plan_held:
            return
        for slot in self._fixed:
            slot.retire()  # the old plan's memory is freed before the new plan's is allocated
        self._outdated, self._fixed = False, []
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        for size_bytes, clients in self._coloring():
            memory = allocate(size_bytes) if allocate is not None else None
            slot = Slot(size_bytes, self._device, fixed=True, memory=memory)
            slot.released = event
            slot.materialize()
            self._fixed.append(slot)
            for client in clients:
                client.home = slot


def color(sizes_bytes: Sequence[int], conflicts: Sequence[set[int]]) -> list[list[int]]:
    """Partition clients so that no two of one part are in conflict; each part will share a slot.

    Args:
        sizes_bytes: Per client, in order of first appearance. Large ones are placed first, so that a slot is as large as
            its first member and little is wasted.
        conflicts: Per client, those that hold memory at the same time; symmetric.

    Returns:
        Client indices per slot. For a chain of equal units the number of slots is the most that are ever held at once.
    """
    order = sorted(range(len(sizes_bytes)), key=lambda index: (-sizes_bytes[index], index))
    slots: list[list[int]] = []
    for index in order:
        free = next((members for members in slots if not conflicts[index].intersection(members)), None)
        if free is None:
            slots.append([index])
        else:
            free.append(index)
    return slots
