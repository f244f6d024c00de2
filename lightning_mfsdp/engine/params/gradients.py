"""The gradients of one group, from autograd to the optimizer.

    full gradients          compute dtype, left by autograd on the full parameters, unless layers write them below (direct_gradients.py)
      | copied into the bucket (communication dtype, full size, a slot held around the reduction)
      | or, without synchronisation, added to `unreduced` (main gradient dtype, full size)
    reduced over the shard axis
      | added to `partial` while the outer axis waits for the last microbatch
    reduced over the outer axis
      | copied to the main gradient, or added to it if one is there
    main gradient           main gradient dtype, this rank's shard

What is there and what is not is known exactly: a reduced gradient is copied when the optimizer's gradient was cleared
and added otherwise. Adding an accumulated gradient back to itself, or reducing a reduced one again, cannot happen.

Memory exists only while it is needed, the main gradient's from backward until the optimizer's gradients were cleared and the
next forward begins. All of it is allocated on the compute stream, where activations have just made room: memory
allocated on the reduce stream would be reserved for that stream alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.memory.buffer import FlatBuffer, transient
from lightning_mfsdp.engine.memory.storage import Slot
from lightning_mfsdp.engine.params.group import ParameterGroup
from lightning_mfsdp.engine.params.held_back import HeldBackGradient, stand_in

__all__ = ["DirectWrites", "Filling", "Gradients"]


class Gradients:
    """Accumulates, reduces and exposes the gradients of one group.

    Attributes:
        main: The main gradient, extent and position as the main weight. Cells that belong to no parameter are zero.
        is_alone: There is no other rank: nothing to communicate.
        exposed: What the optimizer sees: `main`, or its copy in the dtype that the optimizer wants (decoupled.py) where that differs.
        holds_bucket: Whether the bucket's memory is still needed.
        undecided: Parameters that were reduced and that this rank did not use: other ranks say whether they have a gradient (usage.py).
        filled: Parameters that this rank did not use and that got zeros in the last reduction, unless another rank used them.
        writes: Gradients that layers write themselves (direct_gradients.py).
        frozen_since: Parameters of which a gradient was held back before they were frozen; it is reduced all the same. Known to all ranks.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        policy, layout, mesh = group.policy, group.layout, group.mesh
        self.comm_dtype = policy.wire_dtype(group.spec.main_dtype)
        self.main_dtype = policy.sum_dtype(group.spec.main_dtype)
        self._factor = policy.reduction_factor(mesh.num_ranks)
        self.is_alone = not mesh.axes
        self.main_memory, self.main = transient(layout, group.main_extent, self.main_dtype, group.device)
        self._exposed_memory, self.exposed = self.main_memory, self.main
        exposed_dtype = group.gradient_dtype
        if self.main_dtype != exposed_dtype:
            exposed = transient(layout, group.main_extent, exposed_dtype, group.device)
            self._exposed_memory, self.exposed = exposed
        self.faces = self.exposed.views
        self._locals = [entry.local for entry in group.entries]
        self._own_references = self._references()
        self._fresh = False
        self._adds = False
        self._unreduced: FlatBuffer | None = None
        self._kept: FlatBuffer | None = None
        self._partial: FlatBuffer | None = None
        self._bucket_memory: Slot | None = None
        self._bucket_buffer: FlatBuffer | None = None
        self.holds_bucket = False
        self.writes = DirectWrites()
        self._stand_ins: list[HeldBackGradient] = []
        self._behind: dict[int, Tensor | None] | None = None
        self._unused: set[int] | None = None
        self.undecided: list[int] = []
        self.filled: frozenset[int] = frozenset()
        self.frozen_since: set[int] = set()

    # -- on the compute stream -----------------------------------------------------------------------------------------

    def show_held_back(self) -> None:
        """A backward has ended: `.grad` stands for what is held back, so that clearing it is noticed (held_back.py)."""
        if self.is_alone or self._behind is not None:
            return
        entries = self.group.entries
        if not self._stand_ins:
            self._stand_ins = [stand_in(self.group, index) for index in range(len(entries))]
        self._behind = {index: entries[index].local.grad for index in sorted(self._wanted())}
        for index in self._behind:
            entries[index].local.grad = self._stand_ins[index]

    def settle_held_back(self) -> None:
        """Something is about to be added: drop what is held back of parameters whose `.grad` was cleared or replaced meanwhile."""
        if self._behind is None:
            return
        behind, self._behind = self._behind, None
        changed: list[int] = []
        self.frozen_since.clear()
        for index, before in behind.items():
            entry = self.group.entries[index]
            if entry.local.grad is not self._stand_ins[index]:
                changed.append(index)
                continue
            entry.local.grad = before
            if not entry.is_trained:
                self.frozen_since.add(index)
        if len(changed) == len(behind):
            self._unreduced = self._partial = self._unused = None
        elif self._unused is not None:
            self._unused.update(changed)
        for buffer in (self._unreduced, self._partial):
            if buffer is not None and changed:
                compat.foreach_zero_([buffer.views[index] for index in changed])

    def zero_held_back(self, index: int) -> None:
        """Make what is held back of a parameter zeros, and what its `.grad` was before. A rank that used nothing holds nothing."""
        before = self._behind[index] if self._behind is not None else None
        for buffer in (self._unreduced, self._partial):
            if buffer is not None:
                buffer.views[index].zero_()
        if before is not None:
            before.zero_()

    def drop(self) -> None:
        """Forget everything that is not reduced: the backward it belongs to failed."""
        self.settle_held_back()
        self.frozen_since.clear()
        self._unreduced = self._partial = self._unused = None
        self.undecided = []
        self.writes.end()

    def begin_writes(self, *, communicates: bool, wanted: bool) -> None:
        """Choose where layers write, if they did not begin to: what is unreduced, or the bucket if this backward `communicates`.

        What is not wanted goes to memory of its own.
        """
        if self.writes.target is not None:
            return
        if not wanted:
            self.writes.begin(self._more_memory(), is_new=True)
            return
        if self.is_alone:
            free = self._main_is_free()
            self.writes.begin(self.open_main() if free else self._more_memory(), is_new=True)
            return
        is_new = self._unreduced is None
        if is_new and communicates:
            self.writes.begin(self._bucket(), is_new=True)
            return
        if self._unreduced is None:
            self._unreduced = self._full_size_memory()
        self.writes.begin(self._unreduced, is_new=is_new)

    def open_main(self) -> FlatBuffer:
        """The main gradient with memory behind it; what it holds is undefined where there was none."""
        if not self.main_memory.is_there:
            self.main_memory.materialize()
            if self._exposed_memory is not self.main_memory:
                self._exposed_memory.materialize()
        return self.main

    def _open_for_this_backward(self) -> None:
        """Have memory for the main gradient, with what the parameters' `.grad` say in it if they say anything."""
        was_open = self.is_open
        self.open_main()
        self._adds = self._has_main()
        if self._adds:
            if not was_open:  # the user's own gradients, set where there were none
                compat.foreach_zero_(self.main.segments)
            self._settle_main()

    @property
    def is_open(self) -> bool:
        """Whether the main gradient has memory."""
        return self.main_memory.is_there

    def pin_main(self, pinned: bool) -> None:
        """Keep the main gradient's memory where it is, or stop doing so."""
        if pinned:
            self.open_main()
        self.main_memory.fixed = self._exposed_memory.fixed = pinned

    @property
    def waits_for_outer_axis(self) -> bool:
        """Whether gradients that are reduced over the shard axis are not all there is."""
        outer = self.group.axes.outer
        return outer is not None and outer.size > 1

    @property
    def holds_back(self) -> bool:
        """Whether gradients wait for a later reduction."""
        return self._unreduced is not None or self._partial is not None

    def keep_main(self) -> list[Tensor]:
        """A copy of the main gradient before a replayed graph overwrites it; empty where the optimizer's gradients were cleared."""
        if not self._has_main():
            return []
        self._settle_main()
        kept = [segment.clone() for segment in self.main.segments]
        compat.foreach_zero_(self.main.segments)  # one rank alone writes only gradients that are there
        return kept

    def add_to_main(self, kept: list[Tensor]) -> None:
        """Add what `keep_main` returned to what was written since."""
        compat.foreach_add_(self.main.segments, kept)
        self._fresh = True
        self.finish()

    def close_main(self) -> None:
        """Give the main gradient's memory back if the optimizer's gradients were cleared and nobody else kept one."""
        if not (self.is_open and self._main_is_free()):
            return
        for entry in self.group.entries:
            if entry.sharded._grad_face is not None:
                entry.sharded.forget_grad_face()
        if self._references() == self._own_references:
            self.main_memory.discard()
            if self._exposed_memory is not self.main_memory:
                self._exposed_memory.discard()

    def _take(self) -> list[Tensor | None]:
        taken: list[Tensor | None] = []
        for entry in self.group.entries:
            full = entry.full
            grad = full.grad
            if grad is not None:
                full.grad = None
                if not (full.requires_grad and entry.local.requires_grad):
                    grad = None
                elif grad.is_sparse:
                    grad = grad.to_dense()
            taken.append(grad)
        if self.group.gradients_outside:
            for index, outside in self.group.gradients_outside.items():
                grad = taken[index]
                taken[index] = outside if grad is None else outside + grad
            self.group.gradients_outside.clear()
        return taken

    def _wanted(self) -> set[int]:
        """Parameters whose gradients are reduced: those that are trained, and those that were when a gradient was held back."""
        return {index for index, entry in enumerate(self.group.entries) if entry.is_trained} | self.frozen_since

    def _note_use(self, grads: list[Tensor | None]) -> None:
        """Remember which parameters this rank has not used since the last reduction."""
        missing = {index for index, grad in enumerate(grads) if grad is None}
        if missing:
            missing &= self._wanted()
            missing -= self.writes.written
        self._unused = missing if self._unused is None else self._unused & missing

    def accumulate(self) -> None:
        """Keep the gradients of this backward unreduced, in the main gradient dtype."""
        grads = self._take()
        assert self.writes.target in (None, self._unreduced), "layers write where this backward keeps its gradients"
        first = self._unreduced is None or self.writes.is_new
        self._note_use(grads)
        written = self.writes.end()
        if self._unreduced is None:
            if all(grad is None for grad in grads):
                return
            self._unreduced = self._full_size_memory()
        copy_or_add(self._unreduced, grads, overwrite=first, written=written)

    def _full_size_memory(self) -> FlatBuffer:
        """Where unreduced gradients go.

        The main gradient itself if it is whole and empty. Other memory stays where gradients are placed whole.
        """
        group = self.group
        if group.main_extent == group.full_extent and self._main_is_free():
            return self.open_main()
        if self._kept is not None:
            return self._kept
        made = self._more_memory()
        if not group.placement.gradient:
            self._kept = made
        return made

    def _more_memory(self) -> FlatBuffer:
        with torch.inference_mode(False):
            return FlatBuffer.empty(self.group.layout, self.group.full_extent, self.main_dtype, self.group.device)

    def prepare(self) -> Filling:
        """Take all gradients not yet reduced, and hold of the memory they will be reduced in."""
        group = self.group
        grads = self._take()
        self._open_for_this_backward()
        unreduced, self._unreduced = self._unreduced, None
        self._note_use(grads)
        target, written = self.writes.target, self.writes.end()
        if unreduced is None and target is not None:
            return Filling(grads, None, target, written)
        if unreduced is not None and unreduced.dtype == self.comm_dtype:
            return Filling(grads, unreduced, unreduced)
        in_place = (
            unreduced is None
            and group.main_extent == group.full_extent
            and self.comm_dtype == self.main_dtype
            and self._main_is_free()
        )
        return Filling(grads, unreduced, self.main if in_place else self._bucket())

    def prepare_partial(self) -> None:
        """Have memory for `reduce_partial`. What was cleared since counts as zero: the others reduce it as well."""
        self._open_for_this_backward()
        if self._partial is None:
            self._unused = self._wanted()
            with torch.inference_mode(False):
                group = self.group
                self._partial = FlatBuffer.zeros(group.layout, group.inner_extent, self.main_dtype, group.device)

    def _bucket(self) -> FlatBuffer:
        """Full-size memory in the communication dtype, until `release_bucket`."""
        group = self.group
        self.holds_bucket = True
        if self._bucket_memory is None or self._bucket_buffer is None:
            made = transient(group.layout, group.full_extent, self.comm_dtype, group.device)
            self._bucket_memory, self._bucket_buffer = made
        self._bucket_memory.materialize()
        return self._bucket_buffer

    def release_bucket(self) -> None:
        """Give the bucket's memory back; the compute stream has waited for the reduction."""
        if self.holds_bucket and self._bucket_memory is not None:
            self._bucket_memory.discard()
        self.holds_bucket = False

    def collect_alone(self, *, zeros_unused: bool) -> None:
        """One rank: no bucket and no communication. A parameter without a gradient keeps none, as in plain PyTorch, or gets zeros."""
        grads = self.writes.joined(self._take())
        self._open_for_this_backward()
        self._fresh = True
        begins = not self._has_main()
        if begins and (gaps := self.main.gaps):
            compat.foreach_zero_(gaps)
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for entry, grad, view, face in zip(self.group.entries, grads, self.main.views, self.faces, strict=True):
            if grad is None:
                if zeros_unused and entry.is_trained and entry.local.grad is None:
                    view.zero_()
                    entry.local.grad = face
                continue
            targets, sources = fresh if entry.local.grad is None else added
            if grad is not view or self._factor != 1.0:
                targets.append(view)
                sources.append(grad if self._factor == 1.0 else grad * self._factor)
            entry.local.grad = face
        if fresh[0]:
            compat.foreach_copy_(*fresh)
        if added[0]:
            compat.foreach_add_(*added)

    # -- on the reduce stream ------------------------------------------------------------------------------------------

    def reduce(self, source: FlatBuffer, *, outer_later: bool, zeros_unused: bool) -> bool:
        """Reduce a full-size buffer into the main gradient, or as far as the shard axis with `outer_later`.

        Returns:
            Whether it is in the main gradient. Then `undecided` are waiting, unless unused parameters get zeros.
        """
        shard, outer = self.group.axes.shard, self.group.axes.outer
        outer_waits = self.waits_for_outer_axis
        factor, result = self._factor, source
        if shard.size > 1:
            result = self._over_shard_axis(source, final=not outer_waits, factor=factor)
            factor = 1.0
        if outer is not None and outer_waits:
            if outer_later:
                self._keep_partial(result)
                return False
            result = self._over_outer_axis(result, factor)
        self._to_main(result, zeros_unused)
        return True

    def _over_shard_axis(self, source: FlatBuffer, *, final: bool, factor: float) -> FlatBuffer:
        group, axis, precise = self.group, self.group.axes.shard, self.group.policy.high_precision_reduce
        if not group.placement.main:
            (axis.all_reduce_high_precision if precise else axis.all_reduce)(source.segments, factor)
            return source
        dtype = torch.float32 if precise else source.dtype
        result = self._output(source, group.inner_extent, dtype, final=final)
        (axis.sum_scatter_high_precision if precise else axis.reduce_scatter)(result.segments, source.segments, factor)
        return result

    def reduce_partial(self, *, zeros_unused: bool) -> None:
        """Reduce over the outer axis what was reduced over the shard axis alone; `undecided` as for `reduce`."""
        partial, self._partial = self._partial, None
        assert partial is not None, "it was prepared"
        self._to_main(self._over_outer_axis(partial, 1.0), zeros_unused)

    def _over_outer_axis(self, result: FlatBuffer, factor: float) -> FlatBuffer:
        group, axis, precise = self.group, self.group.axes.outer, self.group.policy.high_precision_reduce
        assert axis is not None
        if self._partial is not None:
            accumulate_segments(self._partial, result)
            result, self._partial = self._partial, None
        if result.dtype != self.comm_dtype:
            converted = FlatBuffer.empty(group.layout, result.extent, self.comm_dtype, group.device)
            compat.foreach_copy_(converted.segments, result.segments)
            result = converted
        if not group.placement.outer_main:
            (axis.all_reduce_high_precision if precise else axis.all_reduce)(result.segments, factor)
            return result
        output = self._output(result, group.main_extent, torch.float32 if precise else result.dtype, final=True)
        (axis.sum_scatter_high_precision if precise else axis.reduce_scatter)(output.segments, result.segments, factor)
        return output

    def _keep_partial(self, result: FlatBuffer) -> None:
        """Add a gradient reduced over the shard axis alone; in the main gradient's memory where that has the same extent and is empty."""
        if self._partial is not None:
            accumulate_segments(self._partial, result)
            return
        if result is self.main or (self.main.extent == result.extent and self._main_is_free()):
            self._partial = self.main
        else:
            self._partial = FlatBuffer.empty(self.group.layout, result.extent, self.main_dtype, self.group.device)
        if self._partial is not result:
            compat.foreach_copy_(self._partial.segments, result.segments)

    def _output(self, source: FlatBuffer, extent: range, dtype: torch.dtype, *, final: bool) -> FlatBuffer:
        """Where a reduce-scatter writes: straight into the main gradient where nothing is there yet, else in place."""
        if final and extent == self.main.extent and dtype == self.main.dtype and not self._adds:
            return self.main
        if dtype == source.dtype:
            return source.part(extent)
        return FlatBuffer.empty(self.group.layout, extent, dtype, self.group.device)

    def _to_main(self, result: FlatBuffer, zeros_unused: bool) -> None:
        """Copy or add a reduced gradient to the main gradient, and show it to the optimizer."""
        unused, self._unused = self._unused, None
        waits = bool(unused) and not zeros_unused
        self.filled = frozenset(unused or ()) if zeros_unused else frozenset()
        self._fresh = True
        if result is not self.main:
            if self._adds:
                accumulate_segments(self.main, result)
            else:
                compat.foreach_copy_(self.main.segments, result.segments)
        self.undecided = []
        frozen = self.frozen_since
        for index, (entry, local, face) in enumerate(zip(self.group.entries, self._locals, self.faces, strict=True)):
            if local.grad is not face and ((entry.full.requires_grad and local.requires_grad) or index in frozen):
                if waits and unused is not None and index in unused:
                    self.undecided.append(index)
                else:
                    local.grad = face
        frozen.clear()

    def show_used(self, used: Sequence[int]) -> None:
        """Show gradients of undecided parameters that some rank has used; the others keep none.

        Args:
            used: One for each parameter, 0 where no rank has used it.
        """
        for index in self.undecided:
            if used[index]:
                self._locals[index].grad = self.faces[index]
        self.undecided = []

    # -- what the optimizer sees ---------------------------------------------------------------------------------------

    def _has_main(self) -> bool:
        """Whether a reduced gradient is there that the optimizer has not cleared, for any parameter."""
        for local in self._locals:  # noqa: SIM110 - a generator costs host time, in every unit
            if local.grad is not None:
                return True
        return False

    def _main_is_free(self) -> bool:
        """Whether the main gradient's memory holds nothing anybody still needs."""
        return not self._has_main() and self._partial is not self.main and self._unreduced is not self.main

    def _settle_main(self) -> None:
        """Make the main gradient say what the parameters' `.grad` say: zero where cleared, the user's value where replaced."""
        self._unreduced, self._partial = self._aside(self._unreduced), self._aside(self._partial)
        if self.exposed is not self.main and not self._fresh:  # else what the optimizer sees is not converted yet
            for main, exposed in zip(self.main.segments, self.exposed.segments, strict=True):
                # Where it is still our rounded copy, keep what was rounded; elsewhere somebody wrote into it.
                torch.where(exposed == main.to(exposed.dtype), main, exposed.to(main.dtype), out=main)
        if gaps := self.main.gaps:  # scaling by a NaN norm reaches them, clearing in place does not
            compat.foreach_zero_(gaps)
        for entry, face, view in zip(self.group.entries, self.faces, self.main.views, strict=True):
            grad = entry.local.grad
            if grad is face:
                continue
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
                entry.local.grad = face

    def _aside(self, unfinished: FlatBuffer | None) -> FlatBuffer | None:
        """Unfinished gradients out of the main gradient's memory, which they use while no `.grad` is set."""
        if unfinished is not self.main:
            return unfinished
        copy = FlatBuffer.empty(self.group.layout, self.main.extent, self.main_dtype, self.group.device)
        compat.foreach_copy_(copy.segments, self.main.segments)
        return copy

    def finish(self) -> None:
        """After the last reduction of a backward, on the compute stream: convert what the optimizer sees where dtypes differ."""
        if self.exposed is not self.main and self._fresh:
            compat.foreach_copy_(self.exposed.segments, self.main.segments)
        self._fresh = False

    @property
    def is_fresh(self) -> bool:
        """Whether gradients were reduced since `finish`."""
        return self._fresh

    def _references(self) -> int:
        """How many hold the optimizer's gradients: Python objects, and tensors that share their memory."""
        return sum(map(sys.getrefcount, self.faces)) + compat.storage_users(self.exposed.segments[0])

    @property
    def allocated_bytes(self) -> int:
        """Memory of gradient buffers at the moment."""
        slots = [self.main_memory, *([self._bucket_memory] if self._bucket_memory else [])]
        if self._exposed_memory is not self.main_memory:
            slots.append(self._exposed_memory)
        buffers = {id(buffer): buffer for buffer in (self._kept, self._unreduced, self._partial) if buffer is not None}
        others = sum(buffer.size_bytes for buffer in buffers.values() if buffer is not self.main)
        return sum(slot.allocated_bytes for slot in slots) + others


