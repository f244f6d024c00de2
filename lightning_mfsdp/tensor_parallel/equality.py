"""Makes values equal on the ranks of a tensor axis: parameters and buffers before they are divided, and random numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.packed import has_tensors_inside

__all__ = ["share_random_state", "share_values"]


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


@torch.no_grad()
def share_values(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a tensor axis the first one's whole parameters and buffers, one by one; those on the meta device have no values.

    Args:
        module: Nothing in it is divided.
        group: The ranks of the axis.
        device: What their communication needs tensors on.

    Raises:
        ShardingError: A parameter has tensors inside, such as a quantized weight of torchao.
    """
    for name, parameter in module.named_parameters():
        if has_tensors_inside(parameter):
            raise ShardingError(
                f"parameter {name} is packed ({type(parameter).__name__}), and no part of packed numbers is a part of a weight, which "
                "ranks along a tensor axis have; use tensor=1, or quantize no weights"
            )
    first = dist.get_global_rank(group, 0)
    shared: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor) or id(tensor) in shared or not tensor.numel():
            continue
        shared.add(id(tensor))
        content = tensor.detach().to(device).contiguous()
        dist.broadcast(_bytes(content), first, group=group)
        if content.data_ptr() != tensor.data_ptr():
            tensor.copy_(content)


def _bytes(tensor: Tensor) -> Tensor:
    """Backends do not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)
