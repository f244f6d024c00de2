"""Recording: what all CUDA graphs of a training step have in common.

The first calls run eagerly. Then the work is recorded once and replayed: the host launches one graph instead of thousands of
kernels. Gathered weights lie in fixed slots and everything else in the graph's own memory, so addresses stay valid.

What a graph cannot hold is Python: it runs in the first calls and while it is recorded, and never again. Input tensors are copied
into static ones. A call that the recording cannot replace (other shapes, Python values or trainable parameters) runs eagerly.

Source: CUDA graphs and their rules, "CUDA semantics" in PyTorch's notes.
"""

from __future__ import annotations

import gc
import inspect
import os
import site
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base.containers import leaves_in, map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.gradient_hooks import has_gradient_hooks
from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.inspect import context_of

__all__ = ["Recording"]

_PACKAGE = str(Path(__file__).parents[3])
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))


class Recording:
    """Work that becomes CUDA graphs, and the conditions under which they can replace it.

    Attributes:
        failure: Why it could not be recorded; empty if it was, or was not tried yet.
        pool_bytes: Memory reserved for the graphs alone: activations, gradients, buckets.
    """

    def __init__(self, caller: str, module: nn.Module, warmup: int) -> None:
        self.failure = ""
        self.pool_bytes = 0
        self._caller = caller
        self._context = _capturable_context(caller, module)
        if warmup < 3:
            raise EngineStateError(f"{caller}: expected warmup of at least 3 calls, got {warmup}")
        self._context.reductions.include_in_graph()
        self._context.lane.order.stop()  # a replay queries no rank, and a rank whose call does not fit the graph runs it eagerly
        self._is_open = True
        self._remaining = warmup
        self._module = module
        self._modules = list(module.modules())
        self._stream = torch.cuda.Stream(self._context.device)
        self._inputs: Any = None
        self._state: list[bool] = []
        self._last: list[str] = []

    def _end(self) -> None:
        """All ranks are done with recordings. One that could not record keeps reducing like those that could."""
        if self._is_open:
            self._is_open = False
            self._context.reductions.leave_graph()

    def _is_due(self, inputs: Any) -> bool:
        """Whether to record now: enough calls ran eagerly, and this one is like the last. Counts them."""
        if self.failure:
            return False
        if self._has_hooks():
            self._refuse("Replays would not run the hooks that register_post_accumulate_grad_hook was given")
            return False
        self._remaining -= 1
        last, self._last = self._last, _described(inputs)
        return self._remaining < 0 and last == self._last

    # -- recording -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _preparing(self, inputs: Any) -> Iterator[None]:
        """Context around a recording: nothing is in flight or waited for, and what it reserves is counted."""
        device, context = self._context.device, self._context
        self._inputs = map_tensors(lambda tensor: tensor.detach().to(device, copy=True), inputs)
        self._state = self._described_state()
        torch.cuda.synchronize(device)
        context.forget_events()
        context.lane.pool.hold_plan(self)
        context.weights_changed()
        gc.collect()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        yield
        self._warn_of_unused()
        context.forget_events()
        self.pool_bytes = torch.cuda.memory_reserved(device) - reserved

    def _warn_of_unused(self) -> None:
        if self._context.reductions.zeros_unused:
            return
        names = [
            group.entries[index].sharded.described
            for group in self._context.groups
            for index in sorted(group.gradients.unused or ())
        ]
        if names:
            warnings.warn(
                f"{self._caller}: in the step that was recorded, {len(names)} parameters got no gradient on rank {dist.get_rank()}: "
                f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. A graph cannot ask whether other ranks used them, so their "
                'gradients are zeros (unused_parameters="zero") and weight decay and momentum move them; freeze them, or train without '
                "CUDA graphs",
                stacklevel=2,
            )

    def _graph(self, graph: torch.cuda.CUDAGraph, pool: Any = None) -> Any:
        """Record what is launched inside, on the recording's stream."""
        # Thread-local: NCCL's watchdog, another thread, keeps querying events.
        return torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")

    def _drop(self) -> None:
        """Forget a recording that was not completed."""
        self._inputs = None
        self._context.lane.pool.let_go_of_plan(self)
        self._context.forget_events()  # a broken recording's events never complete
        self._context.recover()
        self._context.forget_events()
        self._context.weights_changed()  # casts inside it never ran

    def _gradients_now(self) -> Callable[[], None]:
        """Save the present gradients; the returned callable restores them, as a recording leaves some that were never computed."""
        kept = [(local, local.grad) for local in self._locals()]
        kept_whole = [(parameter, parameter.grad) for parameter in self._whole()]

        def put_back() -> None:
            for parameter, grad in (*kept_whole, *kept):
                parameter.grad = grad

        return put_back

    def _locals(self) -> Iterator[nn.Parameter]:
        """The local rows of every parameter."""
        for unit in self._context.units:
            for group in unit.groups:
                for entry in group.entries:
                    yield entry.local

    def _whole(self) -> list[nn.Parameter]:
        """Parameters that the engine does not manage (ignored ones)."""
        return [parameter for parameter in self._module.parameters() if owner_of(parameter) is None]

    def _give_up(self, error: RuntimeError) -> None:
        """Warn which line of the user's code cannot be recorded, and train without a graph."""
        self._drop()
        first: BaseException = error
        while isinstance(first.__context__, RuntimeError):  # cleanup inside a broken recording fails as well
            first = first.__context__
        self._refuse(f"{_line_of(first)}: {str(first).splitlines()[0]}")

    def _refuse(self, reason: str) -> None:
        self.failure = reason
        warnings.warn(
            f"{self._caller}: the step cannot be recorded and runs as it is from now on. {reason}. Avoid what waits for the "
            "device or reads values on the host (item(), print, masks of unknown size), or do it outside the step. "
            "Parameters that no rank uses get zeros as their gradients, as on ranks that did record",
            stacklevel=5,
        )

    # -- replaying -----------------------------------------------------------------------------------------------------

    def _fill(self, inputs: Any) -> None:
        """Copy a call's inputs to where the graph reads them."""
        for static, tensor in zip(tensors_in(self._inputs), tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)

    def _fits(self, inputs: Any) -> bool:
        """Whether a replay would do what this call requires; if not, a warning gives the reason."""
        wanted, described = _described(self._inputs), _described(inputs)
        if wanted != described:
            warnings.warn(
                f"{self._caller}: recorded with inputs {wanted}, called with {described}; this call runs as it is, slower and with "
                "memory of its own. Pad batches to one shape, drop the last one, and leave out of them what is no tensor and changes",
                stacklevel=3,
            )
        elif self._state != self._described_state():
            warnings.warn(
                f"{self._caller}: since the step was recorded, parameters were frozen or unfrozen or given hooks, or a module changed "
                "between train() and eval(); this call runs as it is. Do that before the recording",
                stacklevel=3,
            )
        else:
            return True
        return False

    def _described_state(self) -> list[bool]:
        """Which modules are in training mode, and which parameters are trainable."""
        trained = [entry.is_trained for unit in self._context.units for group in unit.groups for entry in group.entries]
        return [module.training for module in self._modules] + trained + [self._has_hooks()]

    def _has_hooks(self) -> bool:
        groups = (group for unit in self._context.units for group in unit.groups)
        return any(group.gradients.hooks and has_gradient_hooks(group) for group in groups)


