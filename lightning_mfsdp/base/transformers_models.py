"""Finds models of transformers inside a module, and their configurations, without importing the library where no program has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["configurations", "models_in", "outermost", "pretrained"]


def outermost(module: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Any]]:
    """Modules for which `is_one` holds, with their names, and none that is inside another of them."""
    inside: set[int] = set()
    for name, part in module.named_modules():
        if id(part) not in inside and is_one(part):
            inside.update(id(child) for child in part.modules())
            yield name, part


def models_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models of transformers inside, with their names."""
    if "transformers" in sys.modules:  # otherwise there is no model of its
        yield from outermost(module, lambda part: isinstance(part, _kind()))


def pretrained(model: nn.Module) -> Iterator[Any]:
    """A model of transformers and those inside."""
    return (part for part in model.modules() if isinstance(part, _kind()))


def configurations(config: Any) -> Iterator[Any]:
    """A configuration and those inside, the outer ones first."""
    yield config
    for name in config.sub_configs:
        inside = getattr(config, name, None)
        if inside is not None:
            yield from configurations(inside)


def _kind() -> Any:
    return importlib.import_module("transformers.modeling_utils").PreTrainedModel
