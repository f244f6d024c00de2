"""Running statistics of norms inside of what is computed again: a batch counts once, in its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["counted_once", "keeps_statistics"]

# The buffer by which PyTorch's batch and instance norms that keep statistics are known, subclasses and synchronised ones included.
_COUNT = "num_batches_tracked"


def keeps_statistics(module: nn.Module) -> bool:
    """Whether it is, or has inside, a norm with running statistics."""
    return any(part._buffers.get(_COUNT) is not None for part in module.modules())


@contextmanager
def counted_once(module: nn.Module) -> Iterator[None]:
    """Inside, norms in `module` write their statistics to copies."""
    norms = [part for part in module.modules() if part.training and part._buffers.get(_COUNT) is not None]
    # Copies, and not nothing: as many tensors must be saved for backward as the first time.
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
