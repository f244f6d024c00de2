"""Random numbers of the ranks of a tensor axis."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["share_random_state"]


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a tensor axis the random state of the first one, on the CPU and on `device`.

    From then on they draw equal numbers, so dropout of whole activations is equal on all of them, as long as all draw alike.
    """
    first = dist.get_global_rank(group, 0)
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, first, group=group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        dist.broadcast(state, first, group=group)
        torch.cuda.set_rng_state(state.cpu(), device)
