"""Answers options of FSDP, FSDP2, DeepSpeed and DDP, which users try first, with what to use here instead.

`answers_foreign_options` wraps a constructor that has no `**kwargs`. Its signature, for readers, type checkers and jsonargparse,
stays what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["FOREIGN_OPTIONS", "answers_foreign_options", "unknown_option"]

P = ParamSpec("P")
S = TypeVar("S")

_RECOMPUTE = 'use recompute, such as recompute={"method": "uniform"} for whole layers; docs/recompute.md has the others'
_POLICY = 'use Trainer(precision=...) or Fabric(precision=...), such as "bf16-mixed", or policy=MixedPrecisionPolicy(...) for each dtype'
_OFFLOAD = 'use offload="optimizer", which keeps main weights and optimizer state in host memory'
_PARAMETERS_OFFLOAD = (
    'leave it out: what rests on the device is sharded; offload="optimizer" takes main weights and state to the host'
)
_HOST_BUFFERS = 'leave it out: offload="optimizer" chooses its host buffers by itself, and there is none on NVMe'
_BUCKETS = "leave it out: a unit is a bucket of its own; choose them by units and blocks_per_unit"
_OVERLAP = "leave it out: gathers and reductions always overlap with compute"
_SCALING = 'use Trainer(precision="16-mixed"); MFSDPPrecision(scaler=...) takes a scaler of your own'
_WRAPPING = "leave it out: the module is sharded in place and keeps its names and parameters"
_CONFIG = "there is no configuration file; every option is an argument of the strategy, and Trainer and Fabric know the others"
_MODEL_PARALLEL = (
    "use data, outer, context and tensor, the numbers of ranks along the axes; docs/parallelism.md describes them"
)

_SAME_ANSWER: dict[tuple[str, ...], str] = {
    # FSDPStrategy and FullyShardedDataParallel
    (
        "auto_wrap_policy",
    ): 'use units: "auto", classes or their names, such as units=["Block"], or a function of a module',
    ("activation_checkpointing", "activation_checkpointing_policy"): _RECOMPUTE,
    ("mixed_precision", "mp_policy"): _POLICY,
    ("cpu_offload", "offload_policy"): _OFFLOAD,
    ("sharding_strategy",): (
        'use sharding: "optim_grads_params" for FULL_SHARD, "optim_grads" for SHARD_GRAD_OP, "no_shard" for NO_SHARD; for HYBRID_SHARD '
        'sharding="optim_grads_params" with outer=(number of groups, such as nodes)'
    ),
    ("device_mesh",): "use mesh, or data and outer for a mesh that the strategy makes",
    ("process_group",): "use mesh: a device mesh over the ranks that share parameters",
    ("forward_prefetch", "backward_prefetch"): _OVERLAP,
    (
        "limit_all_gathers",
    ): 'leave it out: gathered weights live in a few fixed slots (storage="pooled"), so no more can be under way',
    ("use_orig_params",): _WRAPPING,
    (
        "ignored_modules",
        "ignored_states",
        "ignored_params",
    ): 'use ignored_parameters, such as ignored_parameters=["head.*"]',
    ("sync_module_states", "init_sync"): "leave it out: sharding takes every rank's rows from rank 0's weights",
    ("param_init_fn",): "leave it out: modules on the meta device are made by their own reset_parameters, unit by unit",
    (
        "device_id",
        "device_ids",
        "output_device",
    ): "use Trainer(accelerator=..., devices=...) or Fabric's arguments of the same names",
    ("shard_placement_fn",): "leave it out: parameters are shared out by whole rows of dim 0, as the layout needs",
    # ModelParallelStrategy
    ("dp_mesh_dims",): _MODEL_PARALLEL,
    ("parallelize_fn",): "leave it out: the strategy shards the model by itself, in units; see units",
    ("save_distributed_checkpoint",): 'use state_dict_type: "sharded" for True, "full" for False',
    # DeepSpeedStrategy
    (
        "stage",
    ): 'use sharding: a ZeRO stage is taken as a number, sharding=3; or a name, such as sharding="optim_grads_params"',
    ("zero_optimization",): 'use sharding, "no_shard" for False',
    ("offload_optimizer", "offload_optimizer_device"): _OFFLOAD,
    (
        "offload_parameters",
        "offload_params_device",
        "remote_device",
        "params_buffer_count",
        "params_buffer_size",
        "max_in_cpu",
    ): (_PARAMETERS_OFFLOAD),
    (
        *("nvme_path", "optimizer_buffer_count", "block_size", "queue_depth", "single_submit", "overlap_events"),
        *("thread_count", "pin_memory", "sub_group_size"),
    ): _HOST_BUFFERS,
    ("overlap_comm",): _OVERLAP,
    ("contiguous_gradients", "allgather_partitions", "reduce_scatter"): (
        "leave it out: gradients of a unit are reduced from one flat buffer, by the collective that fits the sharding"
    ),
    ("allgather_bucket_size", "reduce_bucket_size", "bucket_cap_mb", "bucket_cap_mb_list"): _BUCKETS,
    ("lazy_bucket_allocation",): (
        "leave it out: memory for gradients is allocated in the first backward, and with free_gradients=True again in every one"
    ),
    ("zero_allow_untested_optimizer",): (
        "leave it out: other optimizers than the known ones keep sharded tensors; for one that treats every number by itself call "
        "fully_shard_optimizer(optimizer, elementwise=True)"
    ),
    ("logging_batch_size_per_gpu", "logging_level"): (
        "leave it out: batches are the loaders' business, and the package speaks through Lightning's loggers"
    ),
    ("config",): _CONFIG,
    ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"): _SCALING,
    (
        *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
        "synchronize_checkpoint_boundary",
    ): _RECOMPUTE,
    ("load_full_weights",): "leave it out: checkpoints of both kinds are read, whatever state_dict_type says",
    (
        "exclude_frozen_parameters",
    ): "leave it out: checkpoints hold every parameter, so that they load without the base model",
    # DDPStrategy and DistributedDataParallel
    ("find_unused_parameters", "check_reduction", "skip_all_reduce_unused_params"): (
        'leave it out: parameters that no rank used have no gradient after any backward; unused_parameters="zero" gives them zeros'
    ),
    (
        "static_graph",
    ): "leave it out: no reduction depends on the graph staying as it is; for fixed shapes cuda_graph=True saves host time",
    ("gradient_as_bucket_view",): "leave it out: gradients are views of the reduced buffer already",
    (
        "forward_sync_buffers",
    ): "use broadcast_buffers: buffers follow rank 0 before an evaluation, a checkpoint and a state dict, and not in every forward",
    ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"): (
        "use policy=MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16) for smaller gradients on the wire; other hooks there are none"
    ),
    ("model_averaging_period",): "average weights with lightning_mfsdp.callbacks.ShardedEMA",
    ("start_method",): "leave it out: processes are started by script or by torchrun",
    ("dim",): "leave it out: batches are split by the sampler, not by the strategy",
    ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "batched_grad_copy"): (
        "leave it out: every unit's gradients are reduced when its backward is over"
    ),
    # Names by which Megatron-LM, torchtitan and others know the axes
    ("context_parallel", "context_parallel_size"): "use context: the number of ranks that divide each sequence",
    ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size"): (
        "use expert: the number of ranks that divide the experts of each layer"
    ),
    (
        "tensor_parallel",
        "tensor_model_parallel_size",
    ): "use tensor: the number of ranks that divide the weights of each layer",
    ("devices", "num_nodes"): "it belongs to the Trainer, or to Fabric",
    # Names that Trainer's plugins and Fabric's have in the other of the two.
    ("precision",): "use Trainer(precision=...), or precision_plugin=MFSDPPrecision(...)",
    ("precision_plugin",): "use Fabric(precision=...), or precision=MFSDPFabricPrecision(...)",
    ("checkpoint_io",): "leave it out: every rank writes its own rows; see state_dict_type",
    ("cuda_graph", "free_gradients", "async_save"): "it belongs to the Trainer's MFSDPStrategy",
}

FOREIGN_OPTIONS: Mapping[str, str] = {name: answer for names, answer in _SAME_ANSWER.items() for name in names}
"""What to use instead of each option that other strategies have and ours may lack."""


def unknown_option(owner: str, name: str, options: tuple[str, ...]) -> str:
    """A sentence on an option that `owner` does not have: what to use instead, the nearest one, or all there are."""
    if name in FOREIGN_OPTIONS:
        return f"{owner} has no option {name!r}: {FOREIGN_OPTIONS[name]}"
    foreign = [option for option in FOREIGN_OPTIONS if option not in options]
    nearest = get_close_matches(name.lower(), [*options, *foreign], n=1)
    if not nearest:
        return f"{owner} has no option {name!r}; it takes {', '.join(options)}"
    if nearest[0] in options:
        return f"{owner} has no option {name!r}; did you mean {nearest[0]!r}?"
    return f"{owner} has no option {name!r}; if {nearest[0]!r} is meant: {FOREIGN_OPTIONS[nearest[0]]}"


def answers_foreign_options(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Wrap an `__init__` without `**kwargs`: names that it does not take raise before anything else happens.

    Raises:
        TypeError: From the constructor, with one message for all names that it does not take.
    """
    options = tuple(inspect.signature(constructor).parameters)[1:]
    owner = constructor.__qualname__.partition(".")[0]

    @wraps(constructor)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        unknown = [name for name in kwargs if name not in options]
        if unknown:
            raise TypeError("\n".join(unknown_option(owner, name, options) for name in unknown))
        constructor(self, *args, **kwargs)

    return checked
