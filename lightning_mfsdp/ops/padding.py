"""Moves left-padded batches, as samplers produce them, to the left and back, without a loop over rows; differentiable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_mfsdp.ops.collator import alignment_of

__all__ = ["remove_left_padding", "restore_left_padding"]


def remove_left_padding(
    values: Tensor, mask: Tensor, *, width: int | None = None, recipe: str | int | None = None, fill: float = 0
) -> tuple[Tensor, Tensor]:
    """Move each row's tokens to its beginning, and cut off columns without tokens.

    Args:
        values: `[B, S, ...]`, padded on the left.
        mask: bool or integer `[B, S]`, true at tokens.
        width: Columns W of the result, at least the length of the longest row. `None`: exactly that, or the few more that the recipe
            requires, for which the host waits for the device.
        recipe: Of low-precision products that see B * W tokens at once, as in `alignment_of`.
        fill: Value where there are no tokens.

    Returns:
        Values `[B, W, ...]` and their mask, bool `[B, W]`.

    Raises:
        ValueError: Shapes that do not fit, an unknown recipe, or a width that does not suit it; on the CPU also padding elsewhere than on
            the left, or a width that would lose tokens.
    """
    lengths = _lengths(values, mask, "remove_left_padding", values.shape[:2])
    num_rows, alignment = values.shape[0], alignment_of(recipe)
    if width is not None and num_rows * width % alignment:
        raise ValueError(
            f"remove_left_padding: {num_rows} rows of width={width} are {num_rows * width} tokens, and recipe={recipe!r} needs a multiple "
            f"of {alignment}; give width={_suiting(width, num_rows, alignment)}, or none"
        )
    if width is None:
        width = _suiting(int(lengths.max()), num_rows, alignment) if lengths.numel() else 0
    elif not lengths.is_cuda and bool((lengths > width).any()):
        raise ValueError(
            f"remove_left_padding: width={width} would cut tokens off, the longest row has {int(lengths.max())}; give at least that"
        )
    column = torch.arange(width, device=values.device)[None]
    kept = column < lengths[:, None]
    return _taken(values, column + (values.shape[1] - lengths)[:, None], kept, fill), kept


def restore_left_padding(values: Tensor, mask: Tensor, *, fill: float = 0) -> Tensor:
    """The inverse: put each row's tokens back to where they were.

    Args:
        values: `[B, W, ...]`, such as a model's output for the result of `remove_left_padding`.
        mask: The mask `[B, S]` of the left-padded batch.
        fill: Value where there are no tokens.

    Returns:
        `[B, S, ...]`.

    Raises:
        ValueError: Shapes that do not fit; on the CPU also padding elsewhere than on the left, or rows longer than W.
    """
    lengths = _lengths(values, mask, "restore_left_padding", torch.Size((values.shape[0], mask.shape[-1])))
    if not lengths.is_cuda and bool((lengths > values.shape[1]).any()):
        raise ValueError(
            f"restore_left_padding: the mask has rows of {int(lengths.max())} tokens, and values has {values.shape[1]} columns; give the "
            "mask of the batch that the values come from"
        )
    column = torch.arange(mask.shape[1], device=values.device)[None]
    return _taken(values, column - (mask.shape[1] - lengths)[:, None], mask.bool(), fill)


def _suiting(width: int, num_rows: int, alignment: int) -> int:
    """The least number of columns from `width` on with which `num_rows` rows are a multiple of `alignment` tokens."""
    step = alignment // math.gcd(alignment, num_rows)
    return -(-width // step) * step


def _lengths(values: Tensor, mask: Tensor, where: str, shape: torch.Size) -> Tensor:
    """Number of tokens of each row, `[B]`, after a check that they are the last ones of the row."""
    if values.dim() < 2 or mask.shape != shape:
        raise ValueError(
            f"{where}: expected values [B, S, ...] and a mask [B, S] of them, got {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    mask = mask.bool()
    lengths = mask.sum(1)
    if not mask.is_cuda:
        left_padded = torch.arange(mask.shape[1], device=mask.device) >= (mask.shape[1] - lengths)[:, None]
        strange = (mask != left_padded).any(1).nonzero()
        if strange.numel():
            raise ValueError(
                f"{where}: row {int(strange[0])} of the mask has padding after a token; expected it on the left only. Pack such samples "
                "with AlignedCollator"
            )
    return lengths


def _taken(values: Tensor, source: Tensor, kept: Tensor, fill: float) -> Tensor:
    """Columns `source` `[B, N]` of each row, and `fill` where they are not `kept`."""
    if not values.shape[1]:
        return values.new_full((*source.shape, *values.shape[2:]), fill)
    trailing = (1,) * (values.dim() - 2)
    index = source.clamp(0, values.shape[1] - 1).view(*source.shape, *trailing)
    taken = values.gather(1, index.expand(*source.shape, *values.shape[2:]))
    return taken.where(kept.view(*kept.shape, *trailing), fill)
