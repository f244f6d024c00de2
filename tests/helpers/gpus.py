"""Ranks on the GPUs that are here. Where there are fewer GPUs than ranks, NCCL is told of a host for each round of GPUs: it refuses two
ranks on one GPU of a host, and joins hosts by sockets.
"""

from __future__ import annotations

import re

import torch

# Values of REQUIRE: how many GPUs there must be for tests with this mark.
REQUIRED = {"gpu": 1, "gpus2": 2, "gpus4": 4}


def should_have_run(reason: str, required: str) -> bool:
    """Whether the GPUs that `REQUIRE` names would have run a test that was skipped for this reason."""
    found = re.search(r"needs (a|\d+) CUDA device", reason)
    return found is not None and (1 if found[1] == "a" else int(found[1])) <= REQUIRED[required]


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
