"""rehearse: one training step after another with tensors that have no memory, on one of many ranks that do not exist."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.context_parallel.divided_batches import DividedBatches
from lightning_mfsdp.engine import (
    HeldMemory,
    MemorySample,
    MemoryTimeline,
    around_backward,
    fully_shard_optimizer,
    gather_root,
    held_memory,
    no_sync,
    units,
)
from lightning_mfsdp.engine.internals import sharded_mesh
from lightning_mfsdp.estimate.balanced_experts import balance_experts
from lightning_mfsdp.estimate.live_memory import LiveMemory
from lightning_mfsdp.estimate.stand_ins import FusedKernels, attend_without_masks
from lightning_mfsdp.estimate.subject import Subject
from lightning_mfsdp.options.dtypes import PrecisionName, ShardedPrecision, default_policy
from lightning_mfsdp.options.strategy_options import TrainerOptions
from lightning_mfsdp.recompute.apply import find_stacks

__all__ = ["MemoryEstimate", "Rehearsal", "rehearse"]

LAYERS, HEAD = "activations", "logits and loss"
_STEPS = 2  # slots are planned at the end of the first, which makes the optimizer's state as well


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run to estimate.

    Attributes:
        ranks: How many GPUs.
        rank: Which of them. Buffers are equal on all; optimizer state differs by padding, and the first rank has the least of that.
        options: Of the strategy.
        precision: Of the Trainer.
        policy: Fields that replace those of the policy: the options', or the precision's.
        microbatches: `accumulate_grad_batches`.
        node_size: Ranks of a node.
    """

    ranks: int
    rank: int = 0
    options: TrainerOptions = field(default_factory=TrainerOptions)
    precision: PrecisionName = "bf16-mixed"
    policy: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    node_size: int = 8


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What one rank holds in a step, in bytes.

    Attributes:
        most: The most of each kind at any time.
        peak: Of each kind when all together are most.
        moment: When that is.
        host: Host memory of main weights and optimizer state.
        parameters: Elements of the whole model.
        padding: Elements of address spaces that belong to no parameter, relative to those that do.
    """

    most: dict[str, int]
    peak: dict[str, int]
    moment: str
    host: int
    parameters: int
    padding: float

    @property
    def total(self) -> int:
        """All kinds at the peak."""
        return sum(self.peak.values())


def rehearse(subject: Subject, run: Rehearsal) -> MemoryEstimate:
    """Train two steps of a model without memory, as the Trainer does, and return what the second one held.

    The process must have no process group; it has none afterwards.

    Args:
        subject: What is trained.
        run: How.

    Raises:
        ValueError, ShardingError: As the strategy, such as axes that do not fit the number of ranks.
        RuntimeError: There is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "an estimate of memory needs a process without a process group, and this one has one; use another process"
        )
    run.options.mesh_sizes.of_world(run.ranks, run.node_size)  # refuses sizes before anything is built
    with ExitStack() as around:
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        compat.init_group_of_absent_ranks(run.rank, run.ranks)
        around.callback(gc.collect)
        around.callback(dist.destroy_process_group)
        return _Step(subject, run).estimate()


