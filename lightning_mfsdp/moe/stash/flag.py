"""The question to all ranks whether some tensor found no place, or experts more rows than their buffers hold.

It is asked on the side, and nobody waits until somebody wants to know.

The answer tells of saves before the question. What overflows later is left for the next question, of the next step if need be; and where
rows of such a save were read before anybody asked again, there is no answer, but an error.
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
    """Of one step; later questions take the place of earlier ones, since counts only grow within a step.

    Attributes:
        questions: How many there were, of all steps.
        is_submitted: Whether there was one in this step.
        was_read: Whether its answer was.
        capacity: Experts whose buffers are asked about too.
    """

    def __init__(self) -> None:
        self.questions = 0
        self.is_submitted = self.was_read = False
        self.capacity: CapacityWatch | None = None
        self._unasked = ""
        self._host: Tensor | None = None
        self._ready: Event = None
        self._needed: Tensor | None = None  # hundredths, by all questions of this step

    def most_overflowed(self, pools: Sequence[PagePool], device: torch.device) -> Tensor:
        """Of all ranks: most tensors without a place in a pool, and hundredths of the needed capacity factor. int64 `[2]`; collective."""
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
            if self.capacity is not None:  # what is left out from now on is part of the next question
                self._needed = most[1]
                self.capacity.found.zero_()
            self._ready = side.record()
        side.join(self._ready)  # a graph that is replayed next may use the same communicator
        self.is_submitted, self.was_read, self._unasked = True, False, ""
        self.questions += 1

    def note_read(self, layer: str, question: int) -> None:
        """Rows of a layer, stored after so many questions, are read where they may be missing."""
        if self.is_submitted and question == self.questions:
            self._unasked = layer

    def check(self) -> None:
        """Before the answer: raise an EngineStateError if rows were read that the last question does not tell of."""
        if self._unasked:
            raise EngineStateError(
                f"paged stash: rows of {self._unasked} were saved after submit_overflow() and read in backward, so its answer does not "
                "tell whether they found pages; submit it again after the last forward (under a Trainer: manual_backward for every loss)"
            )

    def check_read(self, overflow: str) -> None:
        """At the end of a step: raise an EngineStateError if nobody asked, or not about all rows that were read."""
        self.check()
        if not self.was_read:
            raise EngineStateError(
                f"paged stash: overflow={overflow!r} and nobody asked overflowed() before the optimizer step, which may have used wrong "
                "gradients; ask it after backward, and leave the step out where it says so"
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
