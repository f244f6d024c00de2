"""Which keys a query attends to, by places in whole sequences, and the mask tensors that say so where one is needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_mfsdp.context_parallel.sharing import Cut

__all__ = ["Pattern", "mask_of", "padding_to_mask", "remembered"]

T = TypeVar("T")

# What is computed of a step's cut, such as a mask, is computed once for all layers, and freed with the cut.
_remembered: WeakKeyDictionary[Cut, dict[Hashable, Any]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Which keys a query attends to, apart from padding and documents.

    Attributes:
        causal: None that come later.
        reach: None that are further away. `None`: no limit.
    """

    causal: bool
    reach: int | None = None

    def within(self, length: int) -> Pattern:
        """The pattern in sequences of this length: a limit that no two tokens exceed is none."""
        return Pattern(causal=self.causal) if self.reach is not None and self.reach >= length - 1 else self

    def keys_of(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The first and the last (exclusive) key that queries from `start` to `stop` (exclusive) attend to."""
        reach = length if self.reach is None else self.reach
        return max(0, start - reach), stop if self.causal else min(length, stop + reach)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries at these places attend to keys at those, bool, in the shape that both broadcast to."""
        distance = query - key
        if self.causal:
            allowed = distance >= 0
            return allowed if self.reach is None else allowed & (distance <= self.reach)
        return distance.abs() <= self.reach if self.reach is not None else distance == distance

    def mask(self, device: torch.device, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Whether queries at places from the first number to the second (exclusive) attend to such keys, `[1, 1, queries, keys]`."""
        places = torch.arange(*queries, device=device)[:, None], torch.arange(*keys, device=device)
        return self.allows(*places)[None, None]

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        return kind if self.reach is None else f"{kind} up to a distance of {self.reach}"


def remembered(cut: Cut, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns: called once for this cut and key."""
    values = _remembered.setdefault(cut, {})
    if key not in values:
        values[key] = make()
    return cast(T, values[key])


def padding_to_mask(cut: Cut, pattern: Pattern) -> Tensor | None:
    """`cut.is_real`, where a mask needs it.

    Causal attention needs no mask for padding at the end of sequences: only padding attends to it. That spares a mask of S x S and keeps
    flash kernels usable; the outputs of padding itself then differ from those with a mask. Finding it out is a host sync, once per cut.
    """
    is_real = cut.is_real
    if is_real is None or not pattern.causal:
        return is_real
    has_padding_inside = remembered(cut, "padding inside", lambda: bool((is_real[:, 1:] & ~is_real[:, :-1]).any()))
    return is_real if has_padding_inside else None


def mask_of(
    cut: Cut, pattern: Pattern, device: torch.device, queries: tuple[int, int], keys: tuple[int, int]
) -> Tensor | None:
    """Whether these queries attend to these keys, bool, `[batch or 1, 1, queries or 1, keys]`; `None`: all do to all.

    Args:
        cut: With padding and documents.
        pattern: Of what they attend to otherwise, already `within` the cut's length.
        device: Of the mask.
        queries: Their places: the first and the last (exclusive).
        keys: The same.
    """
    return remembered(cut, (pattern, device, queries, keys), lambda: _mask(cut, pattern, device, queries, keys))


def _mask(
    cut: Cut, pattern: Pattern, device: torch.device, queries: tuple[int, int], keys: tuple[int, int]
) -> Tensor | None:
    mask: Tensor | None = None
    if pattern.causal or pattern.reach is not None:
        mask = pattern.mask(device, queries, keys)
    document, is_real = cut.document, padding_to_mask(cut, pattern)
    if document is not None:
        document = document.to(device)
        same = document[:, None, slice(*queries), None] == document[:, None, None, slice(*keys)]
        mask = same if mask is None else mask & same
    if is_real is not None:
        real = is_real.to(device)[:, None, None, slice(*keys)]
        mask = real if mask is None else mask & real
    return mask
