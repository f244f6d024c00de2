"""MemoryTimeline: what a step keeps in the device's memory, unit by unit: weights, gradients, optimizer state and the rest.

It reads counters of the caching allocator, which follow the order in which the host issues work, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.core.inspect import context_of
from lightning_mfsdp.engine.core.unit import Unit, unit_of
from lightning_mfsdp.engine.features.held_memory import held_memory

__all__ = ["MemorySample", "MemoryTimeline"]


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """This rank's device memory at one moment, in bytes.

    Attributes:
        unit: Name of a unit, or what else happened.
        phase: "forward begins", "forward ended", "backward ended", or empty; "recompute begins" and "recompute ended" of a forward that
            activation checkpointing runs again in a backward.
        weights: Main weights, and compute weights that stay in memory in addition.
        unsharded: Memory for unsharded weights, in use or reserved for them.
        gradients: Gradient buffers.
        optimizer: State of the optimizers.
        allocated: All that is allocated. `None` on a CPU, which does not count it.
        peak: The largest `allocated` since the sample before; `None` on a CPU.
        outside: What of `unsharded` the caching allocator does not count: symmetric memory.
    """

    unit: str
    phase: str
    weights: int
    unsharded: int
    gradients: int
    optimizer: int
    allocated: int | None
    peak: int | None
    outside: int = 0

    @property
    def known(self) -> int:
        """Weights, unsharded weights, gradients and optimizer state."""
        return self.weights + self.unsharded + self.gradients + self.optimizer

    @property
    def rest(self) -> int | None:
        """Activations, buffers, batches and temporary memory; `None` on a CPU."""
        return None if self.allocated is None else max(0, self.allocated + self.outside - self.known)

    @property
    def peak_rest(self) -> int | None:
        """`rest` at the peak, if the other kinds did not change since the sample before; `None` on a CPU."""
        return None if self.peak is None else max(0, self.peak + self.outside - self.known)


class MemoryTimeline:
    """Takes a sample when the forward of a unit begins and ends, when its backward ends, and whenever `sample` is called.

    Use it around one step::

        with MemoryTimeline(model, [optimizer]) as timeline:
            model(x).sum().backward()
            optimizer.step()
            timeline.sample("optimizer step")
        for sample in timeline.samples: ...

    Allocated memory and peaks are counted on CUDA; on a CPU a sample has the other kinds. It resets the allocator's peak
    (`torch.cuda.max_memory_allocated`). Forwards that a CUDA graph replays cannot be seen.

    Args:
        module: Sharded.
        optimizers: Whose state is counted.

    Attributes:
        samples: In order.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self.samples: list[MemorySample] = []
        self._module = module
        self._optimizers = list(optimizers)
        self._context = context_of(module)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> MemoryTimeline:
        """Add the hooks, and take the first sample, as `begin` does."""
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks, as `close` does; samples stay."""
        self.close()

    def begin(self) -> None:
        """Add the hooks, and take the first sample."""
        for child in self._module.modules():
            unit = unit_of(child)
            if unit is not None:
                self._follow(child, unit)
        self._context.reductions.watches.append(self._on_backward)
        self._reset_peak()
        self.sample("step begins")

    def close(self) -> None:
        """Remove the hooks. Samples can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._context.reductions.watches.remove(self._on_backward)

    def sample(self, unit: str, phase: str = "") -> MemorySample:
        """Take a sample now, and add it to `samples`.

        Args:
            unit: Its name in the timeline.
            phase: What happens there.
        """
        device = self._context.device
        held = held_memory(self._module)
        counts = device.type == "cuda"
        taken = MemorySample(
            unit=unit,
            phase=phase,
            weights=sum(held.main.values()) + sum(held.compute.values()),
            unsharded=held.gathered,
            gradients=held.gradients + held.buckets,
            optimizer=self._optimizer_bytes(device),
            allocated=torch.cuda.memory_allocated(device) if counts else None,
            peak=torch.cuda.max_memory_allocated(device) if counts else None,
            outside=held.gathered if counts and self._context.channels.symmetric else 0,
        )
        self.samples.append(taken)
        self._reset_peak()
        return taken

    # -- inside --------------------------------------------------------------------------------------------------------

    def _follow(self, child: nn.Module, unit: Unit) -> None:
        def begins(module: nn.Module, args: Any) -> None:
            self.sample(unit.name, f"{_pass()} begins")

        def ended(module: nn.Module, args: Any, output: Any) -> None:
            self.sample(unit.name, f"{_pass()} ended")

        self._handles += [child.register_forward_pre_hook(begins), child.register_forward_hook(ended)]

    def _on_backward(self, unit: Unit) -> None:
        self.sample(unit.name, "backward ended")

    def _reset_peak(self) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._context.device)

    def _optimizer_bytes(self, device: torch.device) -> int:
        storages: dict[int, int] = {}
        for optimizer in self._optimizers:
            for values in optimizer.state.values():  # of any kind in an optimizer of the user's
                for value in values.values() if isinstance(values, Mapping) else (values,):
                    local = value.to_local() if isinstance(value, DTensor) else value
                    if isinstance(local, Tensor) and local.device == device:
                        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return sum(storages.values())


def _pass() -> str:
    return "forward" if compat.backward_task() < 0 else "recompute"
