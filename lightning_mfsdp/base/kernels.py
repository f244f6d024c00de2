"""Whether kernels that are written in Triton can be used."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

__all__ = ["has_triton"]


@cache
def has_triton(without: str) -> bool:
    """Whether Triton is installed; if not, a warning says once what is done without it."""
    is_installed = importlib.util.find_spec("triton") is not None
    if not is_installed:
        warnings.warn(f"triton is not installed, so {without}; install triton", stacklevel=2)
    return is_installed
