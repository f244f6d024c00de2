"""A whole training step as one CUDA graph: forward, backward, reductions, clipping, optimizer and the casts of the next gathers.

The first calls train as they are. Then the step is recorded once and replayed: the host launches one graph instead of
thousands of kernels. Gathered weights lie in fixed slots and everything else in the graph's own memory, so addresses hold.

What a graph cannot hold is Python: `step` runs in the first calls and while it is recorded, and never again. Values it
computes on the host (a learning rate, a coefficient) would be frozen; learning rates are therefore kept in tensors, which
schedulers write to. Inputs are copied into static tensors, so their shapes stay; a call with other shapes runs uncaptured.

Source: CUDA graphs and their rules, "CUDA semantics" in PyTorch's notes.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp.engine.context import Context
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.inspect import context_of
from lightning_mfsdp.engine.tree import map_tensors, tensors_in

__all__ = ["CapturedStep", "capture_step"]


def capture_step(
    step: Callable[..., Any], module: nn.Module, optimizers: Optimizer | Sequence[Optimizer], *, warmup: int = 4
) -> CapturedStep:
    """Record a training step as a CUDA graph after `warmup` ordinary calls, and replay it from then on.

    Args:
        step: Does everything between two batches: forward, backward, clipping, `optimizer.step()`, `optimizer.zero_grad()`.
            Takes tensors (or containers of them) and returns some, the loss say. It must not look at values on the host.
        module: Sharded with `fully_shard` on CUDA devices, in pooled storage.
        optimizers: Stepped by `step`. Their learning rates become tensors, and `capturable` is turned on.
        warmup: Calls before the recording. They train like any other; at least 3, so that memory is planned and optimizer
            state exists.

    Returns:
        A callable that takes what `step` takes and returns fresh tensors with what `step` returns.

    Raises:
        EngineStateError: The module is not on CUDA, not in pooled storage, or an optimizer cannot be captured.
    """
    context = context_of(module)
    if context.device.type != "cuda":
        raise EngineStateError(
            f"capture_step: {type(module).__name__} is on {context.device.type}; CUDA graphs need parameters on cuda"
        )
    if not context.pool.pooled:
        raise EngineStateError(
            'capture_step: expected fixed addresses of gathered weights, got storage="dynamic"; pass storage="pooled" to fully_shard'
        )
    if warmup < 3:
        raise EngineStateError(f"capture_step: expected warmup of at least 3 calls, got {warmup}")
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        make_capturable(optimizer, context.device)
    return CapturedStep(step, context, warmup)


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


class CapturedStep:
    """A training step that becomes a CUDA graph. Made by `capture_step`.

    Attributes:
        is_captured: Whether calls replay the graph.
        failure: Why the step could not be recorded; empty if it was, or was not tried yet.
        pool_bytes: Memory reserved for the graph alone: activations, gradients, buckets.
    """

    def __init__(self, step: Callable[..., Any], context: Context, warmup: int) -> None:
        self._step = step
        self._context = context
        self._remaining = warmup
        # Where the ordinary calls run: autograd must have seen the stream on which it is recorded.
        self._stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Any = None
        self._outputs: Any = None
        self.failure = ""
        self.pool_bytes = 0

    @property
    def is_captured(self) -> bool:
        """Whether calls replay the graph."""
        return self._graph is not None

    def __call__(self, *inputs: Any) -> Any:
        """One training step; see `capture_step`."""
        if self._graph is None:
            if self._remaining > 0 or self.failure:
                self._remaining -= 1
                return self._run(inputs)
            self._record(inputs)
        if self._graph is None or not self._fits(inputs):
            return self._run(inputs)
        for static, given in zip(tensors_in(self._inputs), tensors_in(inputs), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        self._context.weights_changed()
        return map_tensors(torch.clone, self._outputs)

    def _run(self, inputs: Any) -> Any:
        """The step as it is, on the stream of the recording."""
        current = torch.cuda.current_stream(self._context.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._step(*inputs)
        current.wait_stream(self._stream)
        for tensor in tensors_in(outputs):
            tensor.record_stream(current)
        return outputs

    def _record(self, inputs: Any) -> None:
        device = self._context.device
        self._inputs = map_tensors(lambda tensor: tensor.detach().to(device, copy=True), inputs)
        torch.cuda.synchronize(device)
        self._context.forget_events()
        self._context.weights_changed()
        gc.collect()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local: NCCL's watchdog, another thread, goes on asking for events.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self._step(*self._inputs)
        except RuntimeError as error:
            self._give_up(error)
            return
        self._context.forget_events()
        self.pool_bytes = torch.cuda.memory_reserved(device) - reserved
        self._outputs = map_tensors(torch.Tensor.detach, outputs)
        self._graph = graph

    def _give_up(self, error: RuntimeError) -> None:
        """Say which line of the user's step cannot be recorded, and train without a graph."""
        self._inputs = None
        self._context.recover()
        self._context.forget_events()
        first = error.__context__ or error  # ending a broken recording may fail as well
        self.failure = f"{_line_of(first)}: {str(first).splitlines()[0]}"
        warnings.warn(
            f"capture_step: the step cannot be recorded and runs as it is from now on. {self.failure}. Avoid what waits for the "
            "device or reads values on the host (item(), print, masks of unknown size), or do it outside the step",
            stacklevel=4,
        )

    def _fits(self, inputs: Any) -> bool:
        expected, given = tensors_in(self._inputs), tensors_in(inputs)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in given]
        wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in expected]
        if found == wanted:
            return True
        warnings.warn(
            f"capture_step: recorded with inputs {wanted}, called with {found}; this call runs as it is, slower and with "
            "memory of its own. Pad batches to one shape, or drop the last one",
            stacklevel=3,
        )
        return False


def _line_of(error: BaseException) -> str:
    """Where the user's code was: the innermost frame outside PyTorch and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "/torch/" not in frame.filename and "/lightning_mfsdp/engine/" not in frame.filename
    ]
    chosen = (own or list(frames))[-1]
    return f"{chosen.filename}:{chosen.lineno} ({chosen.line})"
