"""Ranks on the GPUs that are here. Where there are fewer GPUs than ranks, NCCL is told of a host for each round of GPUs: it refuses two
ranks on one GPU of a host, and joins hosts by sockets.
"""

from __future__ import annotations

import torch


def environment_of(rank: int, ranks: int) -> dict[str, str]:
    """Variables of a rank that uses NCCL."""
    host, gpu = divmod(rank, torch.cuda.device_count())
    found = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(gpu), "NODE_RANK": str(host)}
    if ranks > torch.cuda.device_count():
        found |= {"NCCL_HOSTID": f"host {host}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return found


def nodes_and_devices(ranks: int) -> dict[str, int]:
    """A Trainer's `num_nodes` and `devices` for them."""
    devices = min(ranks, torch.cuda.device_count())
    return {"num_nodes": ranks // devices, "devices": devices}
