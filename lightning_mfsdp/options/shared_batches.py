"""SharedBatches: compares batches that several ranks compute together, and divides them where a context axis divides sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.context_parallel.comparisons import Comparisons, fingerprint
from lightning_mfsdp.context_parallel.divided_batches import DividedBatches

__all__ = ["SharedBatches", "from_first"]

_FIRST = 3  # batches of a loader that are compared, before every hundredth
_EVERY = 100


class SharedBatches:
    """The batches of a run with a context axis or a tensor axis.

    Args:
        group: The ranks that compute every batch together.
        divided: What divides it over a context axis; `None`: each of these ranks computes all of it.
        device: Of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, divided: DividedBatches | None, device: torch.device) -> None:
        self._group = group
        self._divided = divided
        self._device = device
        self._comparisons = Comparisons()
        self._read: Counter[str] = Counter()

    def begin(self, module: nn.Module) -> None:
        """Have a sharded model compute divided sequences, if they are; another one may follow.

        Raises:
            ShardingError: A layer that would be wrong where sequences are divided; names it.
        """
        if self._divided is not None:
            self._divided.begin(module)

    def end(self) -> None:
        """Have models compute whole sequences again, as before `begin`."""
        if self._divided is not None:
            self._divided.end()
        self._read.clear()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, models and their configurations are as before."""
        if self._divided is None:
            yield
            return
        with self._divided.undone():
            yield

    def compare_numbers(self, batches: int | float) -> None:
        """Check that these ranks have equally many batches, before one waits for the others' forever. Collective.

        Raises:
            ValueError: They do not.
        """

        def error(smallest: int, largest: int) -> Exception:
            return ValueError(
                f"the ranks of one context or tensor group have between {smallest} and {largest} batches, and compute every batch "
                "together. Use the strategy's distributed_sampler_kwargs for a sampler of your own, as for Lightning's"
            )

        number = -1 if batches == float("inf") else int(batches)
        self._comparisons.compare(torch.tensor([number], device=self._device), self._group, error)
        self._comparisons.look(wait=True)

    def finish(self) -> None:
        """Wait for what was compared.

        Raises:
            ValueError: Something was not equal.
        """
        self._comparisons.look(wait=True)
        if self._divided is not None:
            self._divided.finish()

    @contextmanager
    def step(self, batch: Any, loader: str, *, trains: bool = True, stays: bool = False) -> Iterator[Any]:
        """Around a step: its batch, or this rank's part of it.

        Args:
            batch: On the device, the same on all of these ranks.
            loader: Its name, for messages.
            trains: It computes a loss; otherwise metrics.
            stays: Backward comes after the step; `leave` ends it.

        Raises:
            ValueError: The batch cannot be divided, or is not the same on these ranks; an earlier step's, if the device had not answered
                by then.
        """
        self._comparisons.look()
        number = self._read[loader]
        self._read[loader] += 1
        closely = number < _FIRST or number % _EVERY == 0
        self._compare(batch, loader, number, contents=closely)
        if self._divided is None:
            yield batch
            return
        with self._divided.step(batch, loader, number, closely=closely, trains=trains, stays=stays) as part:
            yield part

    def leave(self) -> None:
        """The backward of a step that `stays` is over, so its part of the batch is no longer needed."""
        if self._divided is not None:
            self._divided.leave()

    def _compare(self, batch: Any, loader: str, number: int, *, contents: bool) -> None:
        """Shapes of every batch, because others would not fit in collectives, and contents of some."""

        def error(smallest: int, largest: int) -> Exception:
            return ValueError(
                f"batch {number} of {loader} differs between ranks of one context or tensor group, which compute every batch together "
                "and need the same. Use the strategy's distributed_sampler_kwargs for a sampler of your own, as for "
                'Lightning\'s, the same seed on these ranks for random data and transforms, or shared_batches="broadcast"'
            )

        self._comparisons.compare(fingerprint(batch, self._device, contents=contents), self._group, error)
        self._comparisons.look()  # on a CPU the result has arrived, and raises before the step computes


def from_first(batch: Any, group: dist.ProcessGroup) -> Any:
    """The batch of the first rank of a group; pickled, so of any kind. Collective, and the host waits."""
    objects = [batch if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    return objects[0]
