"""capture_loss: the forward of a loss and its backward as two CUDA graphs; what comes after the backward stays ordinary Python.

Clipping, the optimizer, schedules and code that reads gradients in between need no changes, so a training loop from elsewhere
(Lightning's) keeps working. Only a few launches a step are left to the host: the graphs, and those of the optimizer.

    call            inputs are copied, the forward is replayed, the loss gets a backward of its own
    backward        the gradient of the loss is copied (loss scaling, division by microbatches), the backward is replayed;
                    gradients appear in `.grad`, or are added to those that were not cleared

The backward's graph holds the reductions too: every backward is synchronized, and `no_sync` is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.functions import watch_backward
from lightning_mfsdp.engine.core.gradients import Sync, add_to_gradient
from lightning_mfsdp.engine.features.graphs.recording import Recording

__all__ = ["CapturedLoss", "capture_loss", "loss_in"]


def capture_loss(step: Callable[..., Any], module: nn.Module, *, warmup: int = 4) -> CapturedLoss:
    """Record `step` and the backward of its loss as CUDA graphs after `warmup` ordinary calls, and replay them from then on.

    Args:
        step: Takes tensors (or containers of them) and returns the loss, or a mapping with the loss under "loss". It does not call
            backward, and must not read values on the host.
        module: Sharded with `fully_shard` on CUDA devices, in pooled storage.
        warmup: Calls before the recording; at least 3, so that memory is planned.

    Returns:
        A callable that takes what `step` takes and returns what `step` returns: a loss to call backward on, once and before the next
        call; other tensors are detached copies.

    Raises:
        EngineStateError: The module is not on CUDA or not in pooled storage.
    """
    return CapturedLoss("capture_loss", step, module, warmup=warmup)


def loss_in(outputs: Any) -> Tensor:
    """The loss a step returned.

    Raises:
        EngineStateError: There is none that a backward could start from.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise EngineStateError(
            f'capture_loss: expected the step to return a loss that needs a gradient, or a mapping with one under "loss", got {loss!r:.80}'
        )
    return loss


