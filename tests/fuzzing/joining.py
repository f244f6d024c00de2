"""Ranks join a process group, and make the meshes of their cases."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.gpus import environment_of


def join(rank: int, ranks: int, device: str, folder: str) -> None:
    """Ranks meet in a file of the folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    here = None
    if device == "cuda":
        os.environ.update(environment_of(rank, ranks))
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if here else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
        device_id=here,
    )


def make_mesh(outer: int, ranks: int, device: str) -> Any:
    """One axis, or (outer, shard)."""
    shape = (outer, ranks // outer) if outer else (ranks,)
    return dist.init_device_mesh(device, shape, mesh_dim_names=("outer", "shard") if outer else ("shard",))
