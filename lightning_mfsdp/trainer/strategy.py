"""MFSDPStrategy: Lightning's calls become engine calls. It moves no gradient and computes no weight itself.

    setup_environment   process group, device mesh (data) or (outer, data)
    setup               dtype of the module, units, fully_shard, buffers to the device, optimizers
    *_step              the contexts of a step, listed above `training_step`
    backward            the engine is notified that a backward starts; gradients are final when it returns
    optimizer_step      gradients may be freed at once

Numbers are computed by the engine, dtypes are set in `precision.py`, processes in `launch/processes.py`, checkpoints in
`checkpointing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import (
    MockOptimizer,
    StrategyRegistry,
    TrainerFn,
    is_param_in_hook_signature,
    to_uncompiled,
)
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.huggingface import copied_configurations
from lightning_mfsdp.context_parallel.model_inputs import complete_inputs
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    around_backward,
    fully_shard_optimizer,
    gather_root,
    is_sharded,
    no_sync,
    refuse_unsharded,
    unshard_model,
    watch_backward,
)
from lightning_mfsdp.engine import broadcast_buffers as share_buffers
from lightning_mfsdp.options.arguments import check_batch_norms, check_device
from lightning_mfsdp.options.compilation import compile_options
from lightning_mfsdp.options.foreign_options import answers_foreign_options
from lightning_mfsdp.options.mesh import RunMesh
from lightning_mfsdp.options.metrics import SynchronizedMetrics
from lightning_mfsdp.options.shared_batches import SharedBatches, from_first
from lightning_mfsdp.options.strategy_options import REGISTERED, TrainerOptions, move_rest_to_device
from lightning_mfsdp.options.unit_selection import UnitsArgument
from lightning_mfsdp.recompute import Recompute
from lightning_mfsdp.trainer.callback_hooks import (
    SeesTrainingSteps,
    check_background_saves,
    check_callbacks,
    copies_model,
    recompute_option,
)
from lightning_mfsdp.trainer.checkpointing import CheckpointingStrategy
from lightning_mfsdp.trainer.cuda_graph import GraphedTrainingStep, graphed_training_step
from lightning_mfsdp.trainer.evaluation import step_with_all_ranks
from lightning_mfsdp.trainer.known_warnings import KnownWarnings
from lightning_mfsdp.trainer.loggers import check_loggers, check_watched
from lightning_mfsdp.trainer.notebook import ForkedLauncher
from lightning_mfsdp.trainer.precision import MFSDPPrecision, translate_precision

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import Precision

__all__ = ["MFSDPStrategy", "register_strategies"]


class MFSDPStrategy(CheckpointingStrategy):
    """Fully sharded training of any LightningModule on CPU or CUDA, any number of devices and nodes.

    Args:
        sharding: What is sharded on the shard axis: "no_shard", "optim", "optim_grads", "optim_grads_params", or 0 to 3. Or patterns of
            module names with one of these each, such as {"*.experts": "optim", "*": "optim_grads_params"}: the first counts that matches a
            module or one around it.
        outer_sharding: On the outer axis: "no_shard" (HSDP) or "optim" (HFSDP).
        policy: Dtypes of weights, gradients and communication. `None`: what `Trainer(precision=...)` stands for. If given, it replaces
            that, and may not contradict it in what is computed.
        units: "auto", a list of module classes or class names, or a callable: which modules are gathered as one. See `select_units`.
        blocks_per_unit: How many neighboring blocks are gathered as one. "auto": small ones together, if `units` is "auto".
        data: Ranks along the data axis, over which the model is sharded. "auto": all that the other axes leave.
        outer: Ranks along the outer axis: groups that each hold the whole model, such as nodes. Neighboring ranks share the data axis.
        outer_size: The same as `outer`.
        context: Ranks along the context axis, which divide every sequence of a batch among themselves: activations take 1 / context of the
            memory. The model is sharded over them as well. Attention of models of transformers sees whole sequences; attention of your own
            uses `lightning_mfsdp.context_parallel.context_attention`. Losses that models compute from labels are means over all tokens.
        context_method: How attention sees whole sequences. "ulysses": some heads on each rank, after an all-to-all; any attention kernel.
            "gather": keys and values are gathered; any number of heads. "auto": "ulysses" if the model's heads can be divided.
        context_dims: Sequence dim of entries of a batch, by key or, in a tuple, by position as a string; `None` for one that stays whole.
            Those that batches for transformers have are known.
        tensor: Ranks along the tensor axis, which divide the weights of each layer among themselves and compute every batch together. What
            is divided says the plan of a model of transformers, `tensor_plan`, or the layers themselves (Megatron's, Transformer Engine's,
            those given to parallelize_module).
        tensor_plan: Names of modules or parameters to names of styles, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; see
            `lightning_mfsdp.tensor_parallel`. `None`: the own plans of models of transformers.
        sequence_parallel: Between attention and MLPs, each tensor rank has a part of every sequence, so that these activations take 1 /
            tensor of the memory. For models whose layers are attention, MLPs and norms.
        expert: Ranks along the expert axis, which have different experts of every layer and compute for each other. They are some of the
            data and context ranks. For `GroupedExperts`, and experts of transformers' models that grouped products can compute.
        expert_dispatcher: How tokens reach experts of other ranks. "all_to_all": only those that are needed, and the host waits for their
            number. "all_gather": all tokens go to all ranks of the axis, and nothing waits for the host; every rank needs equally many.
        shared_batches: The ranks of a context group or a tensor group need the same batches. "compare": the first three of each loader and
            every hundredth are compared, and a difference raises. "broadcast": the first rank of each group sends its own to the others.
        loss_count: What a loss that a model of transformers computes from labels is divided by. "auto": with `context` above 1 by the
            number of targets on all ranks, otherwise each rank's own. "tokens": that of all ranks also without a context axis, in training.
        data_parallel_size: Lightning's word for outer x data x context; a number is checked. If it is given, "auto" too, `device_mesh` has
            the axes of ModelParallelStrategy, "data_parallel" and "tensor_parallel".
        tensor_parallel_size: Lightning's word for `tensor`, with the same effect on `device_mesh`. "auto": the ranks of a node.
        mesh: A device mesh of your own instead of sizes: one axis, or two, outer first unless they are named "outer" and "data" or "shard";
            and perhaps others named "context" and "tensor".
        reshard_after_forward: Reshard weights between forward and backward. `False` saves a gather and costs memory; "auto" keeps as many
            units as fit into the memory left after two steps.
        side_doors: "find": where hooks or attributes of a unit's modules may keep what its forward has computed (a feature, a penalty), its
            weights are gathered again for a backward that begins there. "follow": in every unit, also where nothing is found; it costs host
            time. "raise": nowhere; such a backward raises.
        ignored_parameters: Parameters, or `fnmatch` patterns of their names, that stay whole; their gradients are not reduced.
        storage: "pooled": unsharded weights use fixed slots; "dynamic": in the caching allocator.
        symmetric_memory: Gather by copy engines, which leaves compute cores to the matrix products (NCCL 2.28, one NVLink domain).
        offload: "optimizer": main weights and optimizer state stay in host memory and are staged on the device in parts in the optimizer's
            step. Needs elementwise optimizers, and excludes `cuda_graph`.
        unused_parameters: Parameters that no rank used in a step. "none": they have no gradient and optimizers skip them, as under
            DDP(find_unused_parameters=True). "zero": their gradient is zeros, so weight decay and momentum move them; no rank ever waits to
            learn of the others. `cuda_graph` always does that, and names them.
        compile: `torch.compile` the forward of every unit that has modules inside; a mapping holds options for it, such as {"mode":
            "max-autotune-no-cudagraphs"}. A compiled LightningModule (`torch.compile(model)`) counts as True.
        recompute: Which activations are recomputed in backward instead of being saved: a `Recompute`, or a mapping of its options.
        broadcast_buffers: Before an evaluation, a checkpoint and a state dict buffers take the values of rank 0, such as running
            statistics. `False` leaves each rank's own.
        accumulation: With `accumulate_grad_batches`, "local": no communication until the last microbatch, for a full-size gradient in
            memory. "sharded": strategies with sharded gradients reduce each microbatch over the shard axis; the outer axis waits.
        state_dict_type: Of saved checkpoints. "sharded": a directory, every rank writes its rows; "full": one file with whole tensors, as
            without sharding, gathered one by one into the host memory of rank 0. Both kinds are read, regardless of this option.
        shared_folder_timeout: How long a node may take to see what another one has put into the folder of a sharded checkpoint. If one does
            not see it by then, an error is raised, before the first step if a ModelCheckpoint knows its folder, and at each save.
        start_method: Of the processes that Lightning starts, if no launcher such as torchrun did. "popen": the script runs once for each
            device; "fork": they are forks of this process, the only way in a notebook, where the model has the trained weights after fit.
        timeout: Of collectives. `None`: PyTorch's own, 10 minutes for NCCL and 30 for gloo.
        process_group_backend: `None`: NCCL for CUDA, gloo for CPU.
        cuda_graph: Record training_step and its backward as CUDA graphs after a few steps and replay them: hardly any host time. For fixed
            shapes. Every backward is reduced, also with `accumulate_grad_batches`. What cannot be recorded is named and runs eagerly.
        free_gradients: Clear gradients right after the optimizer's step. Lightning clears them after the next training_step, so they take
            memory while activations accumulate. Hooks that run after the step then see no gradients.
        global_batch_size: Samples of an optimizer step, on all ranks: the Trainer's `accumulate_grad_batches` is set to what the data ranks
            and the loader's batch size leave of it, so that a run that is resumed on another number of ranks makes the same steps of the
            same samples. An error if it is no whole number.
        async_save: Copy what is saved to the host and train on while it is written. The next save, loading and the end wait for it.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Not supported; every rank writes its own part through torch.distributed.checkpoint.
        precision_plugin: `MFSDPPrecision`, or a plugin that can be translated into one.

    Raises:
        ValueError, TypeError: An argument out of its range, of the wrong kind, or in contradiction to another.
    """

    strategy_name = "mfsdp"

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
        cuda_graph: bool = False,
        free_gradients: bool = False,
        global_batch_size: int | None = None,
        async_save: bool = False,
        # Lightning's own.
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._options = options = TrainerOptions.among(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            timeout=options.timeout,
            process_group_backend=options.process_group_backend,
            state_dict_type=options.state_dict_type,
            async_save=options.async_save,
            global_batch_size=options.global_batch_size,
            shared_folder_timeout=options.shared_folder_timeout,
        )
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self.sharding = options.sharding
        self.outer_sharding = options.outer_sharding
        self.accumulation = options.accumulation
        self._connected_mesh: RunMesh | None = None
        self._graphed: GraphedTrainingStep | None = None
        self._batches: SharedBatches | None = None
        self._predicted_batches: SharedBatches | None = None  # context ranks predict samples of their own
        self._ends: list[Callable[[], None]] = []
        self._metrics: SynchronizedMetrics | None = None
        self._is_first_step = True
        self._begins_evaluation = False
        self._known_warnings = KnownWarnings()

    # -- environment ---------------------------------------------------------------------------------------------------

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
                "MFSDPStrategy.device_mesh: there is no mesh before processes are connected. Use it from LightningModule.setup or "
                "configure_model on, also as self.device_mesh"
            )
        return self._connected_mesh

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether CUDA graphs were asked for."""
        return self._options.cuda_graph

    @property
    def graphed_step(self) -> GraphedTrainingStep | None:
        """training_step as CUDA graphs; `None` outside fits, and where it runs eagerly."""
        return self._graphed

    @property
    def precision_plugin(self) -> MFSDPPrecision:
        """The precision, translated from what Lightning built."""
        if isinstance(self._precision_plugin, MFSDPPrecision):
            return self._precision_plugin
        return MFSDPPrecision(policy=self._options.policy)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if precision_plugin is None else translate_precision(precision_plugin, self._options.policy)
        )

    @property
    def _lightning_module(self) -> LightningModule | None:
        """The module that the Trainer trains; it sets this before it checks whether a compiled one is supported."""
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        self._connected = module
        if module is not None and module._compiler_ctx is not None:
            to_uncompiled(module)
            if compile_options(self._options.compile) is None:
                self._options = replace(self._options, compile=True)
            rank_zero_info(
                "mfsdp: a compiled LightningModule was given, and counts as MFSDPStrategy(compile=True): the forward of every unit is "
                "compiled, without the hooks that gather and reduce around it. Options of torch.compile go there: compile={...}"
            )

    # -- the mesh ------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None and self._options.start_method == "fork":
            self._launcher = ForkedLauncher(self, "fork")

    def setup_environment(self) -> None:
        """Connect the processes and build the mesh, once; later entry points find both."""
        check_device(self.root_device.type)
        super().setup_environment()
        if self._connected_mesh is None:
            sizes = self._options.mesh_sizes
            self._connected_mesh = sizes.connect(self.root_device.type, self.world_size, self.num_processes)
        self._module._device_mesh = self.device_mesh
        self._make_whole_for_copies()

    def _make_whole_for_copies(self) -> None:
        """Callbacks that are set up next may copy the model, which an earlier run has sharded; `setup` shards it again. Collective."""
        trainer = self._module.trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        copies = copies_model(callbacks, fitting=trainer.state.fn == TrainerFn.FITTING)
        if copies and any(is_sharded(part) for part in self._module.modules()):
            unshard_model(self._module)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one tensor group have the same batches, and so have those of one context group where sequences are divided."""
        predicts = self._trainer is not None and self._trainer.predicting
        return self._options.sampler_arguments(
            self.configured_world_size, self.global_rank, self.num_processes, parts_differ=predicts
        )

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A metric over all ranks with different data: those of a tensor group count once. Anything else is returned unchanged."""
        return super().reduce(tensor, self._run_mesh.different_data if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say yes, or any."""
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = super().reduce(votes, dist.group.WORLD if dist.is_initialized() else None, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    # -- the model -----------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Tensors in the dtype of the precision; on meta if `empty_init`, to be materialized unit by unit in `setup`.

        Raises:
            ShardingError: `configure_model` asks the mesh for an axis that there is not, as models do that shard themselves.
        """
        try:
            with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
                yield
        except KeyError as error:
            if "mesh_dim_names" not in str(error):
                raise
            raise ShardingError(
                f"configure_model asks for an axis of the mesh that this run does not have: {error.args[0]}. Leave out the lines that "
                "shard the model, since the strategy does that itself; or name its axes data, outer, context and tensor, or pass "
                "data_parallel_size and tensor_parallel_size, with which they have Lightning's names"
            ) from error

    def setup(self, trainer: Trainer) -> None:
        """Shard the model unless it is, move the rest to the device, and create optimizers for fitting."""
        self._known_warnings.begin()
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.look_for_checkpoint()
        check_callbacks(
            trainer.callbacks,  # type: ignore[attr-defined]
            self.precision_plugin.compute_dtype,
            weights_are_whole=self._weights_are_whole,
        )
        check_loggers(trainer.loggers, self._module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.check_accumulation()
            self.look_for_checkpoint_folders()
            if self._saves_in_background:
                check_background_saves(trainer.callbacks)  # type: ignore[attr-defined]
        self.model = self._module
        options = replace(self._options, recompute=recompute_option(self._options.recompute, trainer.callbacks))  # type: ignore[attr-defined]
        if self._layer_sync is not None:
            check_batch_norms(self._module)
        options.shard(
            self._module,
            self._run_mesh,
            self.precision_plugin,
            self.root_device,
            before=self._layer_sync.apply if self._layer_sync is not None else None,
        )
        self.model_to_device()
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()  # makes the loss scaler, for which it needs the device
        if fitting:
            for optimizer in self.optimizers:
                if not isinstance(optimizer, MockOptimizer):  # Lightning's, where configure_optimizers returns None
                    fully_shard_optimizer(optimizer, grad_scaler=self.precision_plugin.scaler)
        self._is_first_step = True
        self.can_read_checkpoints()
        self._share_batches()
        if fitting and self._options.cuda_graph:
            self._graphed = graphed_training_step(self._run_training_step, self._module, trainer)

    def _share_batches(self) -> None:
        mesh = self._run_mesh
        self._batches = self._options.batches(mesh, self.root_device)
        if mesh.tensor is not None:
            self._predicted_batches = SharedBatches(mesh.tensor, None, self.root_device)
        if self._batches is not None:
            if is_param_in_hook_signature(self._module.training_step, "dataloader_iter", explicit=True):
                raise ValueError(
                    "training_step(dataloader_iter) fetches its own batches, and with context or tensor above 1 the strategy compares and "
                    "divides them; use training_step(batch, batch_idx)"
                )
            self._batches.begin(self._module)
        if self._options.loss_count == "tokens" and mesh.context is None:
            self._ends.append(complete_inputs(self._module, always_counts=True))
        if mesh.different_data is not None:
            self._metrics = SynchronizedMetrics(mesh.different_data)
            self._ends.append(self._metrics.release)
            self._take_metrics()

    def _take_metrics(self) -> None:
        """Have metrics synchronized over ranks with different data, also those that hooks have made since the last call."""
        if self._metrics is not None:
            self._metrics.take([self._module, *self._module.trainer.callbacks])  # type: ignore[attr-defined]

    @property
    def _weights_are_whole(self) -> bool:
        """Every rank has all rows of every weight."""
        sharding = self.sharding
        strategies = sharding.values() if isinstance(sharding, Mapping) else (sharding,)
        covers_all = not isinstance(sharding, Mapping) or "*" in sharding or "" in sharding
        return self.world_size == 1 or (covers_all and all(strategy in ("no_shard", 0) for strategy in strategies))

    def on_train_start(self) -> None:
        """Ranks that compute batches together must have equally many. What hooks have asked of loggers so far is checked."""
        super().on_train_start()
        if not self._weights_are_whole:
            check_watched(self._module)
        self._take_metrics()
        if self._batches is not None:
            self._batches.compare_numbers(self._module.trainer.num_training_batches)

    @staticmethod
    def _compare_numbers(shared: SharedBatches | None, batches: Sequence[int | float]) -> None:
        """Check that ranks that compute batches together have equally many, of each loader of an evaluation."""
        if shared is not None:
            for number in batches:
                shared.compare_numbers(number)

    def _as_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with configurations of models as they are outside of this run."""
        if self._batches is None:
            return checkpoint
        with self._batches.undone():
            return {
                key: copied_configurations(value) if "hyper_parameters" in key else value
                for key, value in checkpoint.items()
            }

    def model_to_device(self) -> None:
        """Move what the engine does not manage: buffers, ignored parameters, metrics."""
        move_rest_to_device(self._module, self.root_device)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, if that is enabled."""
        if self._options.broadcast_buffers and not self._is_alone:
            with self._with_others():
                share_buffers(self._module)

    def on_validation_start(self) -> None:
        """All ranks evaluate with the buffers of rank 0."""
        super().on_validation_start()
        self._take_metrics()
        self._compare_numbers(self._batches, self._module.trainer.num_val_batches)
        self._begins_evaluation = True

    def on_test_start(self) -> None:
        """All ranks evaluate with the buffers of rank 0."""
        super().on_test_start()
        self._take_metrics()
        self._compare_numbers(self._batches, self._module.trainer.num_test_batches)
        self._begins_evaluation = True

    def on_predict_start(self) -> None:
        """All ranks predict with the buffers of rank 0."""
        super().on_predict_start()
        self._take_metrics()
        self._compare_numbers(self._predicted_batches, self._module.trainer.num_predict_batches)
        self._begins_evaluation = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As in `CheckpointingStrategy`, with the buffers of rank 0, so that the run continues with what is saved. Collective."""
        self._share_buffers()
        return super().lightning_module_state_dict()

    # -- steps ---------------------------------------------------------------------------------------------------------
    #
    # The contexts around a step of the LightningModule, from the outermost in; docs/design/step.md has them, too.
    #
    #   _with_others         an error of any collective inside, because another rank is missing, says which rank failed
    #   step_with_all_ranks  evaluations only: repeats the step's gathers for ranks that have batches left, so it is around them
    #   _part_of             this rank's part of the batch, which callbacks see. Around CUDA graphs, which replay without the Python that
    #                        divides a batch and compares it with other ranks'
    #   gather_root          the root unit's weights: Lightning calls `*_step` directly, so the root's forward hooks do not run
    #   forward_context      autocast, FP8 or a default dtype. Innermost: it is for the user's code alone
    #
    # Lightning calls these outside of them, each with a context of its own: block_backward_sync, backward, optimizer_step.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`LightningModule.training_step` with the root unit's weights unsharded."""
        if self._is_first_step:
            refuse_unsharded(self._module)  # hooks such as on_train_start may have added some
            self._is_first_step = False
        if self._at_first_step:
            self.go_on_exactly()
        # In automatic optimization the backward comes after the step, and `backward` ends the part; otherwise it runs inside the step.
        stays = self._module.automatic_optimization
        part = self._part_of(self._batches, args, "the training loader", trains=True, stays=stays)
        with self._with_others(), part as args:
            for callback in self._module.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, SeesTrainingSteps):
                    callback.before_training_step(args)
            return (self._graphed or self._run_training_step)(*args, **kwargs)

    def _run_training_step(self, *args: Any, **kwargs: Any) -> Any:
        with gather_root(self._module), self.precision_plugin.forward_context():
            return self._module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`LightningModule.validation_step` with the root unit's weights unsharded."""
        return self._evaluate(self._module.validation_step, self._batches, "validation loader", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`LightningModule.test_step` with the root unit's weights unsharded."""
        return self._evaluate(self._module.test_step, self._batches, "test loader", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`LightningModule.predict_step` with the root unit's weights unsharded."""
        return self._evaluate(self._module.predict_step, self._predicted_batches, "prediction loader", args, kwargs)

    def _evaluate(
        self,
        step: Callable[..., Any],
        batches: SharedBatches | None,
        loader: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._begins_evaluation:
            self._begins_evaluation = False
            self._share_buffers()  # not before: a callback may have put others in their place when the epoch began (EMAWeightAveraging)
        number = args[2] if len(args) > 2 else 0  # Lightning passes it where there are several loaders
        forward_context = self.precision_plugin.forward_context
        with (
            self._with_others(),
            step_with_all_ranks(self._module, self.root_device, forward_context),
            self._part_of(batches, args, f"{loader} {number}") as args,
            gather_root(self._module),
            forward_context(),
        ):
            return step(*args, **kwargs)

    @staticmethod
    @contextmanager
    def _part_of(
        batches: SharedBatches | None, args: tuple[Any, ...], loader: str, *, trains: bool = False, stays: bool = False
    ) -> Generator[tuple[Any, ...], None, None]:
        """The arguments of a step, with this rank's part of the batch, which is the first of them."""
        if batches is None:
            yield args
            return
        with batches.step(args[0], loader, trains=trains, stays=stays) as part:
            yield part, *args[1:]

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Lightning's; ranks that compute a batch together take that of the first of them, if that is requested."""
        predicts = self._trainer is not None and self._trainer.predicting
        group = self._run_mesh.tensor if predicts else self._run_mesh.same_batches
        if group is not None and self._options.shared_batches == "broadcast":
            batch = from_first(batch, group)
        return super().batch_to_device(batch, device, dataloader_idx)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Notify the engine of the backward of this loss."""
        if self._graphed is None or not self._graphed.replayed:
            watch_backward(self._module, closure_loss)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's; a training step may catch what it raises."""
        with around_backward(self._module):
            output = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._batches is not None and self._module.automatic_optimization:
            self._batches.leave()
        return output

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Lightning's step; gradients are freed at once if that was requested."""
        with self._with_others():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._options.free_gradients:
            optimizer.zero_grad()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Backwards inside keep gradients local, or sharded with `accumulation="sharded"`; not with `cuda_graph`."""
        if self._options.cuda_graph:  # also on a rank that runs without graphs: all must communicate alike
            yield
            return
        with no_sync(self._module, keep_sharded=self.accumulation == "sharded"):
            yield

    def teardown(self) -> None:
        """Release what this strategy created. The model stays sharded on its device, ready for the next entry point."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        try:
            super().teardown()
            if self._is_alone:
                self._finish_saving_alone()
            else:
                self.finish_saving()
            for batches in (self._batches, self._predicted_batches):
                if batches is not None and not self._is_alone:
                    batches.finish()
        finally:
            self._known_warnings.end()
            if self._batches is not None:
                self._batches.end()
            for end in self._ends:
                end()
            self._ends.clear()
            self._batches = self._predicted_batches = self._metrics = None
            if self._graphed is not None:
                self._graphed.close()
            self._graphed = None
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the strategy's names to a Lightning registry; calling it again changes nothing."""
        for name, (arguments, description) in REGISTERED.items():
            strategy_registry.register(
                name, cls, description=f"Fully sharded: {description}", override=True, **arguments
            )
        # LightningCLI takes a class path without options for a name, and Lightning looks names up in small letters.
        path = f"lightning_mfsdp.{cls.__name__}".lower()
        strategy_registry.register(path, cls, description="Fully sharded: as mfsdp, by its class path", override=True)


def register_strategies() -> None:
    """Register `Trainer(strategy="mfsdp")` and its variants with `lightning.pytorch`."""
    MFSDPStrategy.register_strategies(StrategyRegistry)