class CapturedLoss(Recording):
    """A loss whose forward and backward become CUDA graphs. Made by `capture_loss`.

    Attributes:
        replayed: Whether the last call was a replay.
    """

    def __init__(self, caller: str, step: Callable[..., Any], module: nn.Module, *, warmup: int = 4) -> None:
        super().__init__(caller, module, warmup)
        self.replayed = False
        self._step = step
        self._module = module
        self._forward: torch.cuda.CUDAGraph | None = None
        self._backward: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None
        self._loss = self._gradient = torch.empty(0, device="cpu")
        self._anchor = torch.zeros((), device=self._context.device, requires_grad=True)
        self._shown: list[tuple[Any, Tensor]] = []
        self._shown_whole: list[tuple[nn.Parameter, Tensor]] = []
        self._awaited: object = None

    @property
    def is_captured(self) -> bool:
        """Whether forward and backward are recorded, so that calls replay the graphs."""
        return self._forward is not None

    def __call__(self, *inputs: Any) -> Any:
        """Run one forward, or replay it. Takes and returns what `capture_loss` says."""
        self._refuse_held_back()
        if self._forward is None and self._is_due(inputs):
            self._record(inputs)
        self.replayed = self._forward is not None and self._fits(inputs)
        if self._forward is None or not self.replayed:
            return self.outside(*inputs)
        self._fill(inputs)
        self._forward.replay()
        self._awaited = token = object()

        def fresh(static: Tensor) -> Tensor:
            return _Replay.apply(static, self._anchor, self, token) if static is self._loss else static.clone()

        return map_tensors(fresh, self._outputs)

    def outside(self, *inputs: Any) -> Any:
        """One eager forward, whatever was recorded."""
        self.replayed = False
        if self._forward is not None:
            self._context.weights_changed()  # issues the collectives of a replay, which always gathers whole weights
        return self._step(*inputs)

    def _refuse_held_back(self) -> None:
        """What `no_sync` holds back would be reduced in the recording and never again."""
        context = self._context
        if context.reductions.sync is not Sync.ALL or any(gradients.is_accumulating for gradients in context.gradients):
            raise EngineStateError(
                f"{self._caller}: no_sync holds gradients back, but the graph of a backward reduces in every backward; leave no_sync out"
            )

    def close(self) -> None:
        """Forget the graphs and let main gradients free their memory between steps. Calls run eagerly from now on."""
        self.failure = "closed"
        self._end()
        self._let_go()

    def _let_go(self) -> None:
        self._forget()
        for gradients in self._context.gradients:
            gradients.main.pin(False)

    def record_again(self) -> None:
        """Forget the graphs and record again in the next call: memory that they use, and that is not the engine's, has moved."""
        if self._forward is not None:
            self._forget()

    def _forget(self) -> None:
        """Release both graphs and what they wrote. NCCL waits at the destruction of a process group for every graph that uses it."""
        self._forward, self._backward, self._outputs, self._inputs, self._awaited = None, None, None, None, None
        self._context.lane.pool.let_go_of_plan(self)
        self._shown, self._shown_whole = [], []
        self._loss = self._gradient = torch.empty(0, device="cpu")

    def refuse(self, reason: str) -> None:
        """Do not record, with a warning that gives the reason."""
        self._refuse(reason)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _record(self, inputs: Any) -> None:
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        reductions = self._context.reductions
        for gradients in self._context.gradients:
            gradients.main.pin(True)
        try:
            with self._preparing(inputs), self._without_gradients(), reductions.synchronizing(Sync.ALL):
                with self._graph(forward), self._same_state(), self._context.reductions.hiding_gradients():
                    outputs = self._step(*self._inputs)
                    loss = loss_in(outputs)
                    _check_devices(outputs, loss.device)
                self._context.forget_events()
                watch_backward(self._module, loss)
                self._gradient = torch.ones_like(loss)
                with self._graph(backward, forward.pool()):
                    self._context.lane.note_written()  # captures the gather stream
                    torch.autograd.backward(loss, self._gradient)
                # The gradients that the backward has left, and where: a replay shows the same ones.
                self._shown = [(local, local.grad) for local in self._locals() if local.grad is not None]
                self._shown_whole = [(whole, whole.grad) for whole in self._whole() if whole.grad is not None]
        except RuntimeError as error:
            self._let_go()
            self._give_up(error)
            return
        except BaseException:  # unrelated to recording: the step itself failed
            self.failure = "closed"
            self._let_go()
            self._drop()
            raise
        self._outputs = map_tensors(torch.Tensor.detach, outputs)
        self._loss = loss_of_detached(self._outputs)
        self._forward, self._backward = forward, backward

    def _described_state(self) -> list[bool]:
        return super()._described_state() + [parameter.requires_grad for parameter in self._whole()]

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Record as if the optimizer's gradients were cleared: the graph overwrites them. They are restored afterwards."""
        put_back = self._gradients_now()
        for parameter in (*self._locals(), *self._whole()):
            parameter.grad = None
        try:
            yield
        finally:
            put_back()

    @contextmanager
    def _same_state(self) -> Iterator[None]:
        """Refuse a step that replaces tensors of a module, or appends to its lists: replays would not."""
        buffers = [(module, name, buffer) for module in self._modules for name, buffer in module._buffers.items()]
        before = [_own_state(module) for module in self._modules]
        replaced = []
        try:
            yield
        finally:
            for module, name, buffer in buffers:
                if module._buffers.get(name) is not buffer:
                    replaced.append((module, f"buffer {name}"))
                    module._buffers[name] = buffer  # the new one was recorded, not computed
        for module, state_before in zip(self._modules, before, strict=True):
            now = _own_state(module)
            replaced += [(module, name) for name in now if now[name] != state_before.get(name)]
        if replaced:
            module, name = replaced[0]
            raise EngineStateError(
                f"{name} of {type(module).__name__} was replaced by a new tensor or grew, which a graph cannot follow; write into tensors "
                "in place (copy_, add_), and collect what the step returns"
            )

    # -- replaying -----------------------------------------------------------------------------------------------------

    def replay_backward(self, gradient: Tensor, token: object) -> None:
        """Replay the backward of the last call.

        Args:
            gradient: Of the loss, 0-D.
            token: Of the call.

        Raises:
            EngineStateError: Its activations are gone, because another forward or a backward came in between.
        """
        if token is not self._awaited:
            raise EngineStateError(
                f"{self._caller}: backward of a loss whose activations are gone. Call backward once for every loss, before the next one is "
                "computed"
            )
        self._refuse_held_back()
        assert self._backward is not None, "recorded together with the forward that was replayed"
        self._awaited = None
        self._gradient.copy_(gradient)
        with torch.no_grad():
            # The graph overwrites gradients of earlier microbatches, which are added again afterwards.
            mains = [gradients.main for gradients in self._context.gradients]
            kept = [(main, aside) for main in mains if (aside := main.set_aside())]
            kept_whole = [(grad, grad.clone()) for whole, grad in self._shown_whole if whole.grad is grad]
            self._backward.replay()
            for main, aside in kept:
                main.add(aside)
            for grad, before in kept_whole:
                grad.add_(before)
            for parameter, grad in (*self._shown, *self._shown_whole):
                if (before := parameter.grad) is None:
                    parameter.grad = grad
                elif before is not grad:  # assigned since
                    add_to_gradient(parameter, before, grad)


def _own_state(module: nn.Module) -> dict[str, int]:
    """Identity of tensors among a module's attributes, and length of lists and dictionaries."""
    state = {}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            state[name] = id(value)
        elif isinstance(value, (list, dict, deque)) and not name.startswith("_"):
            state[name] = len(value)
    return state


def _check_devices(outputs: Any, device: torch.device) -> None:
    others = [tensor for tensor in tensors_in(outputs) if tensor.device != device]
    if others:
        raise EngineStateError(
            f"the step returned a tensor on {others[0].device}, which would stay as it was recorded; return it on {device} or not at all"
        )


def loss_of_detached(outputs: Any) -> Tensor:
    """The loss among outputs without graphs."""
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs  # type: ignore[no-any-return]


class _Replay(torch.autograd.Function):
    """The loss of a replayed forward, whose backward is a replay."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, captured: CapturedLoss, token: object) -> Tensor:
        ctx.captured, ctx.token = captured, token
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.captured.replay_backward(gradient, ctx.token)
        return None, None, None, None
