"""Repeats the microbatches of an optimizer step: the same random numbers, the same buffers, other gradients.

Each begins with what its `training_step` found, including what hooks, or a validation in between, had written by then. Random states
are restored afterwards. So are buffers that a hook or a backward wrote to since; others keep the values of the second
run, since experts that dropped rows spoil what comes after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_mfsdp._lightning_api import LightningModule, Trainer
from lightning_mfsdp.trainer.continuation import random_state, restore_random_state
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["StepMemory"]


_Key = tuple[int, str]  # of a buffer: its owner and its name there


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor

    @property
    def key(self) -> _Key:
        return id(self.owner), self.name


@dataclass(kw_only=True)
class _Microbatch:
    arguments: tuple[Any, ...]  # containers of its own: unaffected if the step removes items
    random_state: Mapping[str, Any]
    buffers: Sequence[_Buffer]
    tensors: Sequence[Tensor]
    versions: Sequence[int]
    computed: Mapping[
        _Key, tuple[Tensor, int]
    ]  # buffers as its training_step left them, and how often they were written to by then


class StepMemory:
    """What is needed to repeat a step."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._strategy = trainer.strategy
        self._microbatches: list[_Microbatch] = []
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._updates: dict[str, int] = {}

    def remember(self, arguments: tuple[Any, ...]) -> None:
        """`training_step` is about to be called with these."""
        self._updates = {name: metric.update_count for name, metric in self._metrics.items()}
        tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self._microbatches.append(
            _Microbatch(
                arguments=apply_to_collection(arguments, Tensor, noted),
                random_state=random_state(self._strategy.root_device),
                buffers=_buffers(self._module),
                tensors=tensors,
                versions=[_version(tensor) for tensor in tensors],
                computed={},
            )
        )

    def computed(self) -> None:
        """`training_step` has returned."""
        for microbatch in self._microbatches[-1:]:
            microbatch.computed = {
                (id(owner), name): (buffer, _version(buffer)) for owner, name, buffer in _all_buffers(self._module)
            }

    def check(self) -> None:
        """Raise a RuntimeError if the microbatch did something that must not be done twice: update a metric, or write into its batch."""
        moved = [name for name, count in self._updates.items() if self._metrics[name].update_count != count]
        if moved:
            raise RuntimeError(
                f'PagedStash(overflow="rerun"): training_step updates the metric {moved[0]}, which would count a repeated step '
                'twice. Return what it needs from training_step and update it in on_train_batch_end, or use overflow="keep"'
            )

        for microbatch in self._microbatches[-1:]:
            if [_version(tensor) for tensor in microbatch.tensors] != microbatch.versions:
                raise RuntimeError(
                    'PagedStash(overflow="rerun"): training_step writes into its batch in place, so a repeated step would see another '
                    'one. Write into a copy, or use overflow="keep"'
                )

    def forget(self) -> None:
        """The step is over."""
        self._microbatches.clear()

    def rerun(self) -> None:
        """Forward and backward of all microbatches again, into cleared gradients. Nothing is logged twice."""
        assert isinstance(self._strategy, MFSDPStrategy), "checked in setup"
        device = self._strategy.root_device
        now = random_state(device)
        starts = [_written_since(microbatch.buffers, before_it) for microbatch, before_it in self._with_those_before()]
        last = _written_since(_buffers(self._module), self._microbatches[-1].computed)
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        with _nothing_logged(self._trainer, self._module):
            for number, (microbatch, written) in enumerate(zip(self._microbatches, starts, strict=True), start=1):
                restore_random_state(microbatch.random_state, device)
                _restore(written)
                is_last = number == len(self._microbatches)
                with nullcontext() if is_last else self._strategy.block_backward_sync():
                    self._run(microbatch)
        restore_random_state(now, device)
        _restore(last)

    def _with_those_before(self) -> Iterator[tuple[_Microbatch, Mapping[_Key, tuple[Tensor, int]]]]:
        """Each microbatch, and the buffers as the previous one left them."""
        before: Mapping[_Key, tuple[Tensor, int]] = {}
        for microbatch in self._microbatches:
            yield microbatch, before
            before = microbatch.computed

    def _run(self, microbatch: _Microbatch) -> None:
        outputs = self._strategy.training_step(*microbatch.arguments)
        if outputs is not None:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            self._strategy.backward(loss / self._trainer.accumulate_grad_batches, None)


def _all_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    return ((owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False))


def _buffers(module: nn.Module) -> list[_Buffer]:
    """All of them, in their current state."""
    return [
        _Buffer(owner=owner, name=name, tensor=buffer, version=_version(buffer), value=buffer.detach().clone())
        for owner, name, buffer in _all_buffers(module)
    ]


def _written_since(buffers: Sequence[_Buffer], computed: Mapping[_Key, tuple[Tensor, int]]) -> list[_Buffer]:
    """Those that anything but the previous `training_step` wrote to, or replaced."""
    return [
        buffer
        for buffer in buffers
        if buffer.key not in computed
        or computed[buffer.key][0] is not buffer.tensor
        or computed[buffer.key][1] != buffer.version
    ]


def _restore(buffers: Sequence[_Buffer]) -> None:
    """Restore them."""
    for buffer in buffers:
        buffer.tensor.detach().copy_(buffer.value)
        setattr(buffer.owner, buffer.name, buffer.tensor)  # the step may have replaced it


def _version(tensor: Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Silence:
    """Replaces Lightning's result collection."""

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing: it was logged before."""

    def reset(self, **_: Any) -> None:
        """Nothing is collected."""


@contextmanager
def _nothing_logged(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Lightning has no hook for this: `_results` of the loop is what `LightningModule.log` writes to (Lightning 2.6)."""
    loop, hook = trainer.fit_loop.epoch_loop, module._current_fx_name
    results = loop._results
    loop._results = _Silence()  # type: ignore[assignment]
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        loop._results, module._current_fx_name = results, hook
