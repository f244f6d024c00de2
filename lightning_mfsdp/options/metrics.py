"""Metrics of a run whose ranks do not all have different data."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

__all__ = ["synchronize_metrics_over"]


def synchronize_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Have torchmetrics inside a module combine their states over some ranks; those with a process group of their own keep it.

    Args:
        module: Any.
        group: One rank of each that have the same data.

    Returns:
        A function that undoes it.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric) and part.process_group is None]
    for metric in metrics:
        metric.process_group = group

    def undo() -> None:
        for metric in metrics:
            if metric.process_group is group:
                metric.process_group = None

    return undo
