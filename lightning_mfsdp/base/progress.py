"""Shows the progress of what takes long, in bytes: to a callback, or by a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from tqdm.auto import tqdm

__all__ = ["ByteCount", "Progress", "progress_bar"]

# Called with the bytes done and the total.
Progress: TypeAlias = Callable[[int, int], object]

BYTES_WORTH_A_BAR = 256 * 2**20  # less than this is done in a moment


class ByteCount:
    """Adds up bytes that are done, and reports them to `progress`, if there is one and anything to do."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, num_bytes: int) -> None:
        """So many more are done."""
        self._done += num_bytes
        if self._progress is not None and self._total:
            self._progress(self._done, self._total)


@contextmanager
def progress_bar(
    doing: str, callback: Progress | None = None, *, shown: bool | None = None
) -> Iterator[Progress | None]:
    """A callback for work of known size: `callback`, or a bar once the total turns out to be large, or `None`.

    Args:
        doing: What the bar says.
        callback: A callback of the caller's, instead of a bar.
        shown: Whether there may be a bar. `None`: on rank 0, if stderr is a terminal.
    """
    if shown is None:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        shown = is_first and sys.stderr.isatty()
    if callback is not None or not shown:
        yield callback
        return
    bar: tqdm[Any] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and total >= BYTES_WORTH_A_BAR:
            bar = tqdm(desc=doing, total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
