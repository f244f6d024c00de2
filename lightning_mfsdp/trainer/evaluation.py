"""Lets steps of validation, testing and prediction end on all ranks together, although ranks may have different numbers of batches.

Lightning's sampler for predictions repeats no sample, so some ranks run out of batches earlier than others; loaders of users may differ
by more. A sharded forward needs all ranks. Those that are done with a loader therefore join the gathers of the others until
no rank has a batch of it left, and compute their experts for tokens sent to them. Only then does Lightning combine metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_mfsdp._lightning_api import PrefetchDataFetcher
from lightning_mfsdp.engine import traced_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["step_with_all_ranks"]


@contextmanager
def step_with_all_ranks(
    module: LightningModule, device: torch.device, precision: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Around one step of an evaluation; after this rank's last one of a loader, it waits for the others and joins their gathers.

    Ranks that have a batch report so without waiting; only those that have none wait for the others' reports.

    Args:
        module: Module of the step.
        device: Of this rank.
        precision: Precision of the steps.
    """
    loop = module.trainer._active_loop
    if loop is None or dist.get_world_size() == 1:
        yield
        return
    _report(True, device)
    with traced_step(module) as trace:
        yield
    if _ends_a_loader(loop):
        while _report(False, device).item():
            with precision():
                trace.repeat()


def _report(has_batch: bool, device: torch.device) -> torch.Tensor:
    """Exchange with the other ranks; returns how many of them have a batch."""
    count = torch.tensor(int(has_batch), device=device)
    dist.all_reduce(count)
    return count


def _ends_a_loader(loop: Any) -> bool:
    """Whether this rank's batch was its last one of a loader. A loader of unknown length is read one batch ahead, unless it is limited."""
    fetcher = loop._data_fetcher
    if fetcher.done:
        return True
    if isinstance(fetcher, PrefetchDataFetcher) and fetcher.batches:
        _, index_of_next, _ = fetcher.batches[0]
        return bool(index_of_next == 0)  # what was read ahead is the first batch of another loader
    one_after_the_other = fetcher.combined_loader._mode == "sequential"
    return one_after_the_other and loop.batch_progress.current.ready in accumulate(loop.max_batches)
