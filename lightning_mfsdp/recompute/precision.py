"""PrecisionSnapshot: the contexts in which something was computed, to be entered when it is computed again.

A backward has contexts of its own, or none. `torch.autocast` is restored by whoever computes again (PyTorch, Transformer Engine); the
default dtype ("*-true" precisions) and the recipe of Transformer Engine, FP8 or FP4 or none, are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

import lightning_mfsdp.te as te

__all__ = ["PrecisionSnapshot", "uncached_casts"]


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used: the same operators run every time."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class PrecisionSnapshot:
    """Taken when it is made; entered as often as a backward computes again.

    Args:
        with_engine: Whether modules of Transformer Engine take part, so that the library is there.
    """

    def __init__(self, *, with_engine: bool) -> None:
        self._dtype = torch.get_default_dtype()
        self._engine = te.autocast_snapshot() if with_engine else nullcontext

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, all is as it was."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with self._engine():
                yield
        finally:
            torch.set_default_dtype(before)
