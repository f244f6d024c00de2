"""Copies the first rank's buffers to all ranks: buffers are not sharded, and every rank's forwards write its own.

Buffers that each rank has for itself stay: a module lists them in `buffers_of_each_rank`, and those that DistributedDataParallel was set to
ignore stay, too. Along the mesh's expert axis buffers differ as parameters do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.comm.collectives import broadcast_from_first
from lightning_mfsdp.engine.comm.mesh import Mesh, are_alike
from lightning_mfsdp.engine.core.unit import unit_of

__all__ = ["broadcast_buffers", "share_from_first"]


def broadcast_buffers(module: nn.Module) -> None:
    """Set the buffers of a sharded module to the values of the mesh's first rank, in place. Collective; it waits for the device.

    The strategies call it before an evaluation, a checkpoint and a state dict, so that all ranks evaluate with what is saved. Those that
    a module lists in `buffers_of_each_rank` (names of its own, such as counters of what this rank has seen) are not changed.

    Args:
        module: The outermost one that was given to `fully_shard`. Nothing happens with any other.

    Raises:
        EngineStateError: On all ranks: buffers differ between ranks in name, shape or dtype.
    """
    root = unit_of(module)
    if root is None or not (mesh_of_root := root.context.mesh).all_axes:
        return
    ignored = compat.ddp_ignores(module)
    followed = [(name, buffer, mesh) for name, buffer, mesh in _buffers(module) if name not in ignored]
    _check_alike([(name, buffer) for name, buffer, _ in followed], mesh_of_root, root.context.device)
    by_mesh: dict[DeviceMesh, tuple[Mesh, list[Tensor]]] = {}
    for _, buffer, mesh in followed:
        by_mesh.setdefault(mesh.device_mesh, (mesh, []))[1].append(buffer)
    for mesh, buffers in by_mesh.values():
        share_from_first(buffers, mesh)


def share_from_first(tensors: Sequence[Tensor], mesh: Mesh) -> None:
    """Overwrite tensors of any dtype with those of the mesh's first rank, in few broadcasts of bytes. Collective."""
    contents = [content for tensor in tensors if (content := _own_memory(tensor.detach())).numel()]
    # Buffers that an evaluation has created in inference mode may be written in that mode only.
    in_inference_mode = any(content.is_inference() for content in contents)
    with torch.no_grad(), torch.inference_mode(in_inference_mode):
        pieces = [content.contiguous() for content in contents]
        broadcast_from_first(pieces, mesh.replicated_axes)
        for content, piece in zip(contents, pieces, strict=True):
            if piece.data_ptr() != content.data_ptr():  # contiguous() made a copy, because the tensor has gaps
                content.copy_(piece)


def _own_memory(tensor: Tensor) -> Tensor:
    """The elements that an expanded tensor repeats."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, Mesh]]:
    """Each buffer that follows the first rank, once, with its full name and the mesh over which it is the same."""
    root = unit_of(module)
    assert root is not None, "the caller checked"
    meshes: dict[str, Mesh] = {"": root.context.mesh}
    seen: set[int] = set()
    for name, part in module.named_modules():
        parent, unit = name.rpartition(".")[0], unit_of(part)
        mesh = next((group.mesh for group in unit.groups if group.mesh.expert is not None), None) if unit else None
        meshes[name] = mesh or meshes.get(parent, root.context.mesh)
        of_each_rank = getattr(part, "buffers_of_each_rank", ())
        for key, buffer in part._buffers.items():
            plain = isinstance(buffer, Tensor) and not isinstance(buffer, DTensor)
            if buffer is not None and plain and key not in of_each_rank and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{name}.{key}" if name else key), buffer, meshes[name]


def _check_alike(buffers: Sequence[tuple[str, Tensor]], mesh: Mesh, device: torch.device) -> None:
    """Raise on all ranks unless all have the same names, shapes and dtypes; a broadcast would mix them up, or wait."""
    described = {name: f"{tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers}
    if are_alike(described, mesh.all_axes, device):
        return
    everyones: list[dict[str, str]] = [described]
    for axis in mesh.all_axes:
        gathered: list[list[dict[str, str]]] = [[] for _ in range(axis.size)]
        dist.all_gather_object(gathered, everyones, group=axis.group)
        everyones = [theirs for several in gathered for theirs in several]
    names = dict.fromkeys(name for theirs in everyones for name in theirs)
    differing = {name: {theirs.get(name, "none") for theirs in everyones} for name in names}
    listed = [f"{name}: {' and '.join(sorted(variants))}" for name, variants in differing.items() if len(variants) > 1]
    raise EngineStateError(
        f"buffers shall follow the first rank, and ranks have different ones: {'; '.join(listed[:4]) or 'in another order'} (of "
        f"{len(listed)}). Name buffers that each rank has for itself in buffers_of_each_rank of their module, or leave all as they are "
        "with broadcast_buffers=False of the strategy"
    )
