"""Running statistics of norms inside of what is computed again: a batch counts once, in its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["counted_once"]

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@contextmanager
def counted_once(module: nn.Module) -> Iterator[None]:
    """Inside, norms in `module` write their statistics to copies."""
    norms = [part for part in module.modules() if isinstance(part, _NORMS) and part.training]
    # Copies, and not nothing: as many tensors must be saved for backward as the first time.
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
