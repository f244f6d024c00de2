"""Compiles the forward of units with torch.compile, but not what the engine does around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_mfsdp.engine import is_sharded
from lightning_mfsdp.recompute.region import region_of

__all__ = ["compile_options", "compile_units"]


def compile_options(value: object) -> dict[str, Any] | None:
    """Options of `torch.compile`, or `None` for no compilation.

    Raises:
        TypeError: Neither a bool nor a mapping of options.
    """
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise TypeError(
        f"compile={value!r}: expected True, False or a mapping of options for torch.compile, such as "
        '{"mode": "max-autotune-no-cudagraphs"}'
    )


def compile_units(root: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """`torch.compile` the forward of every unit below `root` that has modules inside; returns their names.

    Only the forward: gathers and reductions run around it, in hooks that a compiled graph would break at. Embeddings, heads and
    other single layers gain nothing. With recomputation, compiled code is recomputed; the compiler sees which operators to keep.
    """
    compiled = []
    for name, module in root.named_modules():
        if module is not root and is_sharded(module) and any(True for _ in module.children()):
            region = region_of(module)
            if region is not None and not region.config.save_ops:
                region.compile(**options)
            else:
                module.forward = torch.compile(module.forward, **options)
            compiled.append(name)
    return compiled