class _Step:
    def __init__(self, subject: Subject, run: Rehearsal) -> None:
        self._subject, self._run = subject, run
        self._device = torch.device("cpu")
        policy = run.options.policy
        if run.policy:
            policy = replace(policy or default_policy(run.precision), **run.policy)
        self._precision = ShardedPrecision(run.precision, policy=policy)
        mesh = run.options.mesh_sizes.connect("cpu", run.ranks, run.node_size)
        # Numbers of ranks are read here, while tensors still have values.
        self._mesh = replace(mesh, sharded=sharded_mesh(mesh.sharded))

    def estimate(self) -> MemoryEstimate:
        subject, run = self._subject, self._run
        with self._precision.tensor_init_context(), torch.device("meta"):
            module = subject.build()
        parameters = sum(parameter.numel() for parameter in module.parameters())
        attend_without_masks(module)
        live = LiveMemory(LAYERS)
        with compat.tensors_without_memory(), live:
            run.options.shard(module, self._mesh, self._precision, self._device)
            balance_experts(module)
            optimizers = subject.optimizers(module)
            for optimizer in optimizers:
                fully_shard_optimizer(optimizer)
            with self._divided_sequences(module) as part_of, FusedKernels():
                for _ in range(_STEPS):
                    live.forget()
                    meter = _Meter(module, live, lambda: self._optimizer_bytes(optimizers))
                    with meter:
                        self._train(module, optimizers, part_of, meter)
            views = units(module)
        own = sum(view.num_parameters for view in views)
        padding = sum(view.padding_fraction * view.num_parameters for view in views) / max(1, own)
        host = meter.held.host + (_state_bytes(optimizers) if run.options.offload else 0)
        return MemoryEstimate(
            most=dict(meter.most),
            peak=meter.peak,
            moment=meter.moment,
            host=host,
            parameters=parameters,
            padding=padding,
        )

    def _optimizer_bytes(self, optimizers: list[Optimizer]) -> int:
        return 0 if self._run.options.offload else _state_bytes(optimizers)

    def _train(self, module: nn.Module, optimizers: list[Optimizer], part_of: Any, meter: _Meter) -> None:
        """One step, in the order of Lightning's loop: gradients are cleared between the forward and the backward."""
        run, batch = self._run, self._subject.batch()
        for number in range(run.microbatches):
            is_last = number == run.microbatches - 1
            held_back = (
                nullcontext() if is_last else no_sync(module, keep_sharded=run.options.accumulation == "sharded")
            )
            with held_back:
                with part_of(batch) as part, gather_root(module), self._precision.forward_context():
                    loss = self._subject.loss(module, part)
                if number == 0:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                meter.sample("loss")
                with around_backward(module), self._precision.backward_context():
                    compat.backward_under_function_modes(loss)  # what is recomputed needs `FusedKernels` as well
                del loss
        meter.sample("gradients complete")
        for optimizer in optimizers:
            optimizer.step()
            if run.options.free_gradients:
                optimizer.zero_grad()
        meter.sample("optimizer step")

    @contextmanager
    def _divided_sequences(self, module: nn.Module) -> Iterator[Callable[[Any], AbstractContextManager[Any]]]:
        """What gives a step this rank's part of a batch, where there is a context axis."""
        options, mesh = self._run.options, self._mesh
        if mesh.context is None:
            yield nullcontext
            return
        tensor = 1 if mesh.tensor is None else dist.get_world_size(mesh.tensor)
        divided = DividedBatches(mesh.context, options.context_method, options.context_dims or {}, self._device, tensor)
        divided.begin(module)
        try:
            yield lambda batch: divided.step(batch, "batch", 0, closely=False, trains=True, stays=True)
        finally:
            divided.end()


class _Meter(MemoryTimeline):
    """The most that a step holds: between two samples, what operations have made at most and what the engine holds before or after."""

    def __init__(self, module: nn.Module, live: LiveMemory, optimizer_bytes: Callable[[], int]) -> None:
        super().__init__(module)
        self._whole, self._live, self._state = module, live, optimizer_bytes
        self.held = held_memory(module)
        self.most = Counter[str]()
        self.peak: dict[str, int] = {}
        self.moment = ""

    def begin(self) -> None:
        """Also follow where layers end, and the head begins."""
        super().begin()
        for layer in _layers(self._whole):
            self._handles += [
                layer.register_forward_pre_hook(self._enter_layer),
                layer.register_forward_hook(self._leave_layer),
            ]

    def sample(self, unit: str, phase: str = "") -> MemorySample | None:  # type: ignore[override]
        """Look what is held now, and what was made since the last call."""
        before, self.held = self.held, held_memory(self._whole)
        made = self._live.take_most()
        for held in (before, self.held):
            kinds = {**_kinds(held), "optimizer state": self._state(), **made}
            for kind, size_bytes in kinds.items():
                self.most[kind] = max(self.most[kind], size_bytes)
            if sum(kinds.values()) > sum(self.peak.values()):
                self.peak, self.moment = kinds, " ".join(filter(None, (unit, phase)))
        return None

    def _enter_layer(self, layer: nn.Module, args: Any) -> None:
        self._live.part = LAYERS

    def _leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if compat.backward_task() >= 0:
            return
        self._live.part = HEAD
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._enter_backward_of_layers)

    def _enter_backward_of_layers(self, grad: Tensor) -> None:
        self._live.part = LAYERS


def _kinds(held: HeldMemory) -> dict[str, int]:
    return {
        **{f"main weights, {_name(dtype)}": size_bytes for dtype, size_bytes in held.main.items()},
        **{f"weights, {_name(dtype)}": size_bytes for dtype, size_bytes in held.compute.items()},
        "gradients": held.gradients,
        "gathered weights": held.gathered,
        "reduction buckets": held.buckets,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the model's stacks, such as blocks of a transformer; none if it has no stack."""
    try:
        return [layer for stack in find_stacks(module) for _, layer in stack]
    except ValueError:
        return []


def _state_bytes(optimizers: list[Optimizer]) -> int:
    """Of the memory that state lies in, which offloaded state shares."""
    tensors = [
        value.to_local() if isinstance(value, DTensor) else value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in tensors_in(values)
    ]
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
