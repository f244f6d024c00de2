"""record_step: what each layer keeps for backward, and how long its forward takes, measured in one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine.tree import tensors_in
from lightning_mfsdp.engine.unit import unit_of
from lightning_mfsdp.recompute.apply import recomputed
from lightning_mfsdp.recompute.choice import find_stacks
from lightning_mfsdp.recompute.planner import LayerRecord, StepRecord

__all__ = ["StepRecorder", "record_step"]


@contextmanager
def record_step(root: nn.Module, modules: Sequence[str] = ()) -> Iterator[StepRecorder]:
    """Inside, run one forward and its backward; afterwards `recorder.record` is there.

    What operators keep (`save_ops`) and what went to host memory is not seen. The device is waited for once, at the end.

    Args:
        root: The whole model, sharded or not.
        modules: Patterns of names of layers, as in `Recompute`.

    Raises:
        ValueError: No layers, or a pattern that matches nothing.
    """
    recorder = StepRecorder(root, modules)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            yield recorder
    finally:
        recorder.close()
    recorder.finish()


class StepRecorder:
    """Made by `record_step`.

    Attributes:
        record: Of the step; there when it has ended.
    """

    record: StepRecord

    def __init__(self, root: nn.Module, modules: Sequence[str]) -> None:
        self._root = root
        self._layers = {name: _Layer(name) for stack in find_stacks(root, modules) for name, _ in stack}
        self._others: dict[int, int] = {}
        self._running: list[_Layer] = []
        self._weights = _weight_storages(root)
        self._alive: list[Tensor] = []
        self._hooks = [hook for name, layer in self._layers.items() for hook in self._attach(name, layer)]
        device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
        self._clock = _Clock(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._start = self._clock.now()

    def _attach(self, name: str, layer: _Layer) -> list[Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._weights = _weight_storages(self._root)
            tensors = tensors_in([args, kwargs])
            self._alive += [tensor.detach() for tensor in tensors]  # so that an identity stands for one piece of memory
            layer.inputs.update(self._pieces(tensors))
            layer.begins.append(self._clock.now())
            self._running.append(layer)

        def after(*_: Any) -> None:
            self._running.pop()
            layer.ends.append(self._clock.now())
            self._weights = _weight_storages(self._root)  # what was given back may be anybody's memory now

        module = self._root.get_submodule(name)
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def pack(self, tensor: Tensor) -> Tensor:
        """Of `saved_tensors_hooks`: autograd keeps a tensor."""
        kept = self._running[-1].saved if self._running else self._others
        kept.update(self._pieces([tensor]))
        return tensor.detach()

    def _pieces(self, tensors: Sequence[Tensor]) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        found = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
        return {address: size for address, size in found.items() if address not in self._weights}

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._alive.clear()

    def finish(self) -> None:
        """Read the clocks."""
        end = self._clock.now()
        self._clock.wait()
        device = self._clock.device
        self.record = StepRecord(
            layers=tuple(layer.record(self._clock) for layer in self._layers.values()),
            others=self._others,
            seconds=self._clock.seconds(self._start, end),
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            recomputed=tuple(recomputed(self._root)),
        )


class _Layer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.saved: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.begins: list[Any] = []
        self.ends: list[Any] = []

    def record(self, clock: _Clock) -> LayerRecord:
        return LayerRecord(
            name=self.name,
            stack=self.name.rpartition(".")[0],
            saved=self.saved,
            inputs=self.inputs,
            seconds=sum(clock.seconds(begin, end) for begin, end in zip(self.begins, self.ends, strict=True)),
        )


class _Clock:
    """Of a device: CUDA events, which nobody waits for until the end, or the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin)


def _weight_storages(root: nn.Module) -> set[int]:
    """Where weights are at the moment, whole ones of sharded units too."""
    units = [unit for module in root.modules() if (unit := unit_of(module)) is not None]
    parameters = [entry.full for unit in units for group in unit.groups for entry in group.entries]
    parameters += [one for module in root.modules() for one in module._parameters.values() if type(one) is nn.Parameter]
    return {parameter.untyped_storage().data_ptr() for parameter in parameters} - {0}
