"""How the processes of a run connect and talk about small things; the same under the Trainer and under Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_mfsdp.lightning_api import default_process_group_backend, init_dist_connection, reset_seed

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["all_gather", "barrier", "broadcast", "connect", "set_world_ranks"]

T = TypeVar("T")


def set_world_ranks(environment: ClusterEnvironment | None, num_processes: int, num_nodes: int) -> None:
    """Tell a cluster environment and Lightning's rank-zero helpers who we are. `num_processes`: on each node."""
    if environment is None:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        return
    environment.set_global_rank(environment.node_rank() * num_processes + environment.local_rank())
    environment.set_world_size(num_nodes * num_processes)
    rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta | None
) -> str:
    """Connect the processes, unless somebody has.

    Args:
        environment: Where ranks and addresses come from; it knows ours.
        device: Of this rank.
        backend: `None`: what PyTorch uses for the device.
        timeout: Of collectives; `None`: PyTorch's own.

    Returns:
        The backend.

    Raises:
        ValueError: Another number of processes is connected than the run was given.
    """
    reset_seed()
    backend = backend or default_process_group_backend(device)
    init_dist_connection(environment, backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    if dist.get_world_size() != environment.world_size():
        raise ValueError(
            f"{dist.get_world_size()} processes are connected but the Trainer or Fabric was given {environment.world_size()} (num_nodes x "
            "devices); make them agree"
        )
    return backend


def barrier(device: torch.device) -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)


def broadcast(obj: T, src: int = 0) -> T:
    """The object rank `src` has."""
    if not dist.is_initialized():
        return obj
    objects = [obj]
    dist.broadcast_object_list(objects, src)
    return objects[0]


def all_gather(tensor: Tensor, group: Any | None = None) -> Tensor:
    """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. No gradients flow back."""
    tensor = tensor.detach().contiguous()
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor, group=group)
    return torch.stack(pieces)
