"""capture_step: a whole training step as one CUDA graph: forward, backward, reductions, clipping, optimizer, casts of the next gathers.

Values that `step` computes on the host (a learning rate, a coefficient) would be frozen; learning rates are therefore kept in
tensors, which schedulers write to. See recording.py for what every graph needs, and captured_loss.py for graphs that leave the
optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp.base.containers import map_tensors
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.gradients import MainGradient
from lightning_mfsdp.engine.features.graphs.recording import Recording

__all__ = ["CapturedStep", "capture_step"]


def capture_step(
    step: Callable[..., Any], module: nn.Module, optimizers: Optimizer | Sequence[Optimizer], *, warmup: int = 4
) -> CapturedStep:
    """Record a training step as a CUDA graph after `warmup` ordinary calls, and replay it from then on.

    Args:
        step: Does everything between two batches: forward, backward, clipping, `optimizer.step()`, `optimizer.zero_grad()`.
            Takes tensors (or containers of them) and returns some, such as the loss. It must not read values on the host.
        module: Sharded with `fully_shard` on CUDA devices, in pooled storage.
        optimizers: Stepped by `step`. Their learning rates become tensors, and `capturable` is turned on.
        warmup: Calls before the recording. They train like any other; at least 3, so that memory is planned and optimizer
            state exists.

    Returns:
        A callable that takes what `step` takes and returns fresh tensors with what `step` returns.

    Raises:
        EngineStateError: The module is not on CUDA, not in pooled storage, or an optimizer cannot be captured.
    """
    captured = CapturedStep(step, module, warmup)
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        make_capturable(optimizer, captured.device)
    return captured


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Keep learning rates and step counters in tensors on the device.

    Raises:
        EngineStateError: The optimizer has no `capturable` option.
    """
    for group in optimizer.param_groups:
        if "capturable" not in group:
            raise EngineStateError(
                f"capture_step: {type(optimizer).__name__} has no option `capturable`, so its step cannot be recorded; use "
                "one that has, such as torch.optim.AdamW"
            )
        group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


class CapturedStep(Recording):
    """A training step that becomes a CUDA graph. Made by `capture_step`."""

    def __init__(self, step: Callable[..., Any], module: nn.Module, warmup: int) -> None:
        super().__init__("capture_step", module, warmup)
        self._step = step
        self._replayable: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None
        self._written: list[MainGradient] = []

    @property
    def device(self) -> torch.device:
        """The CUDA device that the step runs on."""
        return self._context.device

    @property
    def is_captured(self) -> bool:
        """Whether the step is recorded, so that calls replay the graph."""
        return self._replayable is not None

    def __call__(self, *inputs: Any) -> Any:
        """Run one training step, or replay it. Takes and returns what `capture_step` says."""
        if self._replayable is None and self._is_due(inputs):
            self._record(inputs)
        if self._replayable is None or not self._fits(inputs):
            return self._run(inputs)
        self._fill(inputs)
        self._replayable.replay()
        self._context.weights_changed()
        return map_tensors(torch.clone, self._outputs)

    def close(self) -> None:
        """Release the graph. Calls run eagerly from now on."""
        self.failure = "closed"
        self._end()
        self._replayable, self._outputs, self._inputs = None, None, None
        self._context.lane.pool.let_go_of_plan(self)
        for main in self._written:
            main.pin(False)
        self._written = []

    def _run(self, inputs: Any) -> Any:
        """Run the step eagerly, on the stream of the recording: autograd must have used that stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._step(*inputs)
        current.wait_stream(self._stream)
        return map_tensors(torch.clone, outputs)  # memory of the stream on which it will be freed

    def _record(self, inputs: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        put_gradients_back = self._gradients_now()
        try:
            with self._preparing(inputs), self._graph(graph):
                outputs = self._step(*self._inputs)
        except RuntimeError as error:
            put_gradients_back()
            self._give_up(error)
            return
        except BaseException:  # unrelated to recording: the step itself failed
            put_gradients_back()
            self._drop()
            raise
        self._outputs = map_tensors(torch.Tensor.detach, outputs)
        self._replayable = graph
        # Gradients that outlast the step lie where replays write them, and ordinary calls in between must not free that memory.
        self._written = [gradients.main for gradients in self._context.gradients if gradients.is_open]
        for main in self._written:
            main.pin(True)
