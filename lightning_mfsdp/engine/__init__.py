"""The sharding engine: torch only. It does not depend on Lightning, Transformer Engine or mixture of experts.

Terms, and where they are defined:

    unit                   what is unsharded and reduced together: a sharded module, or several that run one after the other (core/unit)
    root, group            the units of one outermost module; the parameters of a unit with one dtype (core/context, core/group)
    main weight            what the optimizer steps, in the main dtype: this rank's rows
    compute shard          the same rows in the compute dtype, where they are kept in addition to it
    unsharded weight       all rows in the compute dtype, which forward and backward read (core/weights)
    main gradient          what the optimizer reads: this rank's rows, reduced; the bucket is what is in flight (core/gradients)
    representation         of a parameter: unsharded (the module's own), sharded (a DTensor) or local (plain rows)
    unshard, reshard       all-gather a weight; free the gathered memory. Prefetch: unshard before it is needed
    register               have modules show one representation or another
    pooled buffer, slot    memory for an unsharded weight that units take in turn (core/storage)
    layout, segment, gap   addresses of a group's parameters; one flat address space; cells that belong to no parameter (layout/layout)
    axis, dim              of a mesh; of a tensor
    call, pass             one forward of a unit and its backward; the forwards between two backwards
    grouped modules        several modules that are one unit and run one after the other
    held back              gradients that `no_sync` keeps, not reduced
    codec                  how quantized weights are stored (core/codec)
"""

from lightning_mfsdp.base.errors import CollectiveError, EngineStateError, ShardingError
from lightning_mfsdp.engine.api.fully_shard import fully_shard
from lightning_mfsdp.engine.api.optimizer import fully_shard_optimizer
from lightning_mfsdp.engine.api.units import fully_shard_units, shard_added
from lightning_mfsdp.engine.core.conversion import bring_home, unshard_model
from lightning_mfsdp.engine.core.functions import (
    around_backward,
    gather_again,
    gather_root,
    make_replicas_equal,
    no_sync,
    record_ranges,
    reduce_pending,
    refresh_weights,
    unshard,
    watch_backward,
)
from lightning_mfsdp.engine.core.inspect import (
    FlatGradient,
    ParameterView,
    UnitView,
    collectives_begun,
    flat_gradients,
    is_sharded,
    refuse_unsharded,
    sharded_parameters,
    units,
    unsharded_parameters,
)
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.features.buffers import broadcast_buffers
from lightning_mfsdp.engine.features.ema import AveragedWeights
from lightning_mfsdp.engine.features.gradient_watch import (
    GradientWatch,
    NonFiniteGradients,
    NonFiniteLoss,
    NonFiniteParameter,
)
from lightning_mfsdp.engine.features.graphs.capture import CapturedStep, capture_step
from lightning_mfsdp.engine.features.graphs.captured_loss import CapturedLoss, capture_loss
from lightning_mfsdp.engine.features.held_memory import HeldMemory, held_memory
from lightning_mfsdp.engine.features.lerp import lerp_
from lightning_mfsdp.engine.features.memory_timeline import MemorySample, MemoryTimeline
from lightning_mfsdp.engine.features.step_trace import note_collective, traced_step
from lightning_mfsdp.engine.optimizer.adopt import ELEMENTWISE_OPTIMIZERS
from lightning_mfsdp.engine.optimizer.local_rows import (
    ElementwiseOptimizer,
    LocalRowsOptimizer,
    RowPlacement,
    has_gradient,
    row_placement,
)
from lightning_mfsdp.engine.optimizer.norm import clip_grad_norm_, clip_grad_value_, grad_norm

__all__ = [
    "ELEMENTWISE_OPTIMIZERS",
    "AveragedWeights",
    "CapturedLoss",
    "CapturedStep",
    "CollectiveError",
    "ElementwiseOptimizer",
    "EngineStateError",
    "FlatGradient",
    "GradientWatch",
    "HeldMemory",
    "LocalRowsOptimizer",
    "MemorySample",
    "MemoryTimeline",
    "MixedPrecisionPolicy",
    "NonFiniteGradients",
    "NonFiniteLoss",
    "NonFiniteParameter",
    "ParameterView",
    "RowPlacement",
    "ShardingError",
    "UnitView",
    "around_backward",
    "bring_home",
    "broadcast_buffers",
    "capture_loss",
    "capture_step",
    "clip_grad_norm_",
    "clip_grad_value_",
    "collectives_begun",
    "flat_gradients",
    "fully_shard",
    "fully_shard_optimizer",
    "fully_shard_units",
    "gather_again",
    "gather_root",
    "grad_norm",
    "has_gradient",
    "held_memory",
    "is_sharded",
    "lerp_",
    "make_replicas_equal",
    "no_sync",
    "note_collective",
    "record_ranges",
    "reduce_pending",
    "refresh_weights",
    "refuse_unsharded",
    "row_placement",
    "shard_added",
    "sharded_parameters",
    "traced_step",
    "units",
    "unshard",
    "unshard_model",
    "unsharded_parameters",
    "watch_backward",
]
