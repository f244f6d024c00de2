"""Batches of whole sequences, this rank's parts of them, and attention on one process to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp.context_parallel.sharing import ContextParallel, Cut, Method, activate, deactivate

LENGTH = 16
BATCH = 2

# What padding and documents a batch has, by name.
KINDS = ("plain", "padding", "padding_before", "documents", "both")


@contextmanager
def divided(method: Method, cut: Cut | None) -> Iterator[ContextParallel]:
    """A step whose batch all ranks divide among them."""
    group = dist.group.WORLD
    assert group is not None
    parallel = ContextParallel(group, method)
    parallel.cut = cut
    activate(parallel)
    try:
        yield parallel
    finally:
        deactivate()


def cut_of(kind: str, length: int = LENGTH) -> Cut:
    """The division of a batch with this kind of padding and documents."""
    is_real, document = None, None
    if kind in ("padding", "both"):
        is_real = torch.arange(length).expand(BATCH, length) < torch.tensor([[length - 3], [length - 6]])
    if kind == "padding_before":
        is_real = torch.arange(length).expand(BATCH, length) >= torch.tensor([[3], [6]])
    if kind in ("documents", "both"):
        starts = torch.zeros(BATCH, length, dtype=torch.int64)
        starts[0, [2, 7, 9]] = 1
        starts[1, [5, 8]] = 1
        document = starts.cumsum(1)
    return Cut(length=length, is_real=is_real, document=document)


def allowed(cut: Cut, *, is_causal: bool, window: int | None) -> Tensor:
    """Written out again: `[batch, 1, length, length]`, whether a query attends to a key."""
    mask = torch.zeros(BATCH, 1, cut.length, cut.length, dtype=torch.bool)
    for row in range(BATCH):
        for query in range(cut.length):
            for key in range(cut.length):
                ok = not (is_causal and key > query)
                ok = ok and (window is None or abs(query - key) < window)
                ok = ok and (cut.is_real is None or bool(cut.is_real[row, key]))
                ok = ok and (cut.document is None or bool(cut.document[row, query] == cut.document[row, key]))
                mask[row, 0, query, key] = ok
    return mask


def real(cut: Cut) -> Tensor:
    """`[batch, 1, length, 1]`: 1 at tokens that count."""
    is_real = torch.ones(BATCH, cut.length) if cut.is_real is None else cut.is_real
    return is_real.double()[:, None, :, None]


def tensors(heads: int, shared: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and a gradient of the output, the same ones on every rank."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(heads, 8), (shared, 8), (shared, 6), (heads, 6)]
    return [torch.randn(BATCH, n, LENGTH, d, generator=draw, dtype=torch.float64).to(dtype) for n, d in shapes]


def on_one_rank(values: list[Tensor], mask: Tensor, weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of plain attention on whole sequences, at tokens that count."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in values[:3])
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True) * weight
    output.backward(values[3])
    return output.detach(), [tensor.grad for tensor in (query, key, value)]  # type: ignore[misc]
