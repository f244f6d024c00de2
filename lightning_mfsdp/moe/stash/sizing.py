"""The number of pages, from what steps requested, on this rank or on all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_mfsdp.moe.stash.config import StashConfig
from lightning_mfsdp.moe.stash.pages import PageKind, PoolSize

__all__ = ["Demand", "everyones", "grown", "sized"]

# Pages are enlarged by at least this factor, so that overflows end even if tensors fit neither tier as a whole.
_LEAST_GROWTH = 1.25


@dataclass(frozen=True)
class Demand:
    """What tensors of one kind requested in a step: most pages at once, found or not, and how many tensors found none.

    What overflowed in an earlier step and was not queried then is part of both.
    """

    most_wanted: int = 0
    overflowed: int = 0


Demands = Mapping[PageKind, Demand]


def everyones(mine: Any) -> list[Any]:
    """Gather each rank's numbers. Collective, and the host waits: for the rare steps after which pages are allocated."""
    if not dist.is_initialized():
        return [mine]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def sized(config: StashConfig, steps: Sequence[Demands]) -> dict[PageKind, PoolSize]:
    """Pages of each kind.

    Args:
        config: Factors, and whether they apply to the average or to the maximum.
        steps: What was requested, in each step of each rank.
    """
    sizes = {}
    for kind in _kinds(steps):
        wanted = [step.get(kind, Demand()).most_wanted for step in steps]
        sizes[kind] = _size(config, max(wanted) if config.sizing == "maximum" else sum(wanted) / len(wanted))
    return sizes


def grown(
    config: StashConfig, sizes: Mapping[PageKind, PoolSize], steps: Sequence[Demands]
) -> dict[PageKind, PoolSize]:
    """Pages of each kind after tensors found none in one of `steps`; never fewer than before."""
    grown_sizes = dict(sizes)
    for kind in _kinds(steps):
        demands = [step.get(kind, Demand()) for step in steps]
        size, most = sizes.get(kind, PoolSize()), max(demand.most_wanted for demand in demands)
        if not any(demand.overflowed for demand in demands):
            continue
        if not size.pages:
            grown_sizes[kind] = _size(config, most)
        elif not size.host_pages:
            grown_sizes[kind] = PoolSize(pages=max(size.pages, math.ceil(most * max(config.device_factor, 1.0))))
        else:
            factor = max(most / (size.pages + size.host_pages), 1.0) * _LEAST_GROWTH
            grown_sizes[kind] = PoolSize(math.ceil(size.pages * factor), math.ceil(size.host_pages * factor))
    return grown_sizes


def _kinds(steps: Sequence[Demands]) -> list[PageKind]:
    return list(dict.fromkeys(kind for step in steps for kind in step))


def _size(config: StashConfig, pages: float) -> PoolSize:
    return PoolSize(
        pages=max(1, math.ceil(pages * config.device_factor)), host_pages=math.ceil(pages * config.host_factor)
    )
