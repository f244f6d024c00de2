"""What tests of other rooms, and several of this one, call inside the checkpoints' package: one file follows when its modules change.

A file of this folder that is about one module imports that module itself.
"""

from __future__ import annotations

from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.checkpoint.background import BackgroundSaver, Staging
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.full_state import full_model_state, full_optimizer_state
from lightning_mfsdp.checkpoint.state.index import ParameterIndex
from lightning_mfsdp.checkpoint.tools.convert import consolidate_checkpoint

__all__ = [
    "BackgroundSaver",
    "DcpShard",
    "ParameterIndex",
    "Ranks",
    "Staging",
    "consolidate_checkpoint",
    "full_model_state",
    "full_optimizer_state",
    "lightning_io",
    "locate",
]
