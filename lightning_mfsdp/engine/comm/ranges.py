"""Ranges: names what the engine does in a profile, and in the error of a collective that fails. Profiles are off by default.

`torch.profiler` shows them next to the kernels they launch; under `torch.autograd.profiler.emit_nvtx()` Nsight Systems does as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from torch.profiler import record_function

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.bounded import answer_within
from lightning_mfsdp.base.errors import CollectiveError

__all__ = ["Ranges"]

_ANSWER_S = 1.0  # for the store to say why another rank ended; it does not answer where its host is gone


class Ranges:
    """Named stretches of host time, `mfsdp <what> <name>`.

    Attributes:
        enabled: Whether new ones are recorded; those that are open end in any case.
        open: Those that another hook ends.
        collectives: How many were begun.
        peer_error: Why another rank could not go on; empty if none has reported that.
    """

    def __init__(self, peer_error: Callable[[], str] = str) -> None:
        self.peer_error = peer_error
        self.enabled = False
        self.collectives = 0
        self._latest = ("", "")
        self.open: dict[tuple[str, str], list[record_function]] = {}
        self._around: list[record_function] = []

    @property
    def latest(self) -> str:
        """A description of the last one that was begun; empty before the first."""
        what, name = self._latest
        return f"{what} of {name} (collective {self.collectives} of this model)" if what else ""

    def around(self, what: str, name: str) -> Ranges:
        """For a `with` around the lines of a collective: a range, and its name in the error if other ranks do not join it."""
        self.collectives += 1
        self._latest = what, name
        return self

    def __enter__(self) -> None:
        if self.enabled:
            recorded = record_function("mfsdp " + " ".join(self._latest))
            recorded.__enter__()
            self._around.append(recorded)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._around:
            self._around.pop().__exit__(kind, error, where)
        if error is not None and compat.is_lost_connection(error):
            rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            if peer_error := answer_within(_ANSWER_S, self.peer_error, ""):
                raise CollectiveError(
                    f"{rank}{self.latest} failed, because another rank ended: {peer_error}"
                ) from error
            waited_s = compat.timed_out_after(error)
            how = "failed" if waited_s is None else f"timed out after {waited_s:g} s"
            raise CollectiveError(
                f"{rank}{self.latest} {how}, because another rank is gone or does something else. Look for the first error in "
                "the output of the others. If there is none: all ranks must call the same, also full_tensor(), unshard, clip_grad_norm_ "
                "and saves, and have equally many training batches"
            ) from error

    def begin(self, what: str, name: str) -> None:
        """Open a range that another hook ends."""
        if self.enabled:
            opened = record_function(f"mfsdp {what} {name}")
            opened.__enter__()
            self.open.setdefault((what, name), []).append(opened)

    def end(self, what: str, name: str) -> None:
        """End the range that was opened last under these names, if there is one."""
        if self.open and (opened := self.open.get((what, name))):
            opened.pop().__exit__(None, None, None)

    def end_all(self, what: str) -> None:
        """End those that nothing else ended: a backward whose inputs need no gradient, or one that raised."""
        if self.open:
            for key in [key for key in self.open if key[0] == what]:
                while self.open[key]:
                    self.end(*key)

    @property
    def num_open(self) -> int:
        """How many have begun and not ended."""
        return sum(map(len, self.open.values()))
