"""Packed weights: parameters whose numbers do not lie in memory one by one in the parameter's own dtype, such as 4-bit weights.

    a tensor with tensors inside    torchao's, and every class with PyTorch's protocol `__tensor_flatten__` and `__tensor_unflatten__`
    bytes with a state beside       `Params4bit` of bitsandbytes: packed numbers as data, and scales in the attribute `quant_state`

No library is imported: the first are known by the protocol, the second by their attributes (bitsandbytes 0.50).
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat

__all__ = ["has_state_beside", "has_tensors_inside", "is_packed"]


def has_tensors_inside(tensor: Tensor) -> bool:
    """Whether its values are those of other tensors, by PyTorch's protocol. A DTensor's are its own, distributed."""
    return compat.has_inner_tensors(tensor) and not isinstance(tensor, DTensor)


def has_state_beside(tensor: Tensor) -> bool:
    """Whether it is a weight of bitsandbytes, packed already or to be packed when it is moved to a device."""
    return hasattr(tensor, "quant_state") and hasattr(tensor, "bnb_quantized") and not isinstance(tensor, DTensor)


def is_packed(tensor: Tensor) -> bool:
    """Whether rows of `tensor` are no rows of the weight that a layer computes with."""
    return has_tensors_inside(tensor) or has_state_beside(tensor)
