"""`lerp_`: move one model's weights towards another's, as teachers follow students (BYOL, DINO, MoCo) and targets follow networks (DQN)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.rows_exchange import fetch_rows, sharded_alike

__all__ = ["lerp_"]


class _Pair(NamedTuple):
    """A target and its source; plain tensors that the engine does not manage have no entry."""

    name: str
    target: Tensor
    source: Tensor
    target_entry: Entry | None
    source_entry: Entry | None


@torch.no_grad()
def lerp_(targets: nn.Module | Iterable[Tensor], sources: nn.Module | Iterable[Tensor], weight: float) -> None:
    """`target += weight * (source - target)` for every parameter, in place: an average with momentum m has `weight=1 - m`.

    Main weights are read and written, in the target's dtype, whatever a module shows at the moment; the next forward uses them. Where two
    models are sharded alike nothing is communicated and there is one launch; otherwise all rows that lie elsewhere travel in one exchange.
    Collective: all ranks call it, with the same parameters in the same order. Buffers are left alone.

    Args:
        targets: A module, sharded or not, or parameters.
        sources: The same. Of two modules, parameters are matched by name, and those that only the sources have are skipped (a student's
            predictor); otherwise one by one.
        weight: 0 leaves the targets unchanged, 1 makes them equal to the sources.

    Raises:
        ShardingError: A target has no source, or one of another shape; names it.
    """
    if type(weight) not in (int, float) or not math.isfinite(weight):
        raise ShardingError(f"lerp_: weight: expected a finite number, such as 1 - momentum, got {weight!r}")
    pairs = _pairs(targets, sources)
    rows, contexts = _rows_of_sources(pairs), dict[int, Context]()
    alike: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for pair, source in zip(pairs, rows, strict=True):
        target = pair.target.detach() if pair.target_entry is None else pair.target_entry.local.detach()
        if target.numel():
            starts, ends = alike.setdefault((target.dtype, target.device), ([], []))
            starts.append(target)
            ends.append(source.to(target.device, target.dtype))
        owned = owner_of(pair.target)
        context = owned[0].root() if owned is not None else None
        if context is not None:
            contexts[id(context)] = context
    for starts, ends in alike.values():
        compat.foreach_lerp_(starts, ends, float(weight))
    for context in contexts.values():
        context.weights_changed()
        context.refresh_shown()


def _rows_of_sources(pairs: list[_Pair]) -> list[Tensor]:
    """The rows of each source that this rank has of its target; all rows where the target is not sharded."""
    rows: list[Tensor | None] = []
    away = []
    for pair in pairs:
        target, source = pair.target_entry, pair.source_entry
        if source is None:
            whole = pair.source.detach()
            rows.append(whole if target is None or not whole.dim() else target.piece.of(whole))
        elif target is None:
            rows.append(source.sharded.full_tensor())
        elif sharded_alike(target.sharded, source.sharded):
            rows.append(source.local.detach())
        else:
            rows.append(None)
            away.append((source.sharded, target.sharded))
    fetched = iter(fetch_rows(away))
    return [next(fetched) if local_rows is None else local_rows for local_rows in rows]


def _pairs(targets: nn.Module | Iterable[Tensor], sources: nn.Module | Iterable[Tensor]) -> list[_Pair]:
    if isinstance(targets, nn.Module) and isinstance(sources, nn.Module):
        by_name = dict(sources.named_parameters(remove_duplicate=False))
        named = list(targets.named_parameters())
        lacking = [name for name, _ in named if name not in by_name]
        if lacking:
            raise ShardingError(
                f"lerp_: the sources ({type(sources).__name__}) have no parameters {', '.join(lacking[:4])}, which the targets "
                f"({type(targets).__name__}) have; pass the parts that correspond, or lists of parameters"
            )
        matched: list[tuple[str, Tensor, Tensor]] = [(name, target, by_name[name]) for name, target in named]
    else:
        first = list(targets.parameters() if isinstance(targets, nn.Module) else targets)
        second = list(sources.parameters() if isinstance(sources, nn.Module) else sources)
        if len(first) != len(second):
            raise ShardingError(
                f"lerp_: expected as many sources as targets, got {len(second)} and {len(first)}; where one model has more layers, pass "
                "modules, whose parameters are matched by name, or the parts that correspond"
            )
        matched = [(f"number {index}", *pair) for index, pair in enumerate(zip(first, second, strict=True))]
    return [_pair(*names_and_tensors) for names_and_tensors in matched]


def _pair(name: str, target: Tensor, source: Tensor) -> _Pair:
    entries = [None if (owned := owner_of(tensor)) is None else owned[1] for tensor in (target, source)]
    shapes = [
        tuple(tensor.shape if entry is None else entry.shape)
        for tensor, entry in zip((target, source), entries, strict=True)
    ]
    if shapes[0] != shapes[1]:
        raise ShardingError(
            f"lerp_: parameter {name}: expected a source of the target's shape {shapes[0]}, got {shapes[1]}"
        )
    return _Pair(name, target, source, *entries)