def _capturable_context(caller: str, module: nn.Module) -> Context:
    context = context_of(module)
    if any(group.offloads for unit in context.units for group in unit.groups):
        raise EngineStateError(
            f'{caller}: {type(module).__name__} was sharded with offload="optimizer", and no graph can hold its copies to and from host '
            "memory; leave one of the two out"
        )
    if context.device.type != "cuda":
        raise EngineStateError(
            f"{caller}: {type(module).__name__} is on {context.device.type}; CUDA graphs need parameters on cuda. Call the step as it is"
        )
    if not context.lane.pool.pooled:
        raise EngineStateError(
            f'{caller}: expected fixed addresses of gathered weights, got storage="dynamic"; pass storage="pooled" to fully_shard'
        )
    return context


def _described(inputs: Any) -> list[str]:
    """Where each leaf is, and what: shapes and dtypes of tensors, values of numbers and strings, anything else by identity."""
    described = []
    for path, leaf in leaves_in(inputs):
        if isinstance(leaf, Tensor):
            kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        elif isinstance(leaf, _PLAIN_VALUES):
            kind = repr(leaf)
        else:
            kind = f"{type(leaf).__name__} at {id(leaf):#x}"
        described.append(f"{path}: {kind}")
    return described


def _line_of(error: BaseException) -> str:
    """Location in the user's code: the innermost frame outside this package and installed ones."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (_PACKAGE, *site.getsitepackages(), os.path.dirname(inspect.getfile(torch)))
    user_frames = [frame for frame in frames if not frame.filename.startswith(foreign)]
    chosen = (user_frames or list(frames))[-1]
    return f"{chosen.filename}:{chosen.lineno} ({chosen.line})"
