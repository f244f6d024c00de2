"""record_step: records what each layer keeps for backward, how long its forward takes, and how much memory each part of a step needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lightning_mfsdp.te as te
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.engine.internals import unsharded_of
from lightning_mfsdp.recompute.apply import find_stacks, recomputed
from lightning_mfsdp.recompute.planner import LayerRecord, Part, StepRecord
from lightning_mfsdp.recompute.region import can_stop_early

__all__ = ["DeviceMemory", "MemoryCounter", "NoMemory", "StepRecorder", "record_step"]


@contextmanager
def record_step(
    root: nn.Module, modules: Sequence[str] = (), *, memory: MemoryCounter | None = None
) -> Iterator[StepRecorder]:
    """Inside, run one forward and its backward; afterwards `recorder.record` is set.

    What operators keep (`save_ops`) and what was copied to host memory is not seen. The host waits for the device once, at the end; its
    peak allocated memory is reset in between.

    Args:
        root: The whole model, sharded or not.
        modules: Patterns of names of layers, as in `Recompute`.
        memory: Counts allocated bytes. `None`: PyTorch's allocator of a CUDA device, and no counter on the CPU.

    Raises:
        ValueError: No layers, or a pattern that matches nothing.
    """
    recorder = StepRecorder(root, modules, memory)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            yield recorder
    finally:
        recorder.close()
    recorder.finish()


class StepRecorder:
    """Created by `record_step`.

    Attributes:
        record: Of the step; set when it has ended.
    """

    record: StepRecord

    def __init__(self, root: nn.Module, modules: Sequence[str], memory: MemoryCounter | None) -> None:
        self._root, self._modules = root, tuple(modules)
        self._layers = {name: _Layer(name, layer) for stack in find_stacks(root, modules) for name, layer in stack}
        self._others: dict[int, int] = {}
        self._running: list[_Layer] = []
        self._weights = _weight_storages(root)
        self._seen: dict[int, StorageWeakRef] = {}
        device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
        self._clock = _Clock(device)
        self._parts = _Parts(memory or (DeviceMemory(device) if device.type == "cuda" else NoMemory()))
        self._hooks = [hook for name, layer in self._layers.items() for hook in self._attach(name, layer)]
        self._start = self._clock.now()

    def _attach(self, name: str, layer: _Layer) -> list[Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._weights = _weight_storages(self._root)
            inputs = tensors_in([args, kwargs])
            layer.has_backward = torch.is_grad_enabled() and any(
                tensor.requires_grad for tensor in chain(inputs, module.parameters())
            )
            if layer.has_backward:  # otherwise its inputs are not kept, recomputed or not
                layer.inputs.update(self._pieces(inputs))
            self._parts.forward_begins()
            begin = self._clock.now()
            layer.calls.append([begin, begin])
            self._running.append(layer)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._running.pop()
            if layer.has_backward and not layer.stops_early:
                layer.calls[-1][1] = self._clock.now()
            self._weights = _weight_storages(self._root)  # freed memory may have been reused since
            layer.forward_bytes = max(layer.forward_bytes, self._parts.forward_ended(name))
            self._watch(name, tensors_in(output))

        module = self._root.get_submodule(name)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def _watch(self, name: str, outputs: Sequence[Tensor]) -> None:
        """A call's backward begins with the first gradient of what it returned."""
        has_begun = False

        def begins(_: Tensor) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                self._parts.backward_begins(name)

        with_grad = [tensor for tensor in outputs if tensor.requires_grad]
        self._hooks += [tensor.register_hook(begins) for tensor in with_grad]

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook of `saved_tensors_hooks`: autograd keeps a tensor."""
        pieces = self._pieces([tensor])
        if not self._running:
            self._others.update(pieces)
            return tensor.detach()
        layer = self._running[-1]
        if not layer.has_backward:  # a checkpoint's inputs, released at once
            return tensor.detach()
        layer.saved.update(pieces)
        if layer.stops_early:
            layer.calls[-1][1] = self._clock.now()  # when recomputed it ends with the last one
        return tensor.detach()

    def _pieces(self, tensors: Sequence[Tensor]) -> dict[int, int]:
        """Bytes by an identity that is not reused, even if the memory is."""
        storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        sizes: dict[int, int] = {}
        for storage in storages:
            if storage.nbytes() and storage.data_ptr() not in self._weights:
                reference = StorageWeakRef(storage)
                self._seen[reference.cdata] = reference  # while it exists, that identity is not reused
                sizes[reference.cdata] = storage.nbytes()
        return sizes

    def close(self) -> None:
        """End the last part of the step, and remove the hooks."""
        self._parts.end()
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Wait for the device, and set `record`."""
        end = self._clock.now()
        self._clock.wait()
        self.record = StepRecord(
            layers=tuple(layer.record(self._clock) for layer in self._layers.values()),
            others=self._others,
            seconds=self._clock.seconds(self._start, end),
            parts=tuple(self._parts.done),
            recomputed=tuple(recomputed(self._root)),
            modules=self._modules,
        )


