"""How many microbatches a run accumulates so that the batch of an optimizer step has equally many samples on any number of ranks.

The strategy sets the Trainer's `accumulate_grad_batches` when Lightning sets up the training loaders, which is before anything is computed
with it: `trainer.estimated_stepping_batches` in `configure_optimizers`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_mfsdp._lightning_api import Callback, GradientAccumulationScheduler

__all__ = ["check_equal_microbatches", "check_global_batch", "microbatches"]


def check_global_batch(size: int, accumulates: int, callbacks: Sequence[Callback], *, automatic: bool) -> None:
    """Check that nothing else decides how many microbatches a run accumulates.

    Args:
        size: The option `global_batch_size`.
        accumulates: What the user gave to the Trainer.
        callbacks: Of the Trainer.
        automatic: The module leaves optimization to Lightning.

    Raises:
        ValueError: Something else does.
    """
    schedulers = [
        type(callback).__name__ for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)
    ]
    others = schedulers + ([f"accumulate_grad_batches={accumulates}"] if accumulates != 1 else [])
    if others:
        raise ValueError(
            f"global_batch_size={size} and {others[0]} both say how many batches are accumulated for a step; leave one of the two out"
        )
    if not automatic:
        raise ValueError(
            f"global_batch_size={size} accumulates batches, and with automatic_optimization=False the module itself says when a step is "
            "made; leave the option out"
        )


def microbatches(size: int, data_ranks: int, loader: object) -> int:
    """Batches that every rank accumulates for a step.

    Args:
        size: Samples of a step, on all ranks.
        data_ranks: Ranks that have different batches.
        loader: A training loader.

    Raises:
        ValueError: They would be no whole number, or the loader does not say how many samples a batch has.
    """
    batch = _batch_size(loader)
    if batch is None:
        raise ValueError(
            f"global_batch_size={size}: the training loader {type(loader).__name__} does not say how many samples a batch has. Give the "
            "DataLoader a batch_size, its batch sampler an attribute batch_size, or leave the option out and set accumulate_grad_batches"
        )
    together = data_ranks * batch
    if size % together:
        raise ValueError(
            f"global_batch_size={size} is no multiple of {together} samples, which {data_ranks} data ranks with batch_size={batch} compute "
            f"at a time. Choose {_ways_out(size, data_ranks, batch)}"
        )
    return size // together


def check_equal_microbatches(size: int, numbers: Sequence[int]) -> None:
    """Check that all training loaders need the same number of batches for a step.

    Raises:
        ValueError: They do not.
    """
    if len(set(numbers)) > 1:
        raise ValueError(
            f"global_batch_size={size}: the training loaders would need {', '.join(map(str, numbers))} batches for a step, because their "
            "batch sizes differ, and the Trainer accumulates equally many of all. Give them equal batch sizes, or leave the option out and "
            "set accumulate_grad_batches"
        )


def _ways_out(size: int, data_ranks: int, batch: int) -> str:
    if size % data_ranks:
        possible = max(ranks for ranks in range(1, data_ranks) if size % ranks == 0)
        return f"a number of data ranks that divides it, such as {possible}, or a multiple of {data_ranks * batch}"
    share = size // data_ranks
    possible = max(number for number in range(1, min(batch, share) + 1) if share % number == 0)
    return f"a batch_size that divides {share}, such as {possible}, or a multiple of {data_ranks * batch}"


def _batch_size(loader: object) -> int | None:
    """Samples in a batch that one rank reads; `None` if that is unknown."""
    batches: Any = loader
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler  # none if the dataset makes batches
    size = getattr(batches, "batch_size", None)
    return size if isinstance(size, int) else None
