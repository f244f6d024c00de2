"""Gradients: those of one group, from what autograd left to what the optimizer steps with.

    cell      extent and dtype                                      full while
    waiting   everything, or the inner shard; main gradient dtype   `no_sync` keeps microbatches that were not reduced, or over the shard
                                                                    axis alone, where the outer axis waits for the last microbatch
    bucket    everything; communication dtype                       a reduction is under way
    main      this rank's rows; main gradient dtype                 some `.grad` is set: what that is made of

A backward moves gradients from autograd, and from layers that write them directly (`DirectWrites`), into the cells:

    synchronized     from                                           to
    nothing          autograd                                       waiting, everything
    shard axis       autograd + waiting                             bucket, reduced over the shard axis into waiting
    both axes        autograd + waiting                             bucket, reduced and added to main
    one rank         autograd                                       main, without a bucket

What waits joins a reduction where it is as far: everything before the reduction over the shard axis, a shard after it. A microbatch that is
not reduced at all joins a shard that waits once that is unreduced again: each rank brings its shard, and zeros for the others.

With several ranks along the outer axis, what the shard axis has reduced is where the outer axis reduces it next: in `main`, if that is
empty and has the same rows and dtype, or in a piece of memory of its own (`Filling.piece`). So the bucket is free for the next unit.

A cell is copied to where it was empty and added to otherwise, and `.grad` alone says whether `main` is empty: so nothing is added to
itself, and nothing is reduced twice. What the user cleared or wrote is read back from `.grad` before anything is added. What waits may lie
in the memory of `main` while that is empty, or in that of the bucket.

A `.grad` that does not lie in `main` was assigned, or lies in an earlier `main`: what `main` receives is added to it in its own memory,
as autograd adds to any gradient. So `main` is left for a new one where memory would be overwritten to which a program may still refer.

Memory exists only while it is needed, that of `main` from backward until all `.grad` were cleared and the next forward begins. It is
allocated on the compute stream, where activations have just made room: memory allocated on the reduce stream would be reserved for that
stream alone. Only results in another dtype, and sums in high precision, belong to the stream that makes them.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.accumulate import accumulate_
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.buffer import FlatBuffer, transient
from lightning_mfsdp.engine.core.held_back import HeldBackGradient
from lightning_mfsdp.engine.core.storage import Slot

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["DirectWrites", "Filling", "Gradients", "MainGradient", "Sync", "add_to_gradient", "gradient_dtype"]


class Sync(Enum):
    """How far gradients of a backward are reduced."""

    NONE = "none"
    SHARD = "shard"
    ALL = "all"


class MainGradient:
    """The cell `main`: the reduced gradient, and `.grad` of local rows, which is a view of it.

    Attributes:
        buffer: Main gradient dtype, extent and position as the main weight. Cells that belong to no parameter are zero.
        of_optimizer: What `.grad` shows: `buffer`, or a copy of it in the dtype that the optimizer requires where that differs.
        news: Parameters, by index, whose gradients were reduced into it since `convert`; `None`: nothing was.

    A program may keep what `.grad` was, or a view of it, and clear `.grad`: references to what lies in it are counted. Those to a gradient
    that is shown do not matter, since that is added to in place.

    It keeps the DTensors that `parameters()` show as gradients, since `zero_grad` reads every one, and creating one takes 3 µs.

    Alternatives considered: buffers and views created for each backward, so that no references are counted (8 more calls of C code for a
    unit of four parameters, which makes 48 in its backward); the getter of `ShardedParameter.grad` recording each read (what
    optimizers step are plain parameters, whose `grad` has no getter).
    """

    def __init__(self, owner: ParameterGroup, dtype: torch.dtype) -> None:
        layout, extent, device = owner.layout, owner.main_extent, owner.device
        self._entries = owner.entries
        self._locals = [entry.local for entry in owner.entries]
        memory, self.buffer = transient(layout, extent, dtype, device)
        self._slots = [memory]
        self.of_optimizer = self.buffer
        if dtype != (wanted := gradient_dtype(owner)):
            memory, self.of_optimizer = transient(layout, extent, wanted, device)
            self._slots.append(memory)
        self.views = self.of_optimizer.views
        self.news: list[int] | None = None
        self._elsewhere: dict[int, Tensor] = {}  # gradients, by index, that `convert` adds to what `.grad` is
        self._shown = [entry.sharded.show_gradient(view) for entry, view in zip(self._entries, self.views, strict=True)]
        self._own_counts, self._own_users = self._counts(), self._users()
        self._own_references = sum(self._own_counts) + self._own_users

    @property
    def is_open(self) -> bool:
        """Whether its memory is allocated."""
        return self._slots[0].is_allocated

    @property
    def is_shown(self) -> bool:
        """Whether the `.grad` of any parameter lies in it."""
        for local, view in zip(self._locals, self.views, strict=True):  # noqa: SIM110 - a generator costs host time, in every unit
            if local.grad is view:
                return True
        return False

    @property
    def is_pinned(self) -> bool:
        """Whether its memory stays where it is."""
        return self._slots[0].fixed

    @property
    def allocated_bytes(self) -> int:
        """Its memory at the moment."""
        return sum(slot.allocated_bytes for slot in self._slots)

    def open(self) -> FlatBuffer:
        """Allocate its memory if necessary; new memory is not initialized."""
        if not self.is_open:
            for slot in self._slots:
                slot.materialize()
        return self.buffer

    @property
    def is_kept(self) -> bool:
        """Whether anything refers to a gradient in it, shown or not, but the parameters' `.grad`."""
        for entry in self._entries:
            if entry.sharded.gradient_rows is not None:
                entry.sharded.forget_former_gradient()
        return not self.is_pinned and sum(self._counts()) + self._users() != self._own_references

    @property
    def is_needed(self) -> bool:
        """Whether the memory of a gradient that was cleared or replaced may still be referenced, so that nothing may be written there."""
        if not self.is_kept:
            return False
        left = [index for index, view in enumerate(self.views) if self._locals[index].grad is not view]
        counts = self._counts()
        # A tensor that shares the memory may be a view of any.
        return any(counts[index] != self._own_counts[index] for index in left) or (
            bool(left) and self._users() != self._own_users
        )

    def close(self) -> None:
        """Free the memory."""
        for slot in self._slots:
            slot.discard()

    def pin(self, pinned: bool) -> None:
        """Keep the memory where it is, or stop doing so."""
        if pinned:
            self.open()
        for slot in self._slots:
            slot.fixed = pinned

    def read_back(self) -> None:
        """Update the buffer from every `.grad` that lies in it: zero where it was cleared or replaced, the user's value where written."""
        if (
            self.of_optimizer is not self.buffer and self.news is None
        ):  # else what the optimizer sees is not converted yet
            for main, seen in zip(self.buffer.segments, self.of_optimizer.segments, strict=True):
                # Where it still equals our rounded copy, keep the unrounded value; elsewhere the user wrote into it.
                torch.where(seen == main.to(seen.dtype), main, seen.to(main.dtype), out=main)
        if gaps := self.buffer.gaps:  # scaling by a NaN norm writes them, clearing in place does not
            compat.foreach_zero_(gaps)
        for local, shown, view in zip(self._locals, self.views, self.buffer.views, strict=True):
            if local.grad is not shown:
                view.zero_()

    def show(self, indices: Sequence[int]) -> None:
        """Gradients of these parameters have been reduced: `.grad` shows them, or `convert` adds them to what it is."""
        self.news = [*(self.news or ()), *indices]
        for index in indices:
            local, view = self._locals[index], self.views[index]
            grad = local.grad
            if grad is None:
                local.grad = view
            elif grad is not view:
                self._elsewhere[index] = grad

    def convert(self) -> list[int]:
        """After the last reduction of a backward, on the compute stream: convert to the optimizer's dtype. Returns whose gradients came."""
        news, self.news = self.news, None
        if news is not None and self.of_optimizer is not self.buffer:
            compat.foreach_copy_(self.of_optimizer.segments, self.buffer.segments)
        if self._elsewhere:
            with torch.no_grad():
                for index, grad in self._elsewhere.items():
                    add_to_gradient(self._locals[index], grad, self.views[index])
            self._elsewhere.clear()
        return news or []

    def set_aside(self) -> list[Tensor]:
        """A copy of it before a replayed graph overwrites it, which leaves zeros; nothing where no `.grad` is set."""
        if not self.is_shown:
            return []
        self.read_back()
        aside = [segment.clone() for segment in self.buffer.segments]
        compat.foreach_zero_(self.buffer.segments)  # a single rank writes only gradients that exist
        return aside

    def add(self, aside: list[Tensor]) -> None:
        """Add what `set_aside` returned to what was written since."""
        accumulate_(self.buffer.segments, aside)
        self.show(())
        self.convert()

    def _users(self) -> int:
        """How many tensors share the memory of what `.grad` shows."""
        return compat.storage_users(self.of_optimizer.segments[0])

    def _counts(self) -> list[int]:
        """How many Python references there are to what `.grad` of each parameter shows, as local rows or as a DTensor."""
        return list(map(operator.add, map(sys.getrefcount, self.views), map(sys.getrefcount, self._shown)))


