"""The streamed step: an optimizer steps main weights and state that are in host memory between steps, one chunk after the other.

    copy in       | chunk 1 | chunk 2 | chunk 3 | chunk 4 |
    step                    | chunk 1 | chunk 2 | chunk 3 | chunk 4 |
    copy out                          | chunk 1 | chunk 2 | chunk 3 | chunk 4 |

Three staging areas take turns. Both directions of the bus are busy at once, and the device never holds more state than three chunks.

The optimizer is the user's, and so are its hooks: a call of `optimizer.step()` is one step to hooks and schedulers. Before it the engine
puts a closure of its own around the user's (hooks may return new arguments). All optimizers of PyTorch call it first; it computes the
user's loss, and then lets the class's own `step` run for each chunk while the gradients of all other parameters are hidden: parameters
without a gradient are skipped by every optimizer. The rest of the call finds no gradients and does nothing. The gradients are restored
before the first hook after the step.

Alternatives considered: stepping on the CPU, as FSDP2 and DeepSpeed do, which moves fewer bytes (gradients down, compute weights up) but
needs a CPU optimizer with the bandwidth of all memory channels, and gives other results than the device's kernels; kernels that read
host memory in place, which is what would happen without this file: every pass of an optimizer over its state would cross the bus;
an optimizer of our own in the backward, group by group, which would ignore clipping and loss scaling.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError, ShardingError
from lightning_mfsdp.base.streams import Streams
from lightning_mfsdp.engine.core.group import ParameterGroup, place_of
from lightning_mfsdp.engine.features.offload.offloaded_state import OffloadedState, StateTensor, state_of
from lightning_mfsdp.engine.features.offload.own_step import OwnStep
from lightning_mfsdp.engine.features.offload.staging import Chunk, StagedGroup

__all__ = ["StreamedStep"]

# Copies of less than this cost more to issue than to execute. It also bounds the device memory that small groups need.
_TOGETHER_BYTES = 64 << 20
_AREAS = 3


class StreamedStep:
    """Steps one optimizer, as far as its parameters' state is kept in host memory. An `OptimizerDriver`."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[ParameterGroup, OffloadedState] = weakref.WeakKeyDictionary()
        self._chunks: list[Chunk] = []
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._is_running = False
        self._is_due = False

    def adopt(self, optimizer: Optimizer) -> None:
        """Adopt what the optimizer holds now: refuse it, or move its existing state to host memory.

        Raises:
            ShardingError: It cannot be stepped in chunks.
        """
        _refuse_unfit(optimizer)
        for group in _groups_of(optimizer):
            if group.offloads:
                self._offload_if_new(optimizer, group)

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step begins: returns its arguments with a closure that does the step; `None` for a part of one."""
        if self._is_running:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._is_due = True
        was_called = False

        def evaluate_and_step() -> Any:
            nonlocal was_called
            if was_called:
                self._give_gradients_back()
                raise EngineStateError(
                    f'offload="optimizer": {type(optimizer).__name__}.step called the closure it was given twice, and everything was '
                    "stepped when it was called first; call it once, first of all, as the optimizers of torch.optim do"
                )
            was_called = True
            loss = closure() if closure is not None else None
            self._is_due = False
            with torch.no_grad():
                self._run(OwnStep(optimizer, args, kwargs))
            return loss

        if len(args) > 1:
            return (args[0], evaluate_and_step, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate_and_step}

    def end(self, optimizer: Optimizer) -> bool:
        """A step has ended: restore the gradients. Returns whether it was the user's step and not one of its parts.

        Raises:
            EngineStateError: The optimizer did not call the closure.
        """
        if self._is_running:
            return False
        if self._is_due:
            self._is_due = False
            raise EngineStateError(
                f'offload="optimizer": {type(optimizer).__name__}.step did not call the closure it was given, so nothing was stepped; '
                "call it once, first of all, as the optimizers of torch.optim do"
            )
        self._give_gradients_back()
        return True

    # -- one step ------------------------------------------------------------------------------------------------------

    def _run(self, own_step: OwnStep) -> None:
        """Step everything that has a gradient, and leave all gradients hidden."""
        by_group, others = _with_gradients(own_step.optimizer)
        self._hide_gradients([*(parameter for members in by_group.values() for parameter in members), *others])
        self._is_running = True
        try:
            for group in by_group:
                self._offload_if_new(own_step.optimizer, group)
            self._stream(own_step, by_group)
            if others:
                self._step(own_step, others)
        except BaseException:  # an interrupt, too, must not leave gradients hidden; re-raised
            self._give_gradients_back()
            for group in _groups_of(own_step.optimizer):  # the same on all ranks, whatever rows they have
                group.note_write()
            raise
        finally:
            self._is_running = False

    def _stream(self, own_step: OwnStep, by_group: dict[ParameterGroup, list[Tensor]]) -> None:
        if not by_group:
            return
        chunks = self._plan(list(by_group))
        streams = next(iter(by_group)).streams
        try:
            for chunk in chunks[:_AREAS]:
                chunk.area.slot.materialize()
            # Wait for earlier uses of the memory, and for the last writes to host memory.
            streams.wait(streams.record(), streams.copy_in)
            self._bring(chunks[0], streams)
            for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
                if following is not None:
                    self._bring(following, streams)
                streams.wait(chunk.arrived)
                self._visit(own_step, chunk, by_group, streams)
        finally:
            for stream in (streams.copy_in, streams.copy_out):
                with streams.on(stream):
                    done = streams.record()
                streams.wait(done)
            for chunk in chunks[:_AREAS]:
                chunk.area.kept.clear()
                chunk.area.left = None
                chunk.area.slot.discard()

    def _plan(self, groups: list[ParameterGroup]) -> list[Chunk]:
        """Chunks of these groups, in this order; the same as in the last step if that can be."""
        wanted = [(group, self._states.get(group)) for group in groups]
        planned = [(staged.living_group, staged.state) for chunk in self._chunks for staged in chunk.staged_groups]
        if wanted != planned:
            staged_groups = [StagedGroup(group, state) for group, state in wanted]
            device = groups[0].device
            self._chunks = Chunk.plan(staged_groups, device, together_bytes=_TOGETHER_BYTES, areas=_AREAS)
        return self._chunks

    def _bring(self, chunk: Chunk, streams: Streams) -> None:
        """Start copying a chunk in, as soon as its area is free."""
        area = chunk.area
        if area.kept:
            streams.wait(area.left)
            area.kept.clear()
        with streams.on(streams.copy_in):
            streams.wait(area.left, streams.copy_in)
            for staged in chunk.staged_groups:
                staged.bring()
            chunk.arrived = streams.record()

    def _visit(
        self, own_step: OwnStep, chunk: Chunk, by_group: dict[ParameterGroup, list[Tensor]], streams: Streams
    ) -> None:
        """Step a chunk that has arrived, and start copying it out."""
        optimizer = own_step.optimizer
        try:
            for staged in chunk.staged_groups:
                staged.show(optimizer)
            self._step(own_step, [parameter for staged in chunk.staged_groups for parameter in by_group[staged.group]])
            new = {staged: tensors for staged in chunk.staged_groups if (tensors := staged.finish(optimizer))}
            stepped = streams.record()
            with streams.on(streams.copy_out):
                streams.wait(stepped, streams.copy_out)
                for staged in chunk.staged_groups:
                    staged.take_back(with_state=staged not in new)
                for staged, tensors in new.items():
                    self._offload(optimizer, staged.group, tensors)
                    chunk.area.kept += [state_tensor.tensor for state_tensor in tensors]
                chunk.area.left = streams.record()
        finally:
            for staged in chunk.staged_groups:
                staged.hide(optimizer)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _offload_if_new(self, optimizer: Optimizer, group: ParameterGroup) -> None:
        """Move state to host memory that other code put into the optimizer's table: `load_state_dict`, a restored checkpoint."""
        tensors, state = state_of(optimizer, group), self._states.get(group)
        if state is not None and state.is_all(tensors, state.at_rest):
            return
        self._states.pop(group, None)
        if tensors:
            self._offload(optimizer, group, tensors)

    def _offload(self, optimizer: Optimizer, group: ParameterGroup, tensors: list[StateTensor]) -> None:
        """Copy state tensors to host memory of their own, on the current stream, and show them there."""
        state = OffloadedState(tensors, group.device)
        state.take(tensors)
        state.show(optimizer, state.at_rest)
        self._states[group] = state

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _step(self, own_step: OwnStep, parameters: Iterable[Tensor]) -> None:
        """Let the optimizer's own step run for these parameters alone."""
        shown = list(parameters)
        for parameter in shown:
            parameter.grad = self._gradients[parameter]
        own_step()
        self._hide_gradients(shown)

    def _hide_gradients(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self._gradients[parameter] = parameter.grad
            parameter.grad = None

    def _give_gradients_back(self) -> None:
        for parameter, grad in self._gradients.items():
            parameter.grad = grad
        self._gradients = {}


def _groups_of(optimizer: Optimizer) -> list[ParameterGroup]:
    """The groups whose parameters an optimizer holds, each once."""
    places = (place_of(parameter) for param_group in optimizer.param_groups for parameter in param_group["params"])
    return list(dict.fromkeys(place[0] for place in places if place is not None))


def _with_gradients(optimizer: Optimizer) -> tuple[dict[ParameterGroup, list[Tensor]], list[Tensor]]:
    """Parameters to step: by group in the order in which forward will need them, and those whose state stays on the device."""
    by_group: dict[ParameterGroup, list[Tensor]] = {}
    others: list[Tensor] = []
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            if parameter.grad is None:
                continue
            place = place_of(parameter)
            if place is None or not place[0].offloads:
                others.append(parameter)
            else:
                by_group.setdefault(place[0], []).append(parameter)
    return by_group, others


def _refuse_unfit(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not compat.takes_closure(optimizer):
        raise ShardingError(
            f'fully_shard_optimizer: offload="optimizer" steps {name} chunk by chunk from inside its closure; expected a subclass of '
            "torch.optim.Optimizer with step(self, closure=None), which calls the closure first. Write it so, or leave offload out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardingError(
            f'fully_shard_optimizer: {name}(differentiable=True) with offload="optimizer": a graph through the step would need state '
            "on the device that has left it; leave one of the two out"
        )
