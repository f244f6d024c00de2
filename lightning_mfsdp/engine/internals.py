"""What other rooms of this package use of the engine in addition to its public names. Not part of the public interface: it may change.

They import from `lightning_mfsdp.engine` and from here, and from nothing else inside. A name is here if its meaning stays when the engine's
files change; what only reads through its objects (units, groups, entries) is asked of a function instead.

    axes of a mesh          CONTEXT, DATA, EXPERT, OUTER, SHARD, TENSOR, role_of: the strategies make meshes, whose axes the engine knows by
                            these names
                            sharded_mesh: the mesh that the engine makes of one with a context axis, which reads numbers of ranks
                            Axis, axis_of: experts exchange tokens by the collectives that the engine's weights and gradients take
    arguments               check_sharding: refuses strategies before there is a module
                            policy_of, divided_over, other_arguments: of a module that is sharded already, to compare with another run's
    a tensor's parameter    view_of, unsharded_of: for code that gets tensors (of state dicts, optimizers, layers) and no module
    rows of a parameter     Piece: where they lie. It is `ParameterView.piece`, and checkpoints make some of their own
                            chunk_memory, chunks_to_read, items_to_write: a piece as torch.distributed.checkpoint asks for it, which is
                            asked of sharded parameters and of what checkpoints save of them
                            placed_as: rows that were read, as a tensor that can be assigned or gathered
    optimizers              steps_rows: before state is saved; put_to_rest, empty_at_rest: where restored state belongs
                            gradient_places, clip_finite_: the Trainer's clipping, which leaves gradients that are not finite as they are
    quantized weights       Fragment, WeightCodec: what Transformer Engine's formats implement
                            gradient_memory: for its layers that write gradients themselves
"""

from lightning_mfsdp.engine.api.kept_arguments import divided_over, other_arguments, policy_of
from lightning_mfsdp.engine.api.strategies import check_sharding
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.mesh import CONTEXT, DATA, EXPERT, OUTER, SHARD, TENSOR, axis_of, role_of, sharded_mesh
from lightning_mfsdp.engine.core.codec import Fragment, WeightCodec
from lightning_mfsdp.engine.core.inspect import placed_as, unsharded_of, view_of
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.saved_piece import chunk_memory, chunks_to_read, items_to_write
from lightning_mfsdp.engine.features.direct_gradients import gradient_memory
from lightning_mfsdp.engine.features.offload.offloaded_state import empty_at_rest, put_to_rest
from lightning_mfsdp.engine.optimizer.adopt import gradient_places, steps_rows
from lightning_mfsdp.engine.optimizer.norm import clip_finite_

__all__ = [
    "CONTEXT",
    "DATA",
    "EXPERT",
    "OUTER",
    "SHARD",
    "TENSOR",
    "Axis",
    "Fragment",
    "Piece",
    "WeightCodec",
    "axis_of",
    "check_sharding",
    "chunk_memory",
    "chunks_to_read",
    "clip_finite_",
    "divided_over",
    "empty_at_rest",
    "gradient_memory",
    "gradient_places",
    "items_to_write",
    "other_arguments",
    "placed_as",
    "policy_of",
    "put_to_rest",
    "role_of",
    "sharded_mesh",
    "steps_rows",
    "unsharded_of",
    "view_of",
]