class Gradients:
    """Accumulates and reduces the gradients of one group.

    Attributes:
        held_back: How far the gradients of earlier backwards were reduced; `Sync.ALL` where none is held back. The same on all ranks.
        held: Parameters of which a gradient is held back, until it is reduced, even if they are frozen meanwhile; the same on all ranks.
            With what their `.grad` was before a stand-in took its place, as long as that is shown.
        unused: Parameters that this rank did not use in the backwards that were, or will be, reduced together; `None` before the first.
        writes: Gradients that layers have written themselves and that were not taken yet; `None` where there are none.
        outside: Whole gradients, by index, that neither autograd nor a layer put where it belongs: of parameters that were used outside of
            a forward (outside.py), and of layers that overwrite (direct_gradients.py).
        hooks: Of parameters, by index; see gradient_hooks.py.
        is_late: There were gradients before this backward was noticed, so what else it brings cannot be told from them.
        is_used_outside: A parameter was used by itself, outside of forwards: at any time gradients may come that autograd does not tell of.
    """

    def __init__(self, owner: ParameterGroup) -> None:
        main_dtype, policy = owner.spec.main_dtype, owner.policy
        self.held_back = Sync.ALL
        self.held: dict[int, Tensor | None] = {}
        self.unused: set[int] | None = None
        self.writes: DirectWrites | None = None
        self.outside: dict[int, Tensor] = {}
        self.hooks = {
            index: hooks
            for index, entry in enumerate(owner.entries)
            if (hooks := compat.take_accumulation_hooks(entry.full))
        }
        self.is_late = False
        self.is_used_outside = False
        self._owner = weakref.ref(owner)
        self._entries = owner.entries
        self._comm_dtype, self._dtype = policy.wire_dtype(main_dtype), policy.sum_dtype(main_dtype)
        self._factor = policy.reduction_factor(owner.mesh.num_ranks)
        self._is_precise = policy.high_precision_reduce and not main_dtype.is_complex
        self._waiting: FlatBuffer | None = None  # not reduced where its extent is full, else over the shard axis
        self._main: MainGradient | None = None  # reduced over all axes: what optimizers read
        # Made once; it has memory while it is reduced, and while gradients wait in it.
        self._bucket: tuple[Slot, FlatBuffer] | None = None
        self._stand_ins: dict[int, HeldBackGradient] = {}  # shown as `.grad` while gradients are held back

    @property
    def _group(self) -> ParameterGroup:
        group = self._owner()
        assert group is not None, "gradients are those of a group"
        return group

    @property
    def main(self) -> MainGradient:
        """Created when the first gradient arrives."""
        if self._main is None:
            self._main = MainGradient(self._group, self._dtype)
        return self._main

    @property
    def was_needed(self) -> bool:
        """Whether a gradient was ever computed."""
        return self._main is not None or self.is_accumulating

    @property
    def is_open(self) -> bool:
        """Whether the main gradient's memory is allocated."""
        return self._main is not None and self._main.is_open

    @property
    def has_news(self) -> bool:
        """Whether autograd, code outside of forwards or a layer left gradients that were not taken yet."""
        with compat.without_torch_function():  # a third of the time of reading attributes of a class of our own
            for entry in self._entries:  # a generator costs host time, in every unit
                if entry.full._grad is not None:
                    return True
        return bool(self.outside) or self.writes is not None

    def begin_backward(self) -> None:
        """A backward begins, or is noticed."""
        if self.held_back is Sync.ALL:
            self.unused = None
        else:
            self.take_back()
        self.is_late = self.has_news
        if self.writes is not None:
            self.writes.complete.clear()

    def are_complete(self) -> bool:
        """Whether the backward that is running will bring no further gradient: of what it reaches, all have come.

        A node where gradients are accumulated runs once in a backward, after all that lead to it.
        """
        if self.is_late or self.is_used_outside:
            return False
        written = () if self.writes is None else self.writes.complete
        with compat.without_torch_function():
            without_gradient = [
                (index, full)
                for index, entry in enumerate(self._entries)
                if (full := entry.full)._grad is None and full.requires_grad
            ]
        for index, full in without_gradient:  # noqa: SIM110 - a generator costs host time, in every unit
            if index not in written and compat.accumulates(full):
                return False
        return True

    def are_due(self) -> bool:
        """Whether the backward that is running reaches one of the parameters."""
        return any(entry.full.requires_grad and compat.accumulates(entry.full) for entry in self._entries)

    @property
    def is_accumulating(self) -> bool:
        """Whether there are gradients that were not reduced over all axes."""
        return self._waiting is not None

    @property
    def bucket_bytes(self) -> int:
        """Memory of the bucket at the moment: while it is reduced, or gradients wait in it."""
        return self._bucket[0].allocated_bytes if self._bucket is not None else 0

    @property
    def allocated_bytes(self) -> int:
        """Memory of all cells at the moment."""
        main, bucket, waiting = self._main, self._bucket, self._waiting
        total = self.bucket_bytes + (main.allocated_bytes if main is not None else 0)
        if waiting and not (main and waiting is main.buffer) and not (bucket and waiting is bucket[1]):
            total += waiting.size_bytes
        return total

    def communicates(self, sync: Sync) -> bool:
        """Whether a backward that synchronizes to this extent reduces these gradients over ranks."""
        group = self._group
        is_reduced = sync is Sync.ALL or (sync is Sync.SHARD and group.placement.gradient)
        return is_reduced and bool(group.mesh.process_groups)

    def begin_anew(self) -> bool:
        """Recreate `main` when the next gradient arrives, perhaps in another dtype. `False`: gradients are held back, so it stays."""
        if self.held_back is not Sync.ALL or self.is_accumulating or self.writes is not None:
            return False
        self._main = None
        return True

    # -- held back, between backwards ----------------------------------------------------------------------------------

    def hold_back(self, sync: Sync) -> None:
        """A backward has ended that reduced only so far: `.grad` becomes a stand-in for the rest, to detect clearing (held_back.py)."""
        group, communicates = self._group, self.communicates(sync)
        outer = group.axes.outer
        if not group.mesh.process_groups or (communicates and (outer is None or outer.size == 1)):
            return
        self.held_back = Sync.SHARD if communicates else Sync.NONE
        earlier, self.held = self.held, {index: self._entries[index].local.grad for index in sorted(self._reduced())}
        for index in self.held.keys() - earlier.keys():
            if index not in self._stand_ins or self._is_stand_in_kept(index):
                self._stand_ins[index] = HeldBackGradient.of(group, index)
        for index in self.held:
            self._entries[index].local.grad = self._stand_ins[index]

    def _is_stand_in_kept(self, index: int) -> bool:
        """Whether a program keeps the last stand-in of a parameter, which then never stands for another gradient."""
        return sys.getrefcount(self._stand_ins[index]) > 2  # that of the dictionary, and that of the call

    def _settle(self, indices: Sequence[int]) -> None:
        """The gradients of these parameters, which were held back, are reduced: who keeps a stand-in has its gradient."""
        for index in indices:
            if self._is_stand_in_kept(index):
                self._stand_ins.pop(index).become(self._entries[index].local.grad)
            del self.held[index]

    def is_held(self, index: int, stand_in: HeldBackGradient) -> bool:
        """Whether a stand-in stands for what is held back now, and was not cleared or replaced."""
        is_shown = self._entries[index].local.grad is stand_in
        # In a backward `.grad` is what it was before, and what was cleared is no longer held.
        return index in self.held and self._stand_ins[index] is stand_in and (is_shown or self.held_back is Sync.ALL)

    def take_back(self) -> Sync:
        """Before anything is added: drop the held-back gradients of parameters whose `.grad` was cleared or replaced meanwhile.

        Returns:
            How far the rest was reduced.
        """
        reached, self.held_back = self.held_back, Sync.ALL
        if reached is Sync.ALL:
            return reached
        changed = [index for index in self.held if self._entries[index].local.grad is not self._stand_ins[index]]
        for index in changed:
            before = self.held.pop(index)
            if before is not None and before is not self._entries[index].local.grad:
                before.fill_(torch.nan)  # for those who keep it: it is all but a gradient, whose other part is dropped
        for index, before in self.held.items():
            self._entries[index].local.grad = before
        self.held = dict.fromkeys(self.held)
        if not self.held:
            self._drop_waiting()
        elif changed:
            if self.unused is not None:
                self.unused.update(changed)
            if self._waiting is not None:
                compat.foreach_zero_([self._waiting.views[index] for index in changed])
        return reached

    def _drop_waiting(self) -> None:
        """Forget what waits; nothing is on its way in the bucket."""
        self.release_bucket()
        self._waiting = self.unused = None
        self.held.clear()

    def is_behind(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is what `.grad` of a parameter was before a stand-in for what is held back took its place, or a view of it."""
        before = self.held.get(index)
        return before is not None and compat.share_storage(before, gradient)

    def zero_held_back(self, index: int) -> None:
        """Zero what is held back of a parameter, and what its `.grad` was before. A rank that used nothing holds nothing."""
        if self._waiting is not None:
            self._waiting.views[index].zero_()
        if (before := self.held.get(index)) is not None:
            before.zero_()

    # -- from autograd, on the compute stream --------------------------------------------------------------------------

    def add_outside(self, index: int, gradient: Tensor) -> None:
        """Add to the whole gradient of a parameter, in the main weight's dtype, in addition to what autograd leaves."""
        if self._entries[index].is_trained:
            earlier = self.outside.get(index)
            self.outside[index] = gradient if earlier is None else earlier + gradient

    def memory_beside(self, index: int, view: Tensor) -> Tensor:
        """Memory for a further gradient of a parameter from a layer that would overwrite that in `view`, to which it is added later."""
        if (earlier := self.outside.get(index)) is not None:
            view.add_(earlier)
        self.outside[index] = torch.empty_like(view)
        return self.outside[index]

    def drop_news(self) -> None:
        """Forget what autograd left: the backward failed, or it is not needed."""
        for entry in self._entries:
            entry.full._grad = None
        self.outside.clear()

    def drop(self) -> None:
        """Forget everything that is not in `main`: the backward it belongs to failed. What was not taken yet stays, see `drop_news`."""
        self.take_back()
        self._drop_waiting()
        self._end_writes()

    def begin_writes(self, sync: Sync) -> DirectWrites:
        """Where layers write in this backward: where gradients wait, or the bucket if only theirs are reduced."""
        if self.writes is None:
            waiting = self._waiting
            if self.communicates(sync) and (waiting is None or waiting.extent != self._group.full_extent):
                self.writes = DirectWrites(self._open_bucket(), is_new=True)
            else:
                target = self._open_unreduced()
                self.writes = DirectWrites(target, is_new=target is not self._waiting)
        return self.writes

    def _end_writes(self) -> tuple[FlatBuffer | None, frozenset[int]]:
        """Where layers have written, and which tensors of it are defined, if not all are."""
        writes, self.writes = self.writes, None
        return (None, frozenset()) if writes is None else (writes.target, writes.end())

    def accumulate(self) -> None:
        """Keep the gradients of this backward, unreduced."""
        grads = self._take()
        self._note_use(grads)
        target, written = self._end_writes()
        if target is None:
            if all(grad is None for grad in grads):
                return
            target = self._open_unreduced()
        copy_or_add(target, grads, overwrite=target is not self._waiting, written=written)
        self._waiting = target

    def collect_alone(self, *, zeros_unused: bool) -> None:
        """One rank: no communication. A parameter without a gradient keeps none, as in plain PyTorch, or gets zeros."""
        grads = self._take()
        target, written = self._end_writes()
        for index in sorted(written):
            assert target is not None, "something was written"
            grad, view = grads[index], target.views[index]
            grads[index] = view if grad is None else view.add_(grad)
        adds = self._open_main(target)
        main, shown = self.main, list[int]()
        if not adds and (gaps := main.buffer.gaps):
            compat.foreach_zero_(gaps)
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, (entry, grad, view) in enumerate(zip(self._entries, grads, main.buffer.views, strict=True)):
            if grad is None:
                if zeros_unused and entry.is_trained and entry.local.grad is None:
                    view.zero_()
                    shown.append(index)
                continue
            targets, sources = added if entry.local.grad is main.views[index] else fresh
            if grad is not view or self._factor != 1.0:
                targets.append(view)
                sources.append(grad if self._factor == 1.0 else grad * self._factor)
            shown.append(index)
        if fresh[0]:
            compat.foreach_copy_(*fresh)
        if added[0]:
            accumulate_(*added)
        main.show(shown)
        if target is not None and target is not main.buffer:
            self.release_bucket()

    def prepare(self, reached: Sync = Sync.NONE) -> Filling:
        """Take all gradients not yet reduced, and allocate the memory they will be reduced in.

        Args:
            reached: `Sync.SHARD`: what waits is reduced over the outer axis alone, between backwards. A rank where it was cleared, or that
                had none, brings zeros.
        """
        group, grads = self._group, self._take()
        adds = self._open_main()
        self._note_use(grads)
        target, written = self._end_writes()
        waiting = self._waiting
        if reached is Sync.SHARD:
            self._waiting = None
            if waiting is None:
                waiting = self._empty(group.inner_extent)
                compat.foreach_zero_(waiting.segments)
            return Filling(grads, waiting, waiting, adds)
        outer, piece = group.axes.outer, None
        fits = not adds and self._comm_dtype == self._dtype  # what is reduced may lie in `main`
        if outer is not None and outer.size > 1 and not (fits and group.main_extent == group.inner_extent):
            piece = self._open_piece()
        if waiting is not None and waiting.extent == group.full_extent:
            self._waiting = None
            target = waiting if waiting.dtype == self._comm_dtype else self._open_bucket()
            return Filling(grads, waiting, target, adds, piece=piece)
        if target is None:
            target = self.main.buffer if fits and group.main_extent == group.full_extent else self._open_bucket()
        return Filling(grads, None, target, adds, written, piece)

    def release_bucket(self) -> None:
        """Free the bucket's memory; the compute stream has waited for the reduction."""
        if self._bucket is not None:
            self._bucket[0].discard()

    def _take(self) -> list[Tensor | None]:
        with compat.without_torch_function():
            taken = [entry.full._grad for entry in self._entries]
            for index, entry in enumerate(self._entries):
                grad = taken[index]
                if grad is not None:
                    full = entry.full
                    full._grad = None
                    if not (full.requires_grad and entry.local.requires_grad):
                        taken[index] = None
                    elif grad.is_sparse:
                        taken[index] = grad.to_dense()
        if self.outside:
            for index, outside in self.outside.items():
                grad = taken[index]
                taken[index] = outside if grad is None else outside + grad
            self.outside.clear()
        return taken

    def _reduced(self) -> set[int]:
        """Parameters whose gradients are reduced: those that are trainable, and those of which one is held back."""
        return {index for index, entry in enumerate(self._entries) if entry.is_trained} | self.held.keys()

    def _note_use(self, grads: list[Tensor | None]) -> None:
        """Remember which parameters this rank has not used since the last reduction, frozen ones too: they may be trained again by then."""
        missing = {index for index, grad in enumerate(grads) if grad is None}
        if missing and self.writes is not None:
            missing -= self.writes.written
        self.unused = missing if self.unused is None else self.unused & missing

    # -- memory of the cells -------------------------------------------------------------------------------------------

    def _empty_main(self, written: FlatBuffer | None = None) -> FlatBuffer | None:
        """The memory of `main` if nothing in it is still needed; `None` otherwise.

        If a cleared gradient is still referenced, it keeps its memory and `main` gets new memory, unless it is `written` already.
        """
        main = self._main or self.main
        if main.is_shown or self._waiting is main.buffer:
            return None
        if main.is_open and main.buffer is not written and main.is_kept:
            self._main = None
            main = self.main
        return main.open()

    def _open_main(self, written: FlatBuffer | None = None) -> bool:
        """Allocate `main`, or update it from the parameters' `.grad`. Returns whether any of them lies in it."""
        if self._empty_main(written) is not None:
            return False
        main = self.main
        if not main.is_shown:  # gradients wait in it
            return False
        if main.is_needed:  # by what was cleared of it
            self._main = None
            self.main.open()
            return False
        main.read_back()
        return True

    def _open_unreduced(self) -> FlatBuffer:
        """Memory for unreduced gradients: where they wait, that of `main` if it is whole and empty, or that of the bucket."""
        group, waiting = self._group, self._waiting
        if waiting is not None and waiting.extent == group.full_extent:
            return waiting
        if group.main_extent == group.full_extent and (main := self._empty_main()) is not None:
            return main
        opened = self._open_bucket() if self._comm_dtype == self._dtype else self._empty(group.full_extent)
        if waiting is not None:  # reduced over the shard axis: this rank brings its shard, the others theirs
            compat.foreach_zero_(opened.segments)
            shard = opened.part(group.inner_extent).segments
            compat.foreach_copy_(shard, waiting.segments)
            for segment in shard:
                segment.div_(self._factor)
            self._waiting = opened
        return opened

    def _empty(self, extent: range, dtype: torch.dtype | None = None) -> FlatBuffer:
        """In the main gradient's dtype, unless another is given."""
        group = self._group
        with torch.inference_mode(False):
            return FlatBuffer.empty(group.layout, extent, dtype or self._dtype, group.device)

    def _open_piece(self) -> FlatBuffer | None:
        """Memory for what is reduced over the shard axis, so that the bucket is free again while the outer axis reduces it.

        `None` where it stays where it is, or is summed in other memory: whole, in high precision, or added to what waits.
        """
        group, waiting = self._group, self._waiting
        is_added = waiting is not None and waiting.extent == group.inner_extent
        if not group.placement.main or self._is_precise or is_added:
            return None
        return self._empty(group.inner_extent, self._comm_dtype)

    def _open_bucket(self) -> FlatBuffer:
        """The bucket, allocated until `release_bucket`."""
        if self._bucket is None:
            group = self._group
            self._bucket = transient(group.layout, group.full_extent, self._comm_dtype, group.device)
        memory, buffer = self._bucket
        memory.materialize()
        return buffer

    def close_main(self) -> None:
        """A pass begins: free the memory of `main` if it is empty, or leave it to the references to a cleared gradient."""
        main = self._main
        if main is not None and main.is_open and not main.is_shown and self._waiting is not main.buffer:
            if main.is_kept:
                self._main = None
            else:
                main.close()

    # -- reductions, on the streams of their axes ----------------------------------------------------------------------

    def reduce(self, filling: Filling, *, outer_later: bool, zeros_unused: bool) -> FlatBuffer | None:
        """Reduce what was prepared over the shard axis, and into `main` if no other rank is along the outer axis. On the reduce stream.

        Returns:
            What the outer axis is to reduce (`reduce_outer`), in memory that the bucket is no part of unless gradients stay whole. `None`:
            nothing; with `outer_later` it waits.
        """
        group, main, adds = self._group, self.main.buffer, filling.adds
        shard, outer = group.axes.shard, group.axes.outer
        if outer is not None and outer.size == 1:
            outer = None
        result = filling.filled()
        if shard.size > 1 and result.extent == group.full_extent:  # else it waited, reduced over the shard axis
            extent = group.inner_extent if group.placement.main else None
            target = filling.piece
            if target is None and not adds and self._waiting is None:
                target = main
            result = reduce_over(shard, result, extent, self._factor, target, precise=self._is_precise)
        if outer is None:
            self._to_main(result, adds=adds, zeros_unused=zeros_unused)
            return None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            accumulate_(waiting.segments, result.segments)
            result = waiting
        wanted = self._dtype if outer_later else self._comm_dtype
        if result.dtype != wanted:
            converted = main if outer_later and main.extent == result.extent and not adds else None
            if converted is None:
                converted = self._empty(result.extent, wanted)
            compat.foreach_copy_(converted.segments, result.segments)
            result = converted
        if outer_later:
            self._waiting = result
            return None
        return result

    def reduce_outer(self, result: FlatBuffer, *, adds: bool, zeros_unused: bool) -> None:
        """Reduce over the outer axis what `reduce` has returned, into `main`. On the stream of that axis."""
        group, outer = self._group, self._group.axes.outer
        assert outer is not None, "it was not reduced over it yet"
        factor = self._factor if group.axes.shard.size == 1 else 1.0  # applied once
        extent = group.main_extent if group.placement.outer_main else None
        target = None if adds else self.main.buffer
        result = reduce_over(outer, result, extent, factor, target, precise=self._is_precise)
        self._to_main(result, adds=adds, zeros_unused=zeros_unused)

    def _to_main(self, result: FlatBuffer, *, adds: bool, zeros_unused: bool) -> None:
        """Copy or add a reduced gradient to `main`, and show it to the optimizer."""
        main, held = self.main, self.held
        if result is not main.buffer:
            if adds:
                accumulate_(main.buffer.segments, result.segments)
            else:
                compat.foreach_copy_(main.buffer.segments, result.segments)
        if self.unused:
            self.unused &= self._reduced()
        undecided = () if zeros_unused or self.unused is None else self.unused
        shown = list[int]()
        for index, entry in enumerate(self._entries):
            is_reduced = (entry.full.requires_grad and entry.local.requires_grad) or index in held
            if is_reduced and index not in undecided:
                shown.append(index)
        main.show(shown)
        if held:
            asked = [] if zeros_unused else self.undecided()
            self._settle([index for index in held if index not in asked])

    def undecided(self) -> list[int]:
        """Parameters that were reduced, unused on this rank: other ranks decide whether they have a gradient (usage.py).

        One that has a gradient from before is asked about for its hooks alone.
        """
        views, hooks = self.main.views, self.hooks
        return [
            index
            for index in sorted(self.unused or ())
            if self._entries[index].local.grad is not views[index] or hooks.get(index)
        ]

    def decide(self, used: Sequence[int]) -> None:
        """Show the gradients of undecided parameters that some rank has used; the others keep none.

        Args:
            used: One for each parameter, 0 where no rank has used it.
        """
        undecided = self.undecided()
        self.main.show([index for index in undecided if used[index]])
        self._settle([index for index in undecided if index in self.held])

    def finish(self) -> list[int]:
        """After the last reduction of a backward, on the compute stream. Returns parameters, by index, whose gradients were reduced."""
        return self._main.convert() if self._main is not None else []


def gradient_dtype(owner: ParameterGroup) -> torch.dtype:
    """Dtype of the gradients that an optimizer sees."""
    return owner.entries[0].local.grad_dtype or owner.spec.main_dtype


def add_to_gradient(parameter: Tensor, grad: Tensor, news: Tensor) -> None:
    """Add to the gradient of a parameter in its own memory, unless it was replaced since; one made in inference mode gets another."""
    if parameter.grad is grad:
        parameter.grad = grad + news if grad.is_inference() else grad.add_(news)


# -- copies ------------------------------------------------------------------------------------------------------------


class Filling(NamedTuple):
    """Gradients on their way into the buffer they are reduced in.

    Kept until the reduction is done: the allocator does not track the reduce stream.

    Attributes:
        grads: One for each parameter, full shapes, where there is one.
        waiting: Those of earlier microbatches, to which `grads` are added first.
        target: What is reduced: full size, in the communication dtype; or what waits for the outer axis alone.
        adds: The reduced gradient is added to what is in `main`.
        written: Which gradients are in the target already.
        piece: Where the shard axis puts what the outer axis reduces next; `None`: into `main`, or nowhere else.
    """

    grads: list[Tensor | None]
    waiting: FlatBuffer | None
    target: FlatBuffer
    adds: bool
    written: frozenset[int] = frozenset()
    piece: FlatBuffer | None = None

    def filled(self) -> FlatBuffer:
        """Copy everything into the target, ready to be reduced.

        Parameters without a gradient count as zero, and so do gaps: every cell is defined. The copies overlap with the rest of the
        backward, whose matrix products leave memory bandwidth unused.
        """
        if self.waiting is None:
            copy_or_add(self.target, self.grads, overwrite=True, written=self.written)
            return self.target
        copy_or_add(self.waiting, self.grads, overwrite=False)
        if self.target is not self.waiting:
            compat.foreach_copy_(self.target.segments, self.waiting.segments)
        return self.target


def copy_or_add(
    target: FlatBuffer, grads: Sequence[Tensor | None], *, overwrite: bool, written: frozenset[int] = frozenset()
) -> None:
    """Copy or add gradients (full shapes, any float dtype) to a full-size buffer; overwriting defines every cell.

    Args:
        target: Full size.
        grads: One for each tensor of the layout.
        overwrite: What `target` holds does not count, except
        written: tensors that are there already.
    """
    views = target.views
    if overwrite and written:
        late = {index: grad for index in sorted(written) if (grad := grads[index]) is not None}
        if late:
            accumulate_([views[index] for index in late], list(late.values()))
        views = [view for index, view in enumerate(views) if index not in written]
        grads = [grad for index, grad in enumerate(grads) if index not in written]
    sources = [grad for grad in grads if grad is not None]
    missing, targets = list[Tensor](), views
    if len(sources) < len(views):
        missing = [view for view, grad in zip(views, grads, strict=True) if grad is None]
        targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
    if not overwrite:
        if sources:
            accumulate_(targets, sources)
        return
    gaps = target.gaps
    if gaps and sources and not missing:
        dtype = sources[0].dtype
        zeros = target.zeros_for_gaps.get(dtype)
        if zeros is None:
            zeros = target.make_zeros_for_gaps(dtype)
        if zeros:
            targets, sources, gaps = targets + gaps, sources + zeros, []
    if undefined := gaps + missing:
        compat.foreach_zero_(undefined)
    if sources:
        compat.foreach_copy_(targets, sources)


def reduce_over(
    axis: Axis, source: FlatBuffer, extent: range | None, factor: float, target: FlatBuffer | None, *, precise: bool
) -> FlatBuffer:
    """Reduce over one axis, on the reduce stream. Collective.

    Args:
        axis: With several ranks.
        source: What is reduced. It may be overwritten.
        extent: What this rank keeps of the result; `None`: all, in place.
        factor: What each rank's source is multiplied by.
        target: Empty memory that the result goes to if it has this extent and dtype.
        precise: Sum in float32.
    """
    if extent is None:
        (axis.all_reduce_high_precision if precise else axis.all_reduce)(source.segments, factor)
        return source
    dtype = torch.float32 if precise else source.dtype
    if target is None or target.extent != extent or target.dtype != dtype:
        fits = dtype == source.dtype
        device = source.segments[0].device
        target = source.part(extent) if fits else FlatBuffer.empty(source.layout, extent, dtype, device)
    reduce = axis.sum_scatter_high_precision if precise else axis.reduce_scatter
    reduce(target.segments, source.segments, factor)
    return target


# -- what layers write -------------------------------------------------------------------------------------------------


class DirectWrites:
    """Gradients that layers wrote into a full-size buffer since the last reduction.

    Attributes:
        target: The buffer.
        is_new: Its other cells are undefined.
        written: Which tensors of the layout were written.
        complete: Those of them of which this backward brings no further gradient.
    """

    def __init__(self, target: FlatBuffer, *, is_new: bool) -> None:
        self.target, self.is_new = target, is_new
        self.written: set[int] = set()
        self.complete: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def open(self, index: int, accumulator: Node) -> tuple[Tensor, bool]:
        """Where a layer writes the gradient of a tensor of the layout, and whether that is undefined memory, to overwrite.

        Args:
            index: Of the tensor.
            accumulator: The node at which autograd would accumulate its gradients. When that runs, this backward brings no more of them.
        """
        is_first = index not in self.written
        if is_first:
            self.written.add(index)
            self._handles.append(accumulator.register_hook(lambda *_: self.complete.add(index)))
        return self.target.views[index], is_first and self.is_new

    def end(self) -> frozenset[int]:
        """Stop watching the backward; returns which tensors' cells of a new buffer are defined."""
        for handle in self._handles:
            handle.remove()
        return frozenset(self.written) if self.is_new else frozenset()
