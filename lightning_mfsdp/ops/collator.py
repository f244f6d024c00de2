"""AlignedCollator: makes of samples of different lengths a batch whose number of tokens suits low precision.

FP8 products require a number of rows that is a multiple of some number. Under data-parallel sharding a layer sees all tokens of a rank
at once, so only their total matters: the slab is padded once, at its end, and not sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base.alignment import ALIGNMENTS

__all__ = ["AlignedCollator", "alignment_of"]


def alignment_of(recipe: str | int | None) -> int:
    """The number of which a slab's number of tokens must be a multiple.

    Args:
        recipe: "delayed", "current" and "block" (16), "mxfp8" (32), "nvfp4" (128), a number of your own, or `None` (1).

    Raises:
        ValueError: The recipe is unknown, or the number is not positive.
    """
    if isinstance(recipe, int) and not isinstance(recipe, bool) and recipe > 0:
        return recipe
    if recipe is None:
        return 1
    if not isinstance(recipe, str) or recipe not in ALIGNMENTS:
        raise ValueError(
            f"recipe={recipe!r}: expected one of {', '.join(map(repr, ALIGNMENTS))}, a positive number of tokens, or None"
        )
    return ALIGNMENTS[recipe].tokens


@dataclass(frozen=True)
class AlignedCollator:
    """A `collate_fn` for samples of different lengths.

    A sample is a 1-D tensor or list of token ids, or a mapping with "input_ids" and, if not every token is to be learned, "labels":
    for each token itself, or `ignore_index`. Other fields are dropped; an "attention_mask" must not have a zero.

    Args:
        recipe: As in `alignment_of`.
        packed: One sample after the other in one row `[1, N]`; False: a row each, padded on the right, `[B, S]`.
        ignore_index: Label of what is not learned.
        padding_id: Token id of padding.
        shift_labels: A label is the token that comes next in the same sample, ready for `linear_cross_entropy`. False: for models that
            shift by themselves, it is the token itself, and the first of each sample is ignored.
        num_tokens: Tokens of every batch, padding included, a multiple of what the recipe requires: batches of all ranks then have one
            size, as experts' "all_gather" requires. `None`: as few as the recipe allows, different on each rank.
        max_length: Tokens of the longest sample that may come. With `num_tokens`, batches of equally many samples then differ in
            nothing but the contents of their tensors, as CUDA graphs and compilers require. `None`: `cu_seqlens` and `max_seqlen` of packed
            batches vary with the samples.

    Raises:
        ValueError: The recipe is unknown, `num_tokens` is not a positive multiple of what it requires, or `max_length` not positive.
        TypeError: `packed` or `shift_labels` is neither True nor False.
    """

    recipe: str | int | None = None
    packed: bool = True
    ignore_index: int = -100
    padding_id: int = 0
    shift_labels: bool = True
    num_tokens: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        alignment_of(self.recipe)
        for name, value in (("packed", self.packed), ("shift_labels", self.shift_labels)):
            if not isinstance(value, bool):
                raise TypeError(f"AlignedCollator: {name}={value!r}: expected True or False")
        alignment, wanted, longest = alignment_of(self.recipe), self.num_tokens, self.max_length
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError(f"AlignedCollator: max_length={longest!r}: expected None or a positive number of tokens")
        if wanted is not None and (type(wanted) is not int or wanted < 1 or wanted % alignment):
            raise ValueError(
                f"AlignedCollator: num_tokens={wanted!r}: expected None or a positive multiple of {alignment}, for "
                f"recipe={self.recipe!r}"
            )

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor | int]:
        """A batch.

        "input_ids", "labels" and "position_ids" are int64, `[1, N]` or `[B, S]`. Positions begin at 0 in each sample, and in the
        padding; with `num_tokens` or `max_length` also again within it, so that none is beyond those of the longest sample. "mask"
        is bool of the same shape, true at tokens. Packed batches also have "cu_seqlens", int32: where each sample begins, and N at
        the end. Padding counts as a sample, or as several, the last ones. With `num_tokens` and `max_length` there are B + ceil(N /
        max_length) + 1 entries for B samples: samples without tokens follow the padding, so N is repeated. Their "max_seqlen" is an
        int, the longest of the samples, or `max_length`.

        Returns:
            The batch, by the names above.

        Raises:
            ValueError: There is no sample, one is empty, not 1-D, padded, not made of integers, longer than `max_length`, or has labels
                of another length. The batch does not fit into `num_tokens`.
        """
        ids, labels, lengths = self._joined(samples)
        labels = self._shifted(labels, lengths.cumsum(0))
        return self._packed(ids, labels, lengths) if self.packed else self._padded(ids, labels, lengths)

    def _joined(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """All ids and labels one after the other, and the samples' lengths."""
        if not samples:
            raise ValueError("AlignedCollator: there is no sample in this batch; expected at least one")
        ids, labels = zip(*(_sample(index, sample) for index, sample in enumerate(samples)), strict=True)
        lengths = [len(each) for each in ids]
        if self.max_length is not None and max(lengths) > self.max_length:
            raise ValueError(
                f"AlignedCollator: sample {lengths.index(max(lengths))} has {max(lengths)} tokens, more than "
                f"max_length={self.max_length}; shorten samples where the dataset is built, or raise max_length"
            )
        return torch.cat(ids), torch.cat(labels), torch.tensor(lengths, device=ids[0].device)

    def _shifted(self, labels: Tensor, ends: Tensor) -> Tensor:
        if self.shift_labels:
            labels = labels.roll(-1)
            return labels.index_fill(0, ends - 1, self.ignore_index)
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        return labels.index_fill(0, begins, self.ignore_index)

    def _packed(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> dict[str, Tensor | int]:
        num_tokens = len(ids)
        if self.num_tokens is None:
            padding = -num_tokens % alignment_of(self.recipe)
        elif num_tokens <= self.num_tokens:
            padding = self.num_tokens - num_tokens
        else:
            raise ValueError(
                f"AlignedCollator: {len(lengths)} samples have {num_tokens} tokens, more than num_tokens={self.num_tokens}; give fewer or "
                "shorter samples to a batch, or raise num_tokens"
            )
        lengths = torch.cat((lengths, self._pieces(padding, lengths)))
        ends = lengths.cumsum(0)
        places = torch.arange(num_tokens + padding, device=ids.device)
        return {
            "input_ids": torch.cat((ids, ids.new_full((padding,), self.padding_id)))[None],
            "labels": torch.cat((labels, labels.new_full((padding,), self.ignore_index)))[None],
            "position_ids": (places - (ends - lengths).repeat_interleave(lengths))[None],
            "mask": (places < num_tokens)[None],
            "cu_seqlens": torch.cat((ends.new_zeros(1), ends)).int(),
            "max_seqlen": self.max_length or int(lengths.max()),
        }

    def _pieces(self, padding: int, lengths: Tensor) -> Tensor:
        """Lengths of the samples that padding counts as: full ones, the rest, and none where the batch might have had more padding."""
        size = self._piece(int(lengths.max())) or max(1, padding)
        room = padding if self.num_tokens is None or self.max_length is None else self.num_tokens
        return (padding - torch.arange(0, room, size, device=lengths.device)).clamp(0, size)

    def _piece(self, longest: int) -> int | None:
        """Positions in padding restart after this many: a model may have none beyond those of its samples. `None`: they need not."""
        return self.max_length or (None if self.num_tokens is None else longest)

    def _padded(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> dict[str, Tensor | int]:
        num_rows, longest = len(lengths), int(lengths.max())
        width = self._width(num_rows, longest)
        column = torch.arange(width, device=ids.device)[None]
        mask = column < lengths[:, None]
        shape = (num_rows, width)
        return {
            "input_ids": ids.new_full(shape, self.padding_id).masked_scatter(mask, ids),
            "labels": labels.new_full(shape, self.ignore_index).masked_scatter(mask, labels),
            "position_ids": column.where(mask, (column - lengths[:, None]) % (self._piece(longest) or width)),
            "mask": mask,
        }

    def _width(self, num_rows: int, longest: int) -> int:
        """Columns of a padded batch: its longest row, and as many more as make its size a multiple of the recipe's."""
        if self.num_tokens is None:
            alignment = alignment_of(self.recipe)
            step = alignment // math.gcd(
                alignment, num_rows
            )  # rows x columns is to be a multiple, not the columns alone
            return -(-longest // step) * step
        width, rest = divmod(self.num_tokens, num_rows)
        if rest or longest > width:
            raise ValueError(
                f"AlignedCollator: num_tokens={self.num_tokens} in {num_rows} rows, of which the longest has {longest} tokens: expected "
                f"equally long rows of at least {longest}; give each batch as many samples as divide num_tokens "
                "(drop_last=True), shorten samples, or raise num_tokens"
            )
        return width


def _sample(index: int, sample: Any) -> tuple[Tensor, Tensor]:
    """Ids and labels, int64 and 1-D."""
    fields = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in fields:
        raise ValueError(
            f'AlignedCollator: sample {index}: expected "input_ids" among its fields, got {sorted(fields)}'
        )
    ids = _integers(index, fields["input_ids"])
    labels = _integers(index, fields.get("labels", ids))
    if ids.dim() != 1 or ids.shape != labels.shape or not len(ids):
        raise ValueError(
            f"AlignedCollator: sample {index}: expected at least one token id, 1-D, and as many labels, got shapes {tuple(ids.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if not _tensor(fields.get("attention_mask", True)).all():
        raise ValueError(
            f"AlignedCollator: sample {index} is padded, its attention_mask has zeros; give samples without padding, which is added here"
        )
    return ids, labels


def _integers(index: int, values: Any) -> Tensor:
    tensor = _tensor(values)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"AlignedCollator: sample {index}: expected integers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def _tensor(values: Any) -> Tensor:
    """Use the tensor's own device, regardless of the default device."""
    return values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
