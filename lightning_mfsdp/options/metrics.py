"""Has metrics of torchmetrics count the data of a tensor group once, in a run whose ranks do not all have different data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

__all__ = ["SynchronizedMetrics"]


class SynchronizedMetrics:
    """Metrics of torchmetrics that combine their states over some ranks; those with a process group of their own keep it.

    Args:
        group: One rank of each that have the same data.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._metrics: list[Metric] = []

    def take(self, owners: Iterable[object]) -> None:
        """Take the metrics that modules and callbacks have now, in attributes or in containers there. To be called again for later ones."""
        for owner in owners:
            for metric in _metrics_of(owner):
                if metric.process_group is None:
                    metric.process_group = self._group
                    self._metrics.append(metric)

    def release(self) -> None:
        """All of them combine their states over all ranks again."""
        for metric in self._metrics:
            if metric.process_group is self._group:
                metric.process_group = None
        self._metrics.clear()


def _metrics_of(owner: object) -> Iterator[Metric]:
    held: list[Any] = list(vars(owner).values())
    if isinstance(owner, nn.Module):
        held += owner.modules()
    while held:
        value = held.pop()
        if isinstance(value, Metric):
            yield value
        elif isinstance(value, (list, tuple, set)):
            held += value
        elif isinstance(value, Mapping):
            held += value.values()
