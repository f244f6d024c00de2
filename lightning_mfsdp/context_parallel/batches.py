"""Divides a batch of whole sequences: this rank's part of it, padded where needed, and what attention must know of the whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mfsdp.base.containers import leaves_in
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Cut

__all__ = ["KNOWN_DIMS", "divide"]

# Sequence dims of the entries that batches for transformers have. Values at padding: what no loss counts and no token attends to.
KNOWN_DIMS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "attention_mask": 1,
    "position_ids": 1,
    "token_type_ids": 1,
}
_PADDING = {"labels": -100, "shift_labels": -100}


def divide(batch: Any, parallel: ContextParallel, dims: Mapping[str, int | None] | None = None) -> tuple[Any, Cut]:
    """This rank's part of a batch, and how it was divided.

    Sequences whose length is no multiple of the number of chunks are padded at the end: inputs with 0, "labels" with -100, the
    "attention_mask" with 0, "position_ids" with the numbers that follow. Other tensors are padded with -100 if they hold integers and are
    not the first entry, which are taken for inputs.

    Args:
        batch: A mapping, or a tuple or list; it is not written to.
        parallel: Whose part.
        dims: Sequence dim of entries, by key or by position as a string; `None` for one that stays whole. Beside it, those of
            `KNOWN_DIMS` are known.

    Returns:
        A batch of the same kind, and the cut.

    Raises:
        ValueError: An entry is missing, or may be along the sequence and is not named, or lengths differ; says which.
    """
    entries = _entries(batch)
    along = _dims_of(entries, dims or {})
    lengths = {key: entries[key].size(dim) for key, dim in along.items()}
    length = next(iter(lengths.values()))
    if others := {key: other for key, other in lengths.items() if other != length}:
        raise ValueError(
            f"context={parallel.size}: sequences in one batch have different lengths, {next(iter(lengths))} {length} and {others}; "
            "expected one length for all entries. Pass context_dims={...: None} for an entry that is not along the sequence"
        )
    _refuse_unnamed(entries, along, length, dims or {})
    padded = -(-length // parallel.chunk_count) * parallel.chunk_count
    first = next(iter(along))
    whole = {
        key: _padded(entries[key], dim, padded - length, _fill_of(key, entries[key], is_first=key == first), key)
        for key, dim in along.items()
    }
    rows = entries[first].size(0) if along[first] else 1
    cut = _cut_of(whole, rows, length, padded)
    parts = {key: parallel.part_of(value, along[key]) for key, value in whole.items()}
    return _rebuilt(batch, parts), cut


def _entries(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return {str(index): value for index, value in enumerate(batch)}
    if isinstance(batch, Tensor):
        return {"0": batch}
    raise ValueError(
        f"context: a batch of type {type(batch).__name__} cannot be divided; expected a mapping, a tuple, a list or a tensor. Return one "
        "from the loader's collate_fn"
    )


def _dims_of(entries: Mapping[str, Any], dims: Mapping[str, int | None]) -> dict[str, int]:
    """Sequence dim of every entry that is divided."""
    dims_of_entries: dict[str, int] = {}
    for key, dim in dims.items():
        value = entries.get(str(key))
        if dim is None:
            continue
        if value is None:  # another loader's batches may have it
            continue
        if not isinstance(value, Tensor) or not -value.dim() <= dim < value.dim():
            kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"context_dims={{{key!r}: {dim}}}: the batch has {kind} there; it has {list(entries)}. Name tensors of the batch, and a "
                "dim that they have"
            )
        dims_of_entries[str(key)] = dim % value.dim()
    for key, dim in KNOWN_DIMS.items():
        value = entries.get(key)
        if key in dims_of_entries or key in dims or not isinstance(value, Tensor):
            continue
        if key == "attention_mask" and value.dim() != 2:
            raise ValueError(
                f"context: attention_mask has shape {list(value.shape)}; expected [batch, length], because a mask of pairs of tokens "
                "cannot be divided. Leave it out for causal attention, and pass position_ids that begin again at 0 for packed documents"
            )
        if value.dim() > dim:
            dims_of_entries[key] = dim
    if not dims_of_entries:
        raise ValueError(
            f"context: no entry of the batch is known to be along the sequence; it has {list(entries)}. Name them with "
            f"MFSDPStrategy(context_dims={{{str(next(iter(entries), 0))!r}: 1}}), by key, or by position as a string; 1 is the dim of "
            "the sequence"
        )
    return dims_of_entries


def _refuse_unnamed(
    entries: Mapping[str, Any], along: Mapping[str, int], length: int, dims: Mapping[str, int | None]
) -> None:
    """Refuse entries that may be along the sequence: whether they are is not for us to guess."""
    for key, value in entries.items():
        if key in along or key in dims:
            continue
        for path, leaf in leaves_in(value, key):
            if isinstance(leaf, Tensor) and length in leaf.shape[1:]:
                raise ValueError(
                    f"context: entry {path!r} of the batch has shape {list(leaf.shape)}, and sequences have {length} tokens. If it is "
                    f"along the sequence, use MFSDPStrategy(context_dims={{{key!r}: {list(leaf.shape).index(length, 1)}}}); if not, None "
                    "in place of the dim"
                )


def _fill_of(key: str, value: Tensor, *, is_first: bool) -> int:
    if key in KNOWN_DIMS or is_first or value.is_floating_point() or value.dtype is torch.bool:
        return _PADDING.get(key, 0)
    return -100  # integers that are not the input are taken for labels, of which no loss counts -100


def _padded(value: Tensor, dim: int, count: int, fill: int, key: str) -> Tensor:
    if not count:
        return value
    if key == "position_ids":
        further = torch.arange(1, count + 1, device=value.device)
        return torch.cat([value, value[..., -1:] + further], dim)
    sizes = [0, 0] * (value.dim() - 1 - dim) + [0, count]
    return F.pad(value, sizes, value=fill)


def _cut_of(whole: Mapping[str, Tensor], rows: int, length: int, padded: int) -> Cut:
    """What attention must know of the whole sequences: that of transformers, which reads either padding or packed positions."""
    mask, positions = whole.get("attention_mask"), whole.get("position_ids")
    is_real: Tensor | None = None
    document: Tensor | None = None
    if mask is not None:
        is_real = mask != 0
        if bool(is_real.all()):
            is_real = None
    elif padded > length:
        any_entry = next(iter(whole.values()))
        is_real = (torch.arange(padded, device=any_entry.device) < length).expand(any_entry.size(0), padded)
    if mask is None and positions is not None and positions.dim() == 2:
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        if bool(begins.any()):
            document = begins.cumsum(1).expand(rows, -1)
    given_length = length if padded > length else None
    return Cut(
        length=padded,
        rows=rows,
        is_real=is_real,
        document=document,
        given_length=given_length,
        has_mask=mask is not None,
    )


def _rebuilt(batch: Any, parts: Mapping[str, Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return parts["0"]
    if isinstance(batch, Mapping):
        keys = {str(key): key for key in batch}
        rebuilt: Any = copy.copy(batch)
        for name, value in getattr(rebuilt, "__dict__", {}).items():
            if isinstance(value, dict):  # where mappings of users keep their entries
                rebuilt.__dict__[name] = dict(value)
        for key, part in parts.items():
            rebuilt[keys[key]] = part
        return rebuilt
    items = [parts.get(str(index), item) for index, item in enumerate(batch)]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
