"""Ranges: what the engine does, by name, in a profile. Off until asked for.

`torch.profiler` shows them beside the kernels they launch; under `torch.autograd.profiler.emit_nvtx()` Nsight Systems does as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

__all__ = ["Ranges"]

_NOTHING = nullcontext()


class Ranges:
    """Named stretches of host time, `mfsdp <what> <name>`.

    Attributes:
        enabled: Whether new ones are recorded; those that are open end in any case.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._open: dict[tuple[str, str], list[record_function]] = {}

    def around(self, what: str, name: str) -> AbstractContextManager[object]:
        """A range around some lines."""
        return record_function(f"mfsdp {what} {name}") if self.enabled else _NOTHING

    def begin(self, what: str, name: str) -> None:
        """Open a range that another hook ends."""
        if self.enabled:
            opened = record_function(f"mfsdp {what} {name}")
            opened.__enter__()  # type: ignore[no-untyped-call]
            self._open.setdefault((what, name), []).append(opened)

    def end(self, what: str, name: str) -> None:
        """End the range that was opened last under these names, if there is one."""
        if self._open and (opened := self._open.get((what, name))):
            opened.pop().__exit__(None, None, None)

    def end_all(self, what: str) -> None:
        """End those that nothing else ended: a backward whose inputs need no gradient, or one that raised."""
        if self._open:
            for key in [key for key in self._open if key[0] == what]:
                while self._open[key]:
                    self.end(*key)

    @property
    def num_open(self) -> int:
        """How many have begun and not ended."""
        return sum(map(len, self._open.values()))
