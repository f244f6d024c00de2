"""PlacedTensor: a tensor of which each rank holds whole rows, as specified by a parameter's layout. Without arithmetic."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.rows import gather_rows

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["Copied", "Lies", "PlacedTensor", "as_dtensor"]


class Lies(NamedTuple):
    """Which rank holds which rows of a parameter. Tensors keep it even when the module is gone.

    Attributes:
        piece: Where the rows of this rank lie.
        rows_by_shard: Of dim 0 of this rank's part, for each shard of the parameter's layout.
        mesh: The mesh over whose axes shards are distributed.
        split: Whether they are over the shard axis, and over the outer one.
    """

    piece: Piece
    rows_by_shard: Sequence[range]
    mesh: Mesh
    split: tuple[bool, bool]

    def __deepcopy__(self, memo: dict[int, Any]) -> Lies:
        # Copies of a tensor on another device (torch.distributed.checkpoint makes them) lie where it lies.
        return self


class Copied(NamedTuple):
    """Rows that are a copy of a parameter's, perhaps in another dtype, made in grad mode: their gradient is the parameter's.

    Attributes:
        parameter: The sharded one.
        node: Of the copy in autograd's graph; if it has another one, it was computed from since.
    """

    parameter: PlacedTensor
    node: Any


class PlacedTensor(DTensor):
    """This rank's rows of a tensor with as many rows as a parameter. Rows are whole; ranks may have different numbers of them, or none."""

    _owner: tuple[weakref.ref[ParameterGroup], int]
    lies: Lies
    shows_weight: bool = False  # its memory is that of a main weight
    copied: Copied | None = None  # how it was made, if autograd leads from it to a parameter

    @property
    def _derived(self) -> type[PlacedTensor]:
        """What is made of it by arithmetic."""
        return PlacedTensor

    @staticmethod
    def over(
        local: Tensor, like: PlacedTensor, shape: torch.Size | None = None, kind: type[PlacedTensor] | None = None
    ) -> Any:
        """Rows `local` of a tensor of `like`'s shape, or another with as many rows, distributed as `like` is; no copy, no history."""
        with compat.without_torch_function():  # a stand-in for a held-back gradient must not be reduced yet
            plain = as_dtensor(local, like.shape if shape is None else shape, like.device_mesh, like._spec.placements)
        made = (kind or like._derived)(local, plain._spec, requires_grad=False)
        made._owner, made.lies = like._owner, like.lies
        return made

    def _group(self, what: str) -> ParameterGroup:
        group = self._owner[0]()
        if group is None:
            raise EngineStateError(f"{what}: the module of this {tuple(self.shape)} tensor is gone; keep it alive")
        return group

    @property
    def place(self) -> tuple[ParameterGroup, int]:
        """The group, and the index in it, of the parameter whose rows are placed as these are."""
        return self._group("arithmetic"), self._owner[1]

    @property
    def described(self) -> str:
        """Name and unit, for messages."""
        group = self._owner[0]()
        if group is None:
            return f"of shape {tuple(self.shape)}"
        name = group.entries[self._owner[1]].name
        return f"{name} of unit {group.unit_name}" if group.unit_name else name

    @property
    def stepping(self) -> str:
        """The class of the optimizer whose own code works on such tensors now; empty where none does, closures included."""
        group = self._owner[0]()
        context = None if group is None else group.root()
        own_code = None if context is None or context.own_code is None else context.own_code()
        return "" if own_code is None else own_code.name

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different rows; all ranks agree."""
        return any(placement.is_shard() for placement in self._spec.placements)

    @property
    def known_writes(self) -> int:
        """How often weights, or else gradients, of its root were written, counting only writes that are known to all ranks."""
        group = self._owner[0]()
        return 0 if group is None else group.known_writes(weights=self.shows_weight)

    def have_all(self) -> None:
        """Called before it is read or written: add everything that belongs to it."""

    def note_write(self) -> None:
        """Note that main weights may have been written: forward must read the new values."""
        group = self._owner[0]()
        if group is not None:
            group.note_write(weights=self.shows_weight)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, plain and without history: a loss computed from it has no gradient. Collective."""
        with torch.no_grad(), compat.without_torch_function():
            group, rows = self._group("full_tensor"), self._local_tensor.detach()
            return gather_rows(group, self._owner[1], rows.to(group.device)).to(rows.device)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As of any DTensor; those that split it say what this rank has."""
        found: list[Placement] = []
        split: set[int] = set()
        for placement in self._spec.placements:
            if isinstance(placement, Shard):
                dim = placement.dim
                extent = partial(_extent, self.lies.piece, dim, self.described)
                found.append(compat.OwnShard(dim, extent, is_first=dim not in split, owner=self._owner))
                split.add(dim)
            else:
                found.append(placement)
        return tuple(found)

    def of_whole(self, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor with this one's number of rows; a view if it is one box."""
        piece = self.lies.piece
        return piece.of(whole) if whole.shape == piece.shape or not whole.dim() else piece.rows_of(whole)

    def put_into(self, whole: Tensor) -> None:
        """Write what this rank has to its place in a whole tensor."""
        piece, own = self.lies.piece, self._local_tensor
        if whole.shape == piece.shape:
            for box in piece.boxes:
                box.in_whole(whole).copy_(box.in_rows(own))
            return
        for rows, part in zip(
            piece.row_ranges, torch.split(own, [len(rows) for rows in piece.row_ranges]), strict=True
        ):
            whole[rows.start : rows.stop].copy_(part)


def _extent(piece: Piece, dim: int, described: str) -> range:
    """What a rank has along a dim, for DTensor. It is asked for on all ranks, so that it is refused on all."""
    if any(part.dim == dim and len(part.sections) > 1 for part in piece.parts):
        raise EngineStateError(
            f"parameter {described}: along dim {dim} each rank of the tensor axis has strips of several sections, and DTensor's own "
            "functions expect one; load whole tensors on every rank instead of broadcast_from_rank0, or use full_tensor()"
        )
    return piece.extent(dim)


def as_dtensor(local: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor of the global shape; its rows need not be what DTensor would compute."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
