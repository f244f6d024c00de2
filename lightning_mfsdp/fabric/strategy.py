"""MFSDPFabricStrategy: Fabric's calls become engine calls, as `lightning_mfsdp.trainer.strategy` does for the Trainer's.

setup_environment   process group, device mesh (data) or (outer, data)
setup_module        dtype of the module, units, fully_shard, buffers to the device
setup_optimizer     local rows; created before or after the module was set up
backward            forward hooks of the root run, so the engine detects it by itself
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import (
    CheckpointIO,
    FabricBackwardSyncControl,
    FabricLauncher,
    FabricMultiProcessingLauncher,
    FabricParallelStrategy,
    FabricPrecision,
    sync_if_available,
    unwrap_fabric_objects,
)
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.ranks import Ranks, same_on_all
from lightning_mfsdp.checkpoint.state.translation import Translation
from lightning_mfsdp.context_parallel.model_inputs import complete_inputs
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    around_backward,
    clip_grad_norm_,
    clip_grad_value_,
    fully_shard_optimizer,
    no_sync,
)
from lightning_mfsdp.engine import broadcast_buffers as share_buffers
from lightning_mfsdp.fabric import checkpoints
from lightning_mfsdp.fabric.precision import MFSDPFabricPrecision
from lightning_mfsdp.launch import communication
from lightning_mfsdp.launch.elastic import ElasticEnvironment
from lightning_mfsdp.options.arguments import check_device
from lightning_mfsdp.options.dtypes import translate
from lightning_mfsdp.options.foreign_options import answers_foreign_options
from lightning_mfsdp.options.mesh import RunMesh
from lightning_mfsdp.options.shared_batches import SharedBatches, from_first
from lightning_mfsdp.options.strategy_options import REGISTERED, StrategyOptions, move_rest_to_device
from lightning_mfsdp.options.unit_selection import UnitsArgument
from lightning_mfsdp.recompute import Recompute

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["MFSDPFabricStrategy"]

T = TypeVar("T")


class MFSDPFabricStrategy(FabricParallelStrategy):
    """Fully sharded training in your own loop, on CPU or CUDA, any number of devices and nodes.

    Args:
        sharding: As in `MFSDPStrategy`.
        outer_sharding: As in `MFSDPStrategy`.
        policy: As in `MFSDPStrategy`.
        units: As in `MFSDPStrategy`.
        blocks_per_unit: As in `MFSDPStrategy`.
        data: As in `MFSDPStrategy`.
        outer: As in `MFSDPStrategy`.
        outer_size: As in `MFSDPStrategy`.
        context: As in `MFSDPStrategy`; `divided` divides the batches of your loop.
        context_method: As in `MFSDPStrategy`.
        context_dims: As in `MFSDPStrategy`.
        tensor: As in `MFSDPStrategy`.
        tensor_plan: As in `MFSDPStrategy`.
        sequence_parallel: As in `MFSDPStrategy`.
        expert: As in `MFSDPStrategy`.
        expert_dispatcher: As in `MFSDPStrategy`.
        shared_batches: As in `MFSDPStrategy`.
        loss_count: As in `MFSDPStrategy`.
        data_parallel_size: As in `MFSDPStrategy`.
        tensor_parallel_size: As in `MFSDPStrategy`.
        mesh: As in `MFSDPStrategy`.
        reshard_after_forward: As in `MFSDPStrategy`.
        side_doors: As in `MFSDPStrategy`.
        ignored_parameters: As in `MFSDPStrategy`.
        storage: As in `MFSDPStrategy`.
        symmetric_memory: As in `MFSDPStrategy`.
        offload: As in `MFSDPStrategy`.
        unused_parameters: As in `MFSDPStrategy`.
        compile: As in `MFSDPStrategy`.
        recompute: As in `MFSDPStrategy`.
        broadcast_buffers: Buffers take the values of rank 0 before a checkpoint, a state dict and the first forward in evaluation mode
            after one in training mode. `False` leaves each rank's own, and lets one rank evaluate alone where weights are whole.
        accumulation: Inside `fabric.no_backward_sync`, "local": no communication, for a full-size gradient in memory. "sharded": strategies
            with sharded gradients reduce each microbatch over the shard axis; the outer axis waits.
        state_dict_type: As in `MFSDPStrategy`.
        shared_folder_timeout: As in `MFSDPStrategy`, at each save.
        start_method: As in `MFSDPStrategy`; with "fork" pass a function to `fabric.launch(function)`, and what it returns comes back.
        timeout: As in `MFSDPStrategy`.
        process_group_backend: As in `MFSDPStrategy`.
        accelerator: Set by Fabric.
        parallel_devices: Set by Fabric.
        cluster_environment: Set by Fabric.
        precision: `MFSDPFabricPrecision`, or a plugin that can be translated into one.

    Raises:
        ValueError, TypeError: An argument out of its range, of the wrong kind, or in contradiction to another.
    """

    @answers_foreign_options
    def __init__(
        self,
        *,
        # Options, from options/declared.py: python docs/options.py writes them.
        sharding: str | int | Mapping[str, str | int] = "optim_grads_params",
        outer_sharding: str | int = "no_shard",
        policy: MixedPrecisionPolicy | None = None,
        units: UnitsArgument = "auto",
        blocks_per_unit: int | Literal["auto"] = "auto",
        data: int | Literal["auto"] = "auto",
        outer: int = 1,
        outer_size: int = 1,
        context: int = 1,
        context_method: Literal["auto", "ulysses", "gather"] = "auto",
        context_dims: Mapping[str, int | None] | None = None,
        tensor: int = 1,
        tensor_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        expert: int = 1,
        expert_dispatcher: Literal["all_gather", "all_to_all"] = "all_to_all",
        shared_batches: Literal["compare", "broadcast"] = "compare",
        loss_count: Literal["auto", "tokens"] = "auto",
        data_parallel_size: int | Literal["auto"] | None = None,
        tensor_parallel_size: int | Literal["auto"] | None = None,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | Literal["auto"] = True,
        side_doors: Literal["find", "follow", "raise"] = "find",
        ignored_parameters: Sequence[str | nn.Parameter] = (),
        storage: Literal["pooled", "dynamic"] = "pooled",
        symmetric_memory: bool = False,
        offload: Literal["optimizer"] | None = None,
        unused_parameters: Literal["none", "zero"] = "none",
        compile: bool | Mapping[str, Any] = False,
        recompute: Recompute | Mapping[str, Any] | None = None,
        broadcast_buffers: bool = True,
        accumulation: Literal["local", "sharded"] = "local",
        state_dict_type: Literal["sharded", "full"] = "sharded",
        shared_folder_timeout: timedelta = timedelta(seconds=30),
        start_method: Literal["popen", "fork"] = "popen",
        timeout: timedelta | None = None,
        process_group_backend: str | None = None,
        # Lightning's own.
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: FabricPrecision | None = None,
    ) -> None:
        self._options = options = StrategyOptions.among(locals())
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision)
        self.sharding = options.sharding
        self.outer_sharding = options.outer_sharding
        self.state_dict_type = options.state_dict_type
        self._num_nodes = 1
        self._connected_mesh: RunMesh | None = None
        self._batches: SharedBatches | None = None
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._backward_sync_control = _BackwardSync(keep_sharded=options.accumulation == "sharded")

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device that this rank computes on."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the run: Fabric's argument of this name, or that of an `ElasticEnvironment`."""
        environment = self.cluster_environment
        if isinstance(environment, ElasticEnvironment):
            environment.refuse_other(self._num_nodes)
            return environment.num_nodes
        return self._num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node, each with one device."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def device_mesh(self) -> DeviceMesh:
        """Axes ("data",), and others that were asked for; Lightning's two if its words were used.

        Raises:
            RuntimeError: Processes are not connected yet.
        """
        return self._run_mesh.device_mesh

    @property
    def _run_mesh(self) -> RunMesh:
        if self._connected_mesh is None:
            raise RuntimeError(
                "MFSDPFabricStrategy.device_mesh: there is no mesh before fabric.launch() has connected the processes; "
                "ask for it after that"
            )
        return self._connected_mesh

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # A single process needs no launcher, so notebooks work.
        if not self.cluster_environment.creates_processes_externally and self.num_nodes * self.num_processes > 1:
            self._launcher = (
                FabricMultiProcessingLauncher(self, "fork")
                if self._options.start_method == "fork"
                else FabricLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            )

    def _set_world_ranks(self) -> None:  # Fabric's connector calls it, too
        communication.set_world_ranks(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes, unless they are connected, and build the mesh."""
        check_device(self.root_device.type)
        super().setup_environment()
        self._set_world_ranks()
        assert self.cluster_environment is not None
        backend, timeout = self._options.process_group_backend, self._options.timeout
        world_size = self.num_nodes * self.num_processes
        communication.connect(self.cluster_environment, self.root_device, backend, timeout, world_size=world_size)
        communication.peers()  # so that a rank which waits for one that failed is released
        if self._connected_mesh is None:
            sizes = self._options.mesh_sizes
            self._connected_mesh = sizes.connect(self.root_device.type, self.world_size, self.num_processes)
        self.precision.connect_device(self.root_device.type)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this. `name` is not used."""
        communication.barrier(self.root_device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object that rank `src` passes, on all ranks; it is pickled. Collective."""
        return communication.broadcast(obj, src)

    def all_reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A tensor over all ranks with different data, in place (a tensor group counts once); anything else is returned unchanged."""
        if group is None or group is dist.group.WORLD:  # Fabric passes the latter for the former
            group = self.data_group
        return sync_if_available(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The `process_group` of metrics of torchmetrics, with one rank of each tensor group; `None`: all ranks."""
        return self._run_mesh.different_data

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. `sync_grads` lets gradients flow back."""
        if sync_grads:
            return super().all_gather(tensor, group, sync_grads)
        return communication.all_gather(tensor, group)

    # -- precision -----------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> MFSDPFabricPrecision:
        """The precision, translated from what Fabric built."""
        if isinstance(self._precision, MFSDPFabricPrecision):
            return self._precision
        return MFSDPFabricPrecision(policy=self._options.policy)

    @precision.setter
    def precision(self, precision: FabricPrecision | None) -> None:
        self._precision = (
            None if precision is None else translate(precision, self._options.policy, MFSDPFabricPrecision)
        )

    # -- modules and optimizers ----------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules in the dtype of the precision; on meta if `empty_init`, to be initialized unit by unit in `setup_module`."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing, as in Fabric's own sharded strategies: `setup_module` moves a model unit by unit."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module, unless it is, and move the rest to the device."""
        self._options.shard(module, self._run_mesh, self.precision, self.root_device)
        move_rest_to_device(module, self.root_device)
        if self._options.broadcast_buffers:
            share_buffers(module)  # as DDP does; from here on all ranks have the same ones, or none
        self._modules.add(module)
        self._share_batches_of(module)
        return _Forward(module, self._share_buffers)

    def _share_batches_of(self, module: nn.Module) -> None:
        if self._batches is None:
            self._batches = self._options.batches(self._run_mesh, self.root_device)
        if self._batches is not None:
            self._batches.begin(module)
        if self._options.loss_count == "tokens" and self._run_mesh.context is None:
            complete_inputs(module, always_counts=True)

    @contextmanager
    def divided(self, batch: Any, loader: str = "the training loader") -> Iterator[Any]:
        """Around forward and backward of a batch: this rank's part of it, where sequences are divided over a context axis.

        Args:
            batch: Of whole sequences, on the device, the same on all ranks of a context group and of a tensor group.
            loader: Its name, for messages.

        Yields:
            A batch of the same kind; the batch itself without a context axis.

        Raises:
            ValueError: The batch cannot be divided, or is not the same on the ranks that compute it together.
        """
        if self._batches is None:
            yield batch
            return
        group = self._run_mesh.same_batches
        if group is not None and self._options.shared_batches == "broadcast":
            batch = from_first(batch, group)
        with self._batches.step(batch, loader, trains=torch.is_grad_enabled()) as part:
            yield part

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one context group and of one tensor group have the same batches."""
        return self._options.sampler_arguments(
            self.num_nodes * self.num_processes, self.global_rank, self.num_processes
        )

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Fabric's; the loop may catch what it raises."""
        with around_backward(*self._modules):  # Fabric does not report which module's backward it is
            super().backward(tensor, module, *args, **kwargs)

    def _share_buffers(self, module: nn.Module) -> None:
        if self._options.broadcast_buffers and any(True for _ in module.buffers()):
            share_buffers(module)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state dict of a module as it was set up, with the buffers of rank 0. Collective."""
        module = _unwrapped(module)
        self._share_buffers(module)
        return super().get_module_state_dict(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replace the parameters that an optimizer holds by this rank's rows."""
        return fully_shard_optimizer(optimizer, grad_scaler=self.precision.scaler)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up a module and the optimizers that were built from its parameters.

        Raises:
            RuntimeError: Parameters on meta, which will be replaced.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if any(parameter.is_meta for group in groups for parameter in group["params"]):
            raise RuntimeError(
                "an optimizer holds parameters on the meta device, which real ones will replace. Call model = fabric.setup_module(model), "
                "build the optimizer from model.parameters(), then optimizer = fabric.setup_optimizers(optimizer)"
            )
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale an optimizer's gradients down to a global norm over all ranks of at most `max_norm`; returns the norm before."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp every gradient element of an optimizer to `[-clip_val, clip_val]`."""
        self.precision.unscale_gradients(optimizer)
        clip_grad_value_(self.precision.main_params(optimizer), float(clip_val))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Fabric's default, which is not used: every rank writes and reads its own part of a checkpoint."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise TypeError(
            f"MFSDPFabricStrategy writes and reads checkpoints by itself, so the plugin {type(io).__name__} would be ignored. Remove it"
        )

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write what `state` holds, as `checkpoints.save` does.

        Raises:
            TypeError: `storage_options` were given: they belong to a CheckpointIO.
        """
        if storage_options is not None:
            raise TypeError(
                "MFSDPFabricStrategy.save_checkpoint: storage_options are for a CheckpointIO, which it does not use; leave them out"
            )
        saved = {key: _unwrapped(value) for key, value in state.items()}
        for model in _models(saved).values():
            self._share_buffers(model)
        checkpoints.save(
            locate(self.broadcast(os.fspath(path))),
            {**saved, **self.precision.fp8_scaling(_models(saved))},
            filter or {},
            whole=self.state_dict_type == "full",
            ranks=Ranks.patient(self._options.shared_folder_timeout),
        )

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
        *,
        rename: Callable[[str], str | None] | None = None,
        ignore: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Read into what `state` holds, in place, as `checkpoints.load` does; returns what is left.

        `fabric.load` calls it without the last two, which `fabric.strategy.load_checkpoint` takes.

        Args:
            path: Of the checkpoint.
            state: Modules, optimizers and values by key; or a module, for a file with its state dict.
            strict: Names must match exactly.
            weights_only: As for `torch.load`.
            rename: From a name of a parameter or buffer in the checkpoint to the name in the module; `None` for what to leave out.
            ignore: Names in the checkpoint, or `fnmatch` patterns of them, to leave out.

        Raises:
            ValueError: There is nothing to read, or nothing to read into; or ranks give different paths.
            TypeError: An optimizer alone.
        """
        same_on_all("the path of fabric.load", os.fspath(path), Ranks())
        location, translated = locate(path), Translation(rename, ignore)
        state = state if isinstance(state, dict) else _unwrapped(state)
        if isinstance(state, Optimizer):
            raise TypeError(
                "an optimizer alone cannot be loaded: its state is found by the names of its module's parameters. Use "
                'fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        if isinstance(state, nn.Module):
            checkpoints.load_raw(location, state, strict=strict, weights_only=weights_only, translated=translated)
            return {}
        if not state:
            raise ValueError(
                f"fabric.load({str(location)!r}): nothing to load into. Weights are read in place, into modules and optimizers; pass them "
                'as fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        restored = {key: _unwrapped(value) for key, value in state.items()}
        rest = checkpoints.load(location, restored, strict=strict, weights_only=weights_only, translated=translated)
        self.precision.take_fp8_scaling(_models(restored), rest)
        # Modules and optimizers were read in place, and stay in `state` as Fabric wrapped them.
        state.update({key: value for key, value in restored.items() if not isinstance(value, (nn.Module, Optimizer))})
        return rest

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the strategy's names to a Fabric registry; calling it again changes nothing."""
        for name, (arguments, description) in REGISTERED.items():
            strategy_registry.register(
                name, cls, description=f"Fully sharded: {description}", override=True, **arguments
            )


class _Forward(nn.Module):
    """The module that Fabric calls in place of a sharded module.

    Fabric routes methods marked by `mark_forward_method` through the forward of what a strategy returns, unless that is the module
    itself; this gathers the root's weights.
    """

    def __init__(self, module: nn.Module, before_evaluation: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.module = module
        self._before_evaluation = before_evaluation
        self._was_trained = True

    def train(self, mode: bool = True) -> _Forward:
        """As of any module; ranks without a batch in training mode follow the others."""
        super().train(mode)
        self._was_trained |= mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training:
            self._was_trained = True
        elif self._was_trained:
            self._was_trained = False
            self._before_evaluation(self.module)
        return self.module(*args, **kwargs)


def _unwrapped(value: Any) -> Any:
    value = unwrap_fabric_objects(value)
    return value.module if isinstance(value, _Forward) else value


def _models(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {key: value for key, value in state.items() if isinstance(value, nn.Module)}


class _BackwardSync(FabricBackwardSyncControl):
    def __init__(self, *, keep_sharded: bool) -> None:
        self._keep_sharded = keep_sharded

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module, keep_sharded=self._keep_sharded) if enabled else nullcontext()
