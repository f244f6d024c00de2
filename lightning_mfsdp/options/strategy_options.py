"""StrategyOptions: the options that the Trainer's strategy and Fabric's share, and how they apply them to a mesh and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_mfsdp._lightning_api import collect_rng_states, set_rng_states
from lightning_mfsdp.context_parallel.divided_batches import DividedBatches
from lightning_mfsdp.context_parallel.sharing import METHODS
from lightning_mfsdp.engine import (
    bring_home,
    fully_shard_units,
    is_sharded,
    refuse_unsharded,
    shard_added,
    sharded_parameters,
    units,
    unsharded_parameters,
)
from lightning_mfsdp.engine.internals import divided_over
from lightning_mfsdp.options.arguments import (
    check_adapters,
    check_blocks_per_unit,
    check_choice,
    check_context_dims,
    check_cuda_graph,
    check_duration,
    check_expert_graph,
    check_ignored,
    check_policy,
    check_recompute_graph,
    check_samples,
    check_sharding,
    check_tensor_plan,
    ignored_parameters,
    outer_ranks,
    warn_of_other_options,
    warn_of_other_policies,
)
from lightning_mfsdp.options.compilation import compile_options, compile_units
from lightning_mfsdp.options.declared import DeclaredOptions, DeclaredTrainerOptions
from lightning_mfsdp.options.dtypes import ShardedPrecision
from lightning_mfsdp.options.mesh import MeshSizes, RunMesh
from lightning_mfsdp.options.shared_batches import SharedBatches
from lightning_mfsdp.options.unit_selection import (
    describe_units,
    join_blocks,
    select_units,
    validate_units,
)
from lightning_mfsdp.recompute import Recompute, apply_recompute, as_recompute
from lightning_mfsdp.tensor_parallel import apply_plan, divide, share_random_state, share_values

__all__ = ["REGISTERED", "StrategyOptions", "TrainerOptions", "move_rest_to_device"]

Options = TypeVar("Options", bound="StrategyOptions")

# Names under which strategies are registered: their arguments, and a description.
REGISTERED = {
    "mfsdp": ({"sharding": "optim_grads_params"}, "weights, gradients and optimizer state sharded"),
    "mfsdp_optim_grads": ({"sharding": "optim_grads"}, "gradients and optimizer state sharded"),
    "mfsdp_optim": ({"sharding": "optim"}, "optimizer state sharded"),
    "mfsdp_no_shard": ({"sharding": "no_shard"}, "everything replicated"),
    "mfsdp_notebook": ({"start_method": "fork"}, "as mfsdp, in forked processes, for notebooks"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyOptions(DeclaredOptions):
    """The options of both strategies, checked, and how they are applied.

    Raises:
        ValueError, TypeError: An argument out of its range, of the wrong kind, or in contradiction to another.
    """

    @classmethod
    def among(cls: type[Options], arguments: Mapping[str, Any]) -> Options:
        """The options among a constructor's arguments, by name."""
        return cls(**{option.name: arguments[option.name] for option in fields(cls)})

    def __post_init__(self) -> None:
        check_sharding(self.sharding, self.outer_sharding)
        validate_units(self.units)
        check_blocks_per_unit(self.blocks_per_unit)
        check_choice("storage", self.storage, ("pooled", "dynamic"))
        check_choice("reshard_after_forward", self.reshard_after_forward, (True, False, "auto"))
        check_choice("side_doors", self.side_doors, ("find", "follow", "raise"))
        check_choice("offload", self.offload, (None, "optimizer"))
        check_choice("unused_parameters", self.unused_parameters, ("none", "zero"))
        check_choice("symmetric_memory", self.symmetric_memory, (True, False))
        check_choice("broadcast_buffers", self.broadcast_buffers, (True, False))
        check_choice("accumulation", self.accumulation, ("local", "sharded"))
        check_choice("context_method", self.context_method, ("auto", *METHODS))
        check_choice("shared_batches", self.shared_batches, ("compare", "broadcast"))
        check_choice("expert_dispatcher", self.expert_dispatcher, ("all_gather", "all_to_all"))
        check_choice("sequence_parallel", self.sequence_parallel, (True, False))
        check_choice("loss_count", self.loss_count, ("auto", "tokens"))
        check_context_dims(self.context_dims)
        check_tensor_plan(self.tensor_plan)
        check_choice("state_dict_type", self.state_dict_type, ("sharded", "full"))
        check_duration("shared_folder_timeout", self.shared_folder_timeout)
        if self.timeout is not None:
            check_duration("timeout", self.timeout)
        check_choice("start_method", self.start_method, ("popen", "fork"))
        check_policy(self.policy)
        object.__setattr__(self, "outer", outer_ranks(self.outer, self.outer_size))
        _ = self.mesh_sizes
        check_ignored(self.ignored_parameters)
        compile_options(self.compile)
        object.__setattr__(self, "recompute", as_recompute(self.recompute))

    @property
    def mesh_sizes(self) -> MeshSizes:
        """Numbers of ranks along the axes of the mesh.

        Raises:
            ValueError: A size that is none, or sizes beside a mesh.
        """
        return MeshSizes(
            data=self.data,
            outer=self.outer,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
            data_parallel=self.data_parallel_size,
            tensor_parallel=self.tensor_parallel_size,
            with_outer_axis=self.outer_sharding not in ("no_shard", 0),
            mesh=self.mesh,
        )

    def sampler_arguments(
        self, world_size: int, rank: int, node_size: int, *, parts_differ: bool = False
    ) -> dict[str, int]:
        """Arguments of a DistributedSampler with which ranks of one context group or tensor group have the same batches."""
        replicas, place = self.mesh_sizes.data_place(world_size, rank, node_size, parts_differ=parts_differ)
        return {"num_replicas": replicas, "rank": place}

    def batches(self, mesh: RunMesh, device: torch.device) -> SharedBatches | None:
        """What compares and divides batches that ranks compute together; `None` without a context axis and a tensor axis."""
        if mesh.same_batches is None:
            return None
        divided = None
        if mesh.context is not None:
            tensor = 1 if mesh.tensor is None else dist.get_world_size(mesh.tensor)
            divided = DividedBatches(mesh.context, self.context_method, self.context_dims or {}, device, tensor)
        return SharedBatches(mesh.same_batches, divided, device)

    def shard(
        self,
        module: nn.Module,
        mesh: RunMesh,
        precision: ShardedPrecision,
        device: torch.device,
        before: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Choose units and shard `module` in place; one that is sharded already stays unchanged.

        Args:
            module: Any, or with modules inside that were given to `fully_shard`.
            mesh: Of the run.
            precision: Dtypes of the module and of the engine.
            device: Of this rank.
            before: Called with a module in which nothing is sharded yet.
        """
        if self.sequence_parallel and mesh.tensor is None:
            raise ValueError(
                "sequence_parallel=True divides sequences over a tensor axis, and there is none; use tensor=2, or leave it out"
            )
        precision.prepare_module(module, mesh.sharded)
        if mesh.tensor is not None:
            # First: what is initialized or drawn from here on has to be equal on all tensor ranks.
            self._share_random_states(mesh.tensor, device)
        if is_sharded(module):
            bring_home(module)  # undo a `.cpu()` or `.half()` since the last run
            self._refuse_other_axes(module, mesh)
            self._recompute_in(module)
            if added := unsharded_parameters(module):
                self._shard_added(module, added, mesh, precision)
            warn_of_other_options(
                module, precision.policy, self.sharding, self.outer_sharding, self.offload, self.unused_parameters
            )
            return
        chosen: list[nn.Module | list[nn.Module]] = []
        experts: dict[nn.Module, DeviceMesh] = {}
        if any(is_sharded(part) for part in module.modules()):
            self._refuse_options_of_whole_models(module)
            self._refuse_other_axes(module, mesh)
        else:
            if before is not None:
                before(module)  # such as to replace layers, which is possible only while nothing is sharded
            precision.cast_module(module)
            check_adapters(module)
            experts = self._divide(module, mesh, device)
            # Units that the user names are joined only by a number that the user names, too.
            together = 1 if self.blocks_per_unit == "auto" and self.units != "auto" else self.blocks_per_unit
            # Layers of experts are units by themselves, because they are sharded over a mesh of their own.
            around_experts = [unit for unit in select_units(module, self.units) if unit not in experts]
            chosen = [*join_blocks(module, around_experts, together), *experts]
        self._recompute_in(module)
        fully_shard_units(
            module,
            chosen,
            mesh=mesh.sharded,
            before=partial(self._keep_own_parts, experts) if experts else divide,
            other_meshes=experts,
            **self._arguments(module, precision),
        )
        precision.take_sharded_module(module)
        options = compile_options(self.compile)
        if options is not None:
            compile_units(module, options)
        warn_of_other_policies(module, precision.policy)
        if said := precision.policy_beside_precision():
            rank_zero_info(said)
        trained = [view for view in sharded_parameters(module) if view.dtensor.requires_grad]
        device_mesh = mesh.device_mesh
        axes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=False))
        rank_zero_info(describe_units(units(module), sum(view.main.numel() for view in trained), axes))

    def _arguments(self, module: nn.Module, precision: ShardedPrecision) -> dict[str, Any]:
        """Of `fully_shard`, the same for all units."""
        return {
            "sharding": self.sharding,
            "outer_sharding": self.outer_sharding,
            "policy": precision.policy,
            "reshard_after_forward": self.reshard_after_forward,
            "side_doors": self.side_doors,
            "ignored_parameters": ignored_parameters(module, self.ignored_parameters),
            "storage": self.storage,
            "symmetric_memory": self.symmetric_memory,
            "offload": self.offload,
            "unused_parameters": self.unused_parameters,
        }

    def _shard_added(
        self, module: nn.Module, added: Mapping[str, nn.Parameter], mesh: RunMesh, precision: ShardedPrecision
    ) -> None:
        """Shard what came into a sharded model since the last run.

        Raises:
            ShardingError: Layers were divided or compiled before they were sharded, which new ones are not.
        """
        if mesh.tensor is not None or mesh.experts is not None or compile_options(self.compile) is not None:
            refuse_unsharded(module)
        check_adapters(module)
        unsharded = set(map(id, added.values()))
        new = {
            part for part in module.modules() if (own := [*part.parameters()]) and unsharded.issuperset(map(id, own))
        }
        for part in new:
            precision.cast_module(part)
        together = 1 if self.blocks_per_unit == "auto" and self.units != "auto" else self.blocks_per_unit
        chosen = join_blocks(module, [unit for unit in select_units(module, self.units) if unit in new], together)
        count = shard_added(module, chosen, mesh.sharded, **self._arguments(module, precision))
        names = f"{', '.join(list(added)[:4])}{', ...' if len(added) > 4 else ''}"
        rank_zero_info(
            f"mfsdp: {names} came into {type(module).__name__} since it was sharded: {len(chosen)} new units, and {count} sharded again"
        )

    def _divide(self, module: nn.Module, mesh: RunMesh, device: torch.device) -> dict[nn.Module, DeviceMesh]:
        """Divide experts and weights, as far as the mesh has axes for them. Returns the mesh of each layer of experts."""
        experts: dict[nn.Module, DeviceMesh] = {}
        if mesh.experts is not None:
            from lightning_mfsdp.options import expert_layers

            layers = expert_layers.layers_of_experts(module, mesh.experts, self.expert_dispatcher)
            experts = dict.fromkeys(layers, mesh.experts)
        if mesh.tensor is not None:
            self._divide_weights(module, mesh.tensor, device)
        return experts

    def _keep_own_parts(self, experts: dict[nn.Module, DeviceMesh], unit: nn.Module) -> None:
        """Keep of a unit, just before it is sharded and once it has values, only what this rank computes with."""
        from lightning_mfsdp.options import expert_layers

        expert_layers.keep_own_parts(experts, self.expert_dispatcher, unit)

    def _refuse_options_of_whole_models(self, module: nn.Module) -> None:
        """Check that no option decides about all modules of a model, of which some are sharded already.

        Raises:
            ValueError: One does.
        """
        if self.units != "auto":
            raise ValueError(
                f"units={self.units!r}, but {type(module).__name__} already contains modules given to fully_shard. Leave units out, "
                "or do not call fully_shard yourself"
            )
        if self.tensor_plan is not None or self.sequence_parallel:
            option = "tensor_plan" if self.tensor_plan is not None else "sequence_parallel"
            raise ValueError(
                f"{option} was given, but {type(module).__name__} already contains modules given to fully_shard, and weights are "
                "divided before they are sharded. Call lightning_mfsdp.tensor_parallel.apply_plan first, and leave the option out"
            )

    def _refuse_other_axes(self, module: nn.Module, mesh: RunMesh) -> None:
        """Check that this run has the axes along which parameters of a sharded model are divided, which do not change.

        Raises:
            ValueError: It has others.
        """
        tensor_ranks, experts = divided_over(module)
        wanted = 1 if mesh.tensor is None else dist.get_world_size(mesh.tensor)
        if tensor_ranks != wanted:
            raise ValueError(
                f"this run has {wanted} tensor ranks, and {type(module).__name__} is sharded already with {tensor_ranks}, which does not "
                "change. Use one strategy for one model, or build the model again and load a checkpoint: it is read with any number of "
                "tensor ranks"
            )
        if mesh.experts is not None and experts == 1:
            raise ValueError(
                f"expert={self.expert}, but {type(module).__name__} is sharded already with all experts on every rank, which does not "
                "change. Use one strategy for one model, or build the model again and load a checkpoint"
            )

    def _share_random_states(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Have all ranks of a tensor axis draw equal numbers from PyTorch, Python and NumPy: the first rank's states are copied."""
        states = [collect_rng_states(include_cuda=False)]
        dist.broadcast_object_list(states, group=group, group_src=0, device=device)
        set_rng_states(states[0])
        share_random_state(group, device)

    def _divide_weights(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        """Prepare a module whose layers the ranks of a tensor axis compute together, all of them from equal values."""
        share_values(module, group, device)
        applied = apply_plan(module, self.tensor_plan, group, sequence_parallel=self.sequence_parallel)
        rank_zero_info(
            f"mfsdp: {len(applied.styles)} layers and parameters are divided over {dist.get_world_size(group)} tensor ranks"
        )

    def _recompute_in(self, module: nn.Module) -> None:
        """Apply recomputation of activations, if requested; otherwise a model keeps its own."""
        if isinstance(self.recompute, Recompute):
            names = apply_recompute(module, self.recompute)
            few = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            rank_zero_info(f"mfsdp: activations of {len(names)} modules are recomputed in backward: {few or 'none'}")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerOptions(StrategyOptions, DeclaredTrainerOptions):
    """The options of the Trainer's strategy, checked.

    Raises:
        ValueError, TypeError: As `StrategyOptions`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cuda_graph(self.cuda_graph, self.storage, self.offload, divides=self.mesh_sizes.divides_sequences)
        check_recompute_graph(self.cuda_graph, self.recompute)
        check_expert_graph(self.cuda_graph, self.expert, self.expert_dispatcher)
        check_choice("free_gradients", self.free_gradients, (True, False))
        check_choice("async_save", self.async_save, (True, False))
        check_samples("global_batch_size", self.global_batch_size)


def move_rest_to_device(root: nn.Module, device: torch.device) -> None:
    """Move what the engine does not manage: buffers, ignored parameters, metrics."""
    for module in root.modules():
        if isinstance(module, Metric):
            module.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
        for parameter in module.parameters(recurse=False):
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
