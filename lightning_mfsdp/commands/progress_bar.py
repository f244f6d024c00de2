"""A progress bar on stderr, if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback for the bytes done and the total. Silent unless stderr is a terminal."""
    with tqdm(
        desc=doing, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=not sys.stderr.isatty()
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
