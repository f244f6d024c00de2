"""The one door to Transformer Engine: nothing else imports it, and nothing imports it before a run needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["is_a", "is_engine_module", "load"]

_PACKAGE = "transformer_engine"
_INSTALL = 'pip install --no-build-isolation "lightning-mfsdp[te]"'


def load(name: str) -> Any:
    """A module of the library, such as "pytorch" or "common.recipe".

    Raises:
        RuntimeError: There is no CUDA device, or the library is missing or broken; it says which, and what to do.
    """
    # First: without a driver the import itself fails, and with words about something else.
    if not torch.cuda.is_available():
        raise RuntimeError(
            'precision="transformer-engine" needs an NVIDIA GPU with compute capability 8.9 or higher, and torch.cuda.is_available() is '
            'False here. Use precision="bf16-mixed", or start the run where a GPU, its driver and a CUDA build of PyTorch are'
        )
    try:
        return import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise _broken(error) from error
        raise RuntimeError(
            f'precision="transformer-engine" needs the package transformer-engine, which is not installed: {_INSTALL}'
        ) from error
    except Exception as error:  # libraries it cannot find, another PyTorch or Python: each raises another kind
        raise _broken(error) from error


def _broken(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"Transformer Engine is installed and cannot be loaded ({type(error).__name__}: {error}). It must have been built for PyTorch "
        f"{torch.__version__} with CUDA {torch.version.cuda}; install it again: {_INSTALL} --force-reinstall"
    )


def is_engine_module(module: nn.Module) -> bool:
    """Whether a module is, or derives from, one of the library's. Does not load it."""
    return any(base.__module__.split(".")[0] == _PACKAGE for base in type(module).__mro__)


def is_a(value: object, name: str) -> bool:
    """Whether a value is of a class of the library's with this name. Does not load it."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == _PACKAGE for base in type(value).__mro__)
