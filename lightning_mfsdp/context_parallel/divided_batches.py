"""DividedBatches: gives each step this rank's part of a batch, and checks that the step's loss counts the targets of all parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.batches import divide
from lightning_mfsdp.context_parallel.comparisons import Comparisons
from lightning_mfsdp.context_parallel.huggingface import choose_method, use_context_attention
from lightning_mfsdp.context_parallel.model_inputs import complete_inputs
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Method, StepNotes, activate, deactivate
from lightning_mfsdp.context_parallel.targets import IGNORED
from lightning_mfsdp.context_parallel.watch import watched_step

__all__ = ["DividedBatches"]


class DividedBatches:
    """The batches of a run with a context axis.

    Args:
        group: The ranks that divide every batch among themselves.
        method: How attention sees whole sequences; "auto": as the model allows.
        dims: Sequence dims of entries that are not known by name.
        device: Of this rank.
        tensor_size: Number of ranks of a tensor axis, which divide the heads as well.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        method: Method | Literal["auto"],
        dims: Mapping[str, int | None],
        device: torch.device,
        tensor_size: int = 1,
    ) -> None:
        self._group = group
        self._method = method
        self._dims = dims
        self._device = device
        self._tensor_size = tensor_size
        self._comparisons = Comparisons()
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
            size = dist.get_world_size(self._group) * self._tensor_size
            method = choose_method(module, size) if self._method == "auto" else self._method
            self._parallel = ContextParallel(self._group, method)
        self._modules.append(module)
        self._ends += [use_context_attention(module, self._parallel), complete_inputs(module)]
        activate(self._parallel)

    def end(self) -> None:
        """Have models compute whole sequences again, as before `begin`."""
        for end in reversed(self._ends):
            end()
        self._ends.clear()
        self._modules.clear()
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

    def finish(self) -> None:
        """Wait for what was compared.

        Raises:
            ValueError: Something was not equal.
        """
        self._comparisons.look(wait=True)

    @contextmanager
    def step(self, batch: Any, loader: str, number: int, *, closely: bool, trains: bool, stays: bool) -> Iterator[Any]:
        """Around a step: this rank's part of its batch.

        Args:
            batch: Of whole sequences, on the device, the same on all context ranks.
            loader: Its name, for messages.
            number: Of the batch, for messages.
            closely: Watch for losses that are means over parts.
            trains: It computes a loss; otherwise metrics, of which sums and counts are right although parts have other numbers of targets.
            stays: Backward comes after the step; `leave` ends it.

        Raises:
            ValueError: The batch cannot be divided, or an earlier step's loss was a mean of means.
        """
        parallel = self._parallel
        assert parallel is not None, "between begin and end"
        activate(parallel)  # that of another model may be active, if it has computed since
        self._comparisons.look()
        part, parallel.cut = divide(batch, parallel, self._dims)
        parallel.notes, parallel.is_watched = StepNotes(), closely
        is_left = True
        try:
            tokens = parallel.cut.rows * parallel.cut.length // parallel.size
            with watched_step(parallel, tokens, trains=trains) if closely else nullcontext():
                yield part
            self._compare_targets(part, loader, number, trains=trains)
            is_left = not stays  # checkpoints of activations call attention again in backward, which reads the cut
        finally:
            if is_left:
                parallel.cut = None

    def leave(self) -> None:
        """The backward of a step that `stays` is over: attention is no longer recomputed with its batch's division."""
        if self._parallel is not None:
            self._parallel.cut = None

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
