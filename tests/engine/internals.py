"""What tests of other rooms, and helpers of all tests, look at inside the engine, so that one file follows when its modules change.

A file of this folder that is about one class of the engine imports that class itself.
"""

from __future__ import annotations

from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.core import context
from lightning_mfsdp.engine.core.codec import Fragment, WeightCodec
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.gradients import DirectWrites
from lightning_mfsdp.engine.core.group import ParameterGroup, as_local, owner_of
from lightning_mfsdp.engine.core.inspect import context_of
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor
from lightning_mfsdp.engine.core.unit import unit_of
from lightning_mfsdp.engine.features import fused_adam
from lightning_mfsdp.engine.features.direct_gradients import gradient_memory
from lightning_mfsdp.engine.features.graphs.captured_loss import loss_in
from lightning_mfsdp.engine.features.graphs.recording import _described as described
from lightning_mfsdp.engine.features.offload import streamed_step
from lightning_mfsdp.engine.features.offload.offloaded_state import empty_at_rest, put_to_rest

__all__ = [
    "Context",
    "DirectWrites",
    "Fragment",
    "ParameterGroup",
    "Piece",
    "Ranges",
    "ShardedTensor",
    "WeightCodec",
    "as_local",
    "context",
    "context_of",
    "described",
    "empty_at_rest",
    "fused_adam",
    "gradient_memory",
    "loss_in",
    "owner_of",
    "put_to_rest",
    "streamed_step",
    "unit_of",
]
