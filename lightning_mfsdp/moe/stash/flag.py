"""The query over all ranks whether some tensor found no place, or experts had more rows than their buffers hold.

It runs on the side stream, and no rank waits until the answer is read.

The answer covers saves before the query. What overflows later is left for the next query, if necessary in the next step; and if
rows of such a save were read before the next query, the answer is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.capacity import CapacityWatch
from lightning_mfsdp.moe.stash.pages import PagePool
from lightning_mfsdp.moe.stash.side_stream import Event, SideStream

__all__ = ["OverflowFlag"]


class OverflowFlag:
    """The queries of one step; later ones replace earlier ones, since counts only grow within a step.

    Attributes:
        questions: How many queries there were, in all steps.
        is_submitted: Whether there was a query in this step.
        was_read: Whether its answer was read.
        capacity: Experts whose buffers are included.
    """

    def __init__(self) -> None:
        self.questions = 0
        self.is_submitted = self.was_read = False
        self.capacity: CapacityWatch | None = None
        self._unasked = ""
        self._host: Tensor | None = None
        self._ready: Event = None
        self._needed: Tensor | None = None  # hundredths, from all queries of this step

    def most_overflowed(self, pools: Sequence[PagePool], device: torch.device) -> Tensor:
        """Over all ranks: most tensors without a place in a pool, and hundredths of the needed capacity factor. int64 `[2]`; collective."""
        counts = [pool.overflowed for pool in pools]
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        needed = nothing if self.capacity is None else self.capacity.hundredths
        if self._needed is not None:
            needed = torch.maximum(needed, self._needed)
        most = torch.stack([torch.stack(counts).amax() if counts else nothing, needed])
        if dist.is_initialized():
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most

    def submit(self, pools: Sequence[PagePool], side: SideStream, device: torch.device) -> None:
        """Reduce over all ranks, and send the answer to the host."""
        if self._host is None:
            self._host = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        with side.fork():
            most = self.most_overflowed(pools, device)
            self._host.copy_(most, non_blocking=True)
            for pool in pools:
                pool.note_asked()
            if self.capacity is not None:  # what is dropped from now on is part of the next query
                self._needed = most[1]
                self.capacity.needed.zero_()
            self._ready = side.record()
        side.join(self._ready)  # a graph that is replayed next may use the same communicator
        self.is_submitted, self.was_read, self._unasked = True, False, ""
        self.questions += 1

    def note_read(self, layer: str, question: int) -> None:
        """Rows of a layer, stored after this many queries, are read although they may be missing."""
        if self.is_submitted and question == self.questions:
            self._unasked = layer

    def check(self) -> None:
        """Before the answer: raise an EngineStateError if rows were read that the last query does not cover."""
        if self._unasked:
            raise EngineStateError(
                f"paged stash: rows of {self._unasked} were saved after submit_overflow() and read in backward, so its answer does not "
                "tell whether they found pages; submit it again after the last forward (under a Trainer: manual_backward for every loss)"
            )

    def check_read(self, overflow: str) -> None:
        """At the end of a step: raise an EngineStateError if there was no query, or it did not cover all rows that were read."""
        self.check()
        if not self.was_read:
            raise EngineStateError(
                f"paged stash: overflow={overflow!r} and overflowed() was not called before the optimizer step, which may have used wrong "
                "gradients; call it after backward, and skip the step if it returns True"
            )

    def wait(self) -> tuple[bool, float]:
        """Whether some tensor found no place, and which capacity factor would have been enough for all rows, 0.0 if it was."""
        assert self._host is not None
        if self._ready is not None:
            self._ready.synchronize()
        self.was_read = True
        overflowed, hundredths = self._host.tolist()
        return bool(overflowed), hundredths / 100

    def clear(self) -> None:
        """A new step begins."""
        self.is_submitted = self.was_read = False
        self._unasked = ""
        self._needed = None