class _Layer:
    """The data of one layer.

    Attributes:
        calls: Begin and end of each, as far as it is recomputed.
        has_backward: The present call has something to differentiate: a weight or an input.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.stops_early = can_stop_early(module) and not te.has_engine_modules(module)
        self.saved: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.forward_bytes = 0
        self.has_backward = False
        self.calls: list[list[Any]] = []

    def record(self, clock: _Clock) -> LayerRecord:
        return LayerRecord(
            name=self.name,
            stack=self.name.rpartition(".")[0],
            saved=self.saved,
            inputs=self.inputs,
            seconds=sum(clock.seconds(begin, end) for begin, end in self.calls),
            forward_bytes=self.forward_bytes,
        )


class _Parts:
    """The parts of the step, as they occur.

    Attributes:
        done: Those that have ended.
    """

    def __init__(self, memory: MemoryCounter) -> None:
        self._memory = memory
        self._waiting: list[str] = []  # once for each call
        self.done: list[Part] = []
        self._begin("")

    def forward_begins(self) -> None:
        """The forward of a layer begins, and with it another part."""
        self.end()
        self._begin("")

    def forward_ended(self, name: str) -> int:
        """The forward of a layer ends; returns the most bytes that were allocated since it began."""
        self.end()
        self._waiting.append(name)
        self._begin("")
        return self.done[-1].peak_bytes - self.done[-1].start_bytes

    def backward_begins(self, name: str) -> None:
        """The backward of one call of a layer begins, and with it a part that lasts until the next one."""
        self.end()
        self._waiting.remove(name)
        self._begin(name)

    def _begin(self, layer: str) -> None:
        self._layer, self._start_bytes = layer, self._memory.begin()

    def end(self) -> None:
        """The current part is over: add it to `done`."""
        waiting = tuple(dict.fromkeys(self._waiting))
        peak_bytes = self._memory.peak()
        self.done.append(Part(layer=self._layer, waiting=waiting, start_bytes=self._start_bytes, peak_bytes=peak_bytes))


class _Clock:
    """Clock of a device: CUDA events, read only at the end, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin)


def _weight_storages(root: nn.Module) -> set[int]:
    """Storages of weights at the moment, including unsharded ones of units."""
    shown = [
        parameter for module in root.modules() for parameter in module._parameters.values() if parameter is not None
    ]
    unsharded = [whole for parameter in shown if (whole := unsharded_of(parameter)) is not None]
    plain = [parameter for parameter in shown if type(parameter) is nn.Parameter]
    return {weight.untyped_storage().data_ptr() for weight in (*unsharded, *plain)} - {0}


class MemoryCounter(Protocol):
    """Bytes in one part of a step after the other."""

    def begin(self) -> int:
        """A part begins; returns what is allocated."""

    def peak(self) -> int:
        """The most that was allocated since the part began."""


class DeviceMemory:
    """PyTorch's allocator of a CUDA device. Reading it does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int:
        """Reset the allocator's peak; returns the bytes that are allocated."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most bytes that were allocated since `begin`."""
        return torch.cuda.max_memory_allocated(self._device)


class NoMemory:
    """A `MemoryCounter` for a CPU, whose allocations are not counted: every number is 0."""

    def begin(self) -> int:
        """Returns 0 bytes."""
        return 0

    def peak(self) -> int:
        """Returns 0 bytes."""
        return 0
