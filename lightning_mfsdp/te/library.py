"""The one door to Transformer Engine: nothing else imports it, and nothing imports it before a run needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["is_engine_module", "load"]

_PACKAGE = "transformer_engine"


def load(name: str) -> Any:
    """A module of the library, such as "pytorch" or "common.recipe".

    Raises:
        RuntimeError: There is no CUDA device.
    """
    # First: without a driver the import itself fails, and with words about something else.
    if not torch.cuda.is_available():
        raise RuntimeError("Transformer Engine needs an NVIDIA GPU, and torch.cuda.is_available() is False here")
    return import_module(f"{_PACKAGE}.{name}")


def is_engine_module(module: nn.Module) -> bool:
    """Whether a module is, or derives from, one of the library's. Does not load it."""
    return any(base.__module__.split(".")[0] == _PACKAGE for base in type(module).__mro__)