# -- copies ------------------------------------------------------------------------------------------------------------


class Filling(NamedTuple):
    """Gradients on their way into the buffer they are reduced in.

    Kept until the reduction is done: the allocator knows nothing of the reduce stream.

    Attributes:
        grads: One for each parameter, full shapes, where there is one.
        unreduced: Those of earlier microbatches, full size.
        target: Full size, in the communication dtype.
        written: Which gradients are in the target already.
    """

    grads: list[Tensor | None]
    unreduced: FlatBuffer | None
    target: FlatBuffer
    written: frozenset[int] = frozenset()

    def filled(self) -> FlatBuffer:
        """Bring everything into the target, ready to be reduced.

        Parameters without a gradient count as zero, and so do gaps: every cell is defined. The copies run beside the rest of the
        backward, which is busy with matrix products and leaves memory bandwidth.
        """
        if self.unreduced is None:
            copy_or_add(self.target, self.grads, overwrite=True, written=self.written)
            return self.target
        copy_or_add(self.unreduced, self.grads, overwrite=False)
        if self.target is not self.unreduced:
            compat.foreach_copy_(self.target.segments, self.unreduced.segments)
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
        there = [(view, grad) for index, (view, grad) in enumerate(zip(views, grads, strict=True)) if index in written]
        if late := [(view, grad) for view, grad in there if grad is not None]:
            compat.foreach_add_([view for view, _ in late], [grad for _, grad in late])
        views = [view for index, view in enumerate(views) if index not in written]
        grads = [grad for index, grad in enumerate(grads) if index not in written]
    targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
    sources = [grad for grad in grads if grad is not None]
    if not overwrite:
        if sources:
            compat.foreach_add_(targets, sources)
        return
    gaps = target.gaps
    if gaps and sources and len(sources) == len(views):
        dtype = sources[0].dtype
        zeros = target.zeros_for_gaps.get(dtype)
        if zeros is None:
            zeros = target.make_zeros_for_gaps(dtype)
        if zeros:
            targets, sources, gaps = targets + gaps, sources + zeros, []
    undefined = gaps + [view for view, grad in zip(views, grads, strict=True) if grad is None]
    if undefined:
        compat.foreach_zero_(undefined)
    if sources:
        compat.foreach_copy_(targets, sources)


