"""Batches whose sequences are divided over the context ranks: what every step of a run gets, and what is checked of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.batches import divide
from lightning_mfsdp.context_parallel.comparisons import Comparisons, fingerprint
from lightning_mfsdp.context_parallel.huggingface import choose_method, use_context_attention
from lightning_mfsdp.context_parallel.model_inputs import complete_inputs
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Method, StepNotes, activate, deactivate
from lightning_mfsdp.context_parallel.targets import IGNORED
from lightning_mfsdp.context_parallel.watch import watched_step

__all__ = ["DividedBatches", "from_first"]

_FIRST = 3  # batches of a loader that are compared, before every hundredth
_EVERY = 100


class DividedBatches:
    """Those of a run with a context axis.

    Args:
        group: The ranks that divide every batch among themselves.
        method: How attention sees whole sequences; "auto": as the model allows.
        dims: Sequence dims of entries that are not known by name.
        device: Of this rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        method: Method | Literal["auto"],
        dims: Mapping[str, int | None],
        device: torch.device,
    ) -> None:
        self._group = group
        self._method = method
        self._dims = dims
        self._device = device
        self._comparisons = Comparisons()
        self._read: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._ends: list[Callable[[], None]] = []
        self._modules: list[nn.Module] = []
        self._parallel: ContextParallel | None = None

    def begin(self, module: nn.Module) -> None:
        """Have a sharded model compute divided sequences; another one may follow.

        Raises:
            ShardingError: A layer that would be wrong where sequences are divided; names it.
        """
        _refuse(module)
        if self._parallel is None:
            size = dist.get_world_size(self._group)
            method = choose_method(module, size) if self._method == "auto" else self._method
            self._parallel = ContextParallel(self._group, method)
        self._modules.append(module)
        self._ends += [use_context_attention(module, self._parallel), complete_inputs(module)]
        activate(self._parallel)

    def end(self) -> None:
        """Models compute as before."""
        for end in reversed(self._ends):
            end()
        self._ends.clear()
        self._modules.clear()
        self._read.clear()
        self._warned.clear()
        self._parallel = None
        deactivate()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, models and their configurations are as before."""
        modules = list(self._modules)
        for end in reversed(self._ends):
            end()
        self._ends.clear()
        self._modules.clear()
        try:
            yield
        finally:
            for module in modules:
                self.begin(module)

    def compare_numbers(self, batches: int | float) -> None:
        """Check that the ranks that divide batches have equally many, before one waits for the others' forever. Collective.

        Raises:
            ValueError: They do not.
        """

        def error(smallest: int, largest: int) -> Exception:
            return ValueError(
                f"the ranks of one context group have between {smallest} and {largest} batches, and divide every batch among themselves. "
                "Use the strategy's distributed_sampler_kwargs for a sampler of your own, as for Lightning's"
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

    @contextmanager
    def step(self, batch: Any, loader: str, *, trains: bool = True, stays: bool = False) -> Iterator[Any]:
        """Around a step: this rank's part of its batch.

        Args:
            batch: Of whole sequences, on the device, the same on all context ranks.
            loader: Its name, for messages.
            trains: It computes a loss; otherwise metrics, of which sums and counts are right although parts have other numbers of targets.
            stays: Backward comes after the step; `leave` ends it.

        Raises:
            ValueError: The batch cannot be divided, or is not the same on the context ranks; an earlier step's, if the device had not
                answered by then.
        """
        parallel = self._parallel
        assert parallel is not None, "between begin and end"
        activate(parallel)  # another model's may have been, since
        self._comparisons.look()
        number = self._read[loader]
        self._read[loader] += 1
        closely = number < _FIRST or number % _EVERY == 0
        self._compare_batch(batch, loader, number, contents=closely)
        part, parallel.cut = divide(batch, parallel, self._dims)
        parallel.notes, parallel.is_watched = StepNotes(), closely
        is_left = True
        try:
            tokens = parallel.cut.rows * parallel.cut.length // parallel.size
            with watched_step(parallel, tokens, trains=trains) if closely else nullcontext():
                yield part
            self._compare_targets(part, loader, number, trains=trains)
            is_left = not stays
        finally:
            if is_left:
                parallel.cut = None

    def leave(self) -> None:
        """The step's backward is over."""
        if self._parallel is not None:
            self._parallel.cut = None

    def _compare_batch(self, batch: Any, loader: str, number: int, *, contents: bool) -> None:
        """Shapes of every batch, because parts of other lengths do not fit each other, and contents of some."""

        def error(smallest: int, largest: int) -> Exception:
            return ValueError(
                f"batch {number} of {loader} differs between ranks of one context group, which divide every batch among "
                "themselves and need the same. Use the strategy's distributed_sampler_kwargs for a sampler of your own, as for "
                'Lightning\'s, the same seed on these ranks for random transforms, or context_batches="broadcast"'
            )

        self._comparisons.compare(fingerprint(batch, self._device, contents=contents), self._group, error)
        self._comparisons.look()  # on a CPU the answer is there

    def _compare_targets(self, part: Any, loader: str, number: int, *, trains: bool) -> None:
        parallel = self._parallel
        assert parallel is not None
        notes = parallel.notes
        if loader in self._warned or (notes.is_counted and not notes.means):
            return

        def error(smallest: int, largest: int) -> Exception | None:
            if not trains:
                self._warned.add(loader)
                warnings.warn(
                    f"batch {number} of {loader}: the parts of its sequences have between {smallest} and {largest} targets, so the mean "
                    "over ranks of a mean over each rank's own is not that over tokens; sums and counts are right. Use the sum "
                    "of losses, divided by lightning_mfsdp.context_parallel.tokens_in_batch(targets), for a mean",
                    stacklevel=2,
                )
                return None
            return ValueError(
                f"batch {number} of {loader}: the parts of its sequences have between {smallest} and {largest} targets, and "
                "the step's loss is a mean over each rank's own, so a mean over ranks is not that over tokens. Use the sum of "
                "losses, divided by lightning_mfsdp.context_parallel.tokens_in_batch(targets)"
            )

        for counted in notes.means or [_targets_in(part, parallel, self._device)]:
            self._comparisons.compare(counted, self._group, error)


def from_first(batch: Any, group: dist.ProcessGroup) -> Any:
    """The batch of the first rank of a group; pickled, so of any kind. Collective, and the host waits."""
    objects = [batch if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    return objects[0]


def _refuse(module: nn.Module) -> None:
    from lightning_mfsdp.mtp import MultiTokenPredictor

    for name, part in module.named_modules():
        if isinstance(part, MultiTokenPredictor):
            raise ShardingError(
                f"{name} ({type(part).__name__}) predicts tokens further ahead than the next one, which another rank may have; such "
                "layers do not work with context above 1 in this version. Leave one of the two out"
            )


def _targets_in(part: Any, parallel: ContextParallel, device: torch.device) -> Tensor:
    """How many targets a part has, as far as is known: of labels that were shifted, of the batch's, or its tokens. `[1]`, int64."""
    labels = parallel.notes.targets
    if labels is None and isinstance(part, Mapping):
        labels = part.get("shift_labels", part.get("labels"))
    if labels is None and isinstance(part, (tuple, list)) and len(part) > 1 and isinstance(part[1], Tensor):
        labels = None if part[1].is_floating_point() else part[1]
    if isinstance(labels, Tensor):
        return (labels != IGNORED).sum().reshape(1)
    cut = parallel.cut
    assert cut is not None
    if cut.is_real is None:
        return torch.tensor([cut.length], device=device)
    return parallel.part_of(cut.is_real, 1).sum().reshape(1)
