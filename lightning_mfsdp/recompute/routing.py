"""Routers inside of what is computed again: their choices are kept, so that tokens go the same ways in backward.

Scores computed again are the same numbers only if every kernel before them is; a near tie that falls differently would change how
many tokens an expert gets, and with experts on other ranks who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["KeptChoices", "routers_in"]


@runtime_checkable
class _Chooses(Protocol):
    """A module that asks a keeper for each choice, as `lightning_mfsdp.moe.TopKRouter` does."""

    choice_keeper: Any


def routers_in(module: nn.Module) -> list[nn.Module]:
    """Modules that let their choices be kept."""
    return [part for part in module.modules() if isinstance(part, _Chooses)]


class KeptChoices:
    """Choices of one call, by router in the order in which it made them."""

    def __init__(self, count: int) -> None:
        self._choices: list[list[Tensor]] = [[] for _ in range(count)]

    @contextmanager
    def around(self, routers: Sequence[Any], *, again: bool) -> Iterator[None]:
        """Inside, routers keep what they choose, or choose what was kept."""
        before = [router.choice_keeper for router in routers]
        for router, kept in zip(routers, self._choices, strict=True):
            router.choice_keeper = _Replaying(kept) if again else _Keeping(kept)
        try:
            yield
        finally:
            for router, keeper in zip(routers, before, strict=True):
                router.choice_keeper = keeper


class _Keeping:
    def __init__(self, kept: list[Tensor]) -> None:
        self._kept = kept

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, choose: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        choice = choose()
        self._kept.append(choice.detach())
        return choice, False


class _Replaying:
    def __init__(self, kept: list[Tensor]) -> None:
        self._next = iter(kept)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, choose: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        return next(self._next), True