def accumulate_segments(target: FlatBuffer, addend: FlatBuffer) -> None:
    """Add a buffer of the same extent, keeping the target's dtype."""
    for total, piece in zip(target.segments, addend.segments, strict=True):
        total.add_(piece)


# -- what layers write -------------------------------------------------------------------------------------------------


class DirectWrites:
    """What layers wrote into a full-size buffer since the last reduction.

    Attributes:
        target: The buffer; `None` if nothing was written.
        is_new: Its other cells are undefined.
        written: Which tensors of the layout are there.
    """

    def __init__(self) -> None:
        self.target: FlatBuffer | None = None
        self.is_new = False
        self.written: set[int] = set()
        self._aside: list[tuple[Tensor, Tensor]] = []

    def begin(self, target: FlatBuffer, *, is_new: bool) -> None:
        """Gradients go to `target` from now on; with `is_new` it holds nothing yet."""
        self.target, self.is_new = target, is_new

    def add(self, index: int, left: Tensor, right: Tensor) -> None:
        """Write, or add, the product `left @ right` as the gradient of a tensor of the layout."""
        assert self.target is not None, "begin() comes first"
        view = self.target.views[index]
        if self.is_new and index not in self.written:
            _product_into(view, left, right)
        else:
            _add_product(view, left, right)
        self.written.add(index)

    def memory(self, index: int, *, overwrites: bool) -> tuple[Tensor, bool]:
        """Where a layer is to write the gradient of a tensor of the layout, and whether that is memory beside the buffer.

        What is beside it is added later, so what overwrites never meets what is there already.
        """
        assert self.target is not None, "begin() comes first"
        self._add_aside()
        view = self.target.views[index]
        is_first = self.is_new and index not in self.written
        self.written.add(index)
        if overwrites and not is_first:
            self._aside.append((view, torch.empty_like(view)))
            return self._aside[-1][1], True
        if is_first and not overwrites:
            view.zero_()
        return view, False

    def pieces(self) -> dict[int, Tensor]:
        """What was written and is not reduced yet, by tensor of the layout."""
        if self.target is None:
            return {}
        self._add_aside()
        views = self.target.views
        return {index: views[index] for index in sorted(self.written)}

    def _add_aside(self) -> None:
        """Add what layers wrote beside the buffer since."""
        for view, piece in self._aside:
            view.add_(piece)
        self._aside.clear()

    def joined(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Forget the buffer; returns the gradients that autograd left along with those that layers wrote, in the buffer's memory."""
        target = self.target
        for index in sorted(self.end()):
            assert target is not None, "something was written"
            late, view = grads[index], target.views[index]
            grads[index] = view if late is None else view.add_(late)
        return grads

    def end(self) -> frozenset[int]:
        """Forget the buffer; returns which tensors' cells of a new one are defined."""
        if self._aside:
            self._add_aside()
        written = frozenset(self.written) if self.is_new else frozenset()
        self.target, self.is_new = None, False
        if self.written:
            self.written.clear()
        return written


def _product_into(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        torch.mm(left, right, out=view)
    elif _has_wide_product(view, left):
        torch.mm(left, right, out_dtype=view.dtype, out=view)
    else:
        view.copy_(left @ right)


def _add_product(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        view.addmm_(left, right)
    elif _has_wide_product(view, left):
        torch.addmm(view, left, right, out_dtype=view.dtype, out=view)
    else:
        view.add_(left @ right)


def _has_wide_product(view: Tensor, left: Tensor) -> bool:
    return view.is_cuda and view.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16)
