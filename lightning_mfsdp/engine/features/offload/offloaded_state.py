"""OffloadedState: keeps an optimizer's state of one group in a buffer of host memory between steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp.engine.core.group import ParameterGroup, place_of
from lightning_mfsdp.engine.core.host_memory import HostMemory, aligned

__all__ = ["OffloadedState", "StateTensor", "empty_at_rest", "put_to_rest", "state_of"]


@dataclass(frozen=True, eq=False)
class StateTensor:
    """A tensor of an optimizer's state, `optimizer.state[local][key]`, which has a number for each number of `local`."""

    local: nn.Parameter
    key: str
    tensor: Tensor


def state_of(optimizer: Optimizer, group: ParameterGroup) -> list[StateTensor]:
    """What an optimizer keeps for each number of a group's parameters at the moment. Counters and other small values are excluded."""
    state_tensors = []
    for entry in group.entries:
        local = entry.local
        for key, value in optimizer.state.get(local, {}).items():
            like_it = isinstance(value, Tensor) and value.shape == local.shape and value.device == local.device
            if like_it and value.dim() and value.numel():
                state_tensors.append(StateTensor(local, key, value))
    return state_tensors


class OffloadedState:
    """Room in host memory for state tensors of one group.

    Attributes:
        memory: All of it.
        at_rest: How the optimizer's table shows them between steps: as tensors of the device.
    """

    def __init__(self, state_tensors: list[StateTensor], device: torch.device) -> None:
        self._keys = [(state_tensor.local, state_tensor.key) for state_tensor in state_tensors]
        self._kinds = [(state_tensor.tensor.dtype, state_tensor.tensor.shape) for state_tensor in state_tensors]
        size_bytes = sum(aligned(shape.numel() * dtype.itemsize) for dtype, shape in self._kinds)
        self.memory = HostMemory(size_bytes, device)
        self.at_rest = self.views_in(self.memory.seen)

    def views_in(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, `[size_bytes]` uint8, laid out as here."""
        views, start = [], 0
        with torch.inference_mode(False):
            for dtype, shape in self._kinds:
                stop = start + shape.numel() * dtype.itemsize
                views.append(memory[start:stop].view(dtype).view(shape))
                start = aligned(stop)
        return views

    def is_all(self, state_tensors: list[StateTensor], views: list[Tensor]) -> bool:
        """Whether `found` is exactly this state, in `views`."""
        return len(state_tensors) == len(views) and all(
            state_tensor.tensor is view and state_tensor.local is local and state_tensor.key == key
            for state_tensor, view, (local, key) in zip(state_tensors, views, self._keys, strict=True)
        )

    def take(self, state_tensors: list[StateTensor]) -> None:
        """Copy the tensors it was made for to host memory, on the current stream, without waiting."""
        for state_tensor, room in zip(state_tensors, self.views_in(self.memory.host), strict=True):
            room.copy_(state_tensor.tensor, non_blocking=True)

    def show(self, optimizer: Optimizer, views: list[Tensor]) -> None:
        """Put `views` into the optimizer's table."""
        for (local, key), view in zip(self._keys, views, strict=True):
            optimizer.state[local][key] = view

    def keep_in(self, optimizer: Optimizer, views: list[Tensor]) -> None:
        """If the optimizer put new tensors of the same kind into its table, copy them to `views` and show those."""
        for (local, key), view in zip(self._keys, views, strict=True):
            table = optimizer.state.get(local, {})
            value = table.get(key)
            if (
                value is not view
                and isinstance(value, Tensor)
                and (value.dtype, value.shape) == (view.dtype, view.shape)
            ):
                table[key] = view.copy_(value)

    def replace(self, optimizer: Optimizer, views: list[Tensor]) -> None:
        """Show the host buffers again where the table still shows `views`."""
        for (local, key), view, tensor in zip(self._keys, views, self.at_rest, strict=True):
            table = optimizer.state.get(local, {})
            if table.get(key) is view:
                table[key] = tensor


def empty_at_rest(local: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a state tensor shaped like a parameter, where such state stays between steps: in host memory or on the parameter's device.

    Args:
        local: What the optimizer holds.
        dtype: Of the state.
    """
    place = place_of(local)
    if place is None or not place[0].offloads or not local.numel():
        return torch.empty_like(local, dtype=dtype, requires_grad=False)
    memory = HostMemory(local.numel() * dtype.itemsize, local.device)
    return memory.seen.view(dtype).view(local.shape)


def put_to_rest(value: Tensor, local: Tensor) -> Tensor:
    """Move a restored state tensor to where such state is kept between steps; one on the parameter's device is assumed to be there."""
    place = place_of(local)
    if place is None or not place[0].offloads or value.device == local.device or value.shape != local.shape:
        return value
    return empty_at_rest(local, value.dtype).copy_(value)
