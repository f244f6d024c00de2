"""What sharded tensors use of the parameter whose rows they hold, and of the group that it belongs to.

`Entry` (parameter.py) and `ParameterGroup` (group.py) implement these protocols. Both are built on sharded tensors and lie above them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine.comm.collectives import Axes, Axis
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.layout.layout import Layout
from lightning_mfsdp.engine.layout.placement import Placement
from lightning_mfsdp.engine.params.group_spec import GroupSpec
from lightning_mfsdp.engine.params.piece import Piece
from lightning_mfsdp.engine.params.policy import MixedPrecisionPolicy

__all__ = ["ManagedGroup", "ManagedParameter"]


class ManagedParameter(Protocol):
    """One parameter in its representations.

    Attributes:
        name: Inside the module given to `fully_shard`.
        piece: Where this rank's rows lie in the whole parameter.
        part_axes: Along which ranks compute with different parts of it, one for each of `piece.parts`.
        local: This rank's rows, plain.
    """

    name: str
    piece: Piece
    part_axes: tuple[Axis, ...]
    local: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""

    @property
    def full(self) -> nn.Parameter:
        """The unsharded parameter."""

    @property
    def sharded(self) -> DTensor:
        """Of the global shape, over this rank's rows."""


class ManagedGroup(Protocol):
    """Where the rows of a group's parameters lie, and what is reported to or queried from the unit and the root around it.

    Attributes:
        layout: Where each parameter lies.
        mesh: The mesh over whose axes the group is distributed.
        placement: What is divided over which of them.
        main_extent: Shards of the layout that this rank holds of the main weight.
        advised: The warning that a use outside of forwards costs a gather each time was issued.
    """

    layout: Layout
    mesh: Mesh
    placement: Placement
    axes: Axes
    main_extent: range
    device: torch.device
    spec: GroupSpec
    policy: MixedPrecisionPolicy
    advised: bool

    @property
    def entries(self) -> Sequence[ManagedParameter]:
        """Its parameters, in module order."""

    @property
    def unit_name(self) -> str:
        """Of the unit it belongs to; empty once that is gone."""

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are stored temporarily."""

    def around_gather(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Context around the gather of one parameter."""

    def over_both_axes(self) -> dist.ProcessGroup:
        """The ranks of the shard axis and the outer one together. Collective, the first time."""

    def known_writes(self, *, weights: bool) -> int:
        """How often main weights, or else gradients, were written, counting only writes that are known to all ranks."""

    def outdate_graphs(self, index: int) -> None:
        """Note that a main weight was written: a graph that saved the unsharded parameter raises."""

    def note_write(self, *, weights: bool = True) -> None:
        """Note that main weights may have been written, or that gradients were: forward must read the new values."""

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back in the root, before gradients are read. Collective; all ranks know whether there is any."""

    def zero_held_back(self, index: int) -> None:
        """Zero what is held back of a parameter."""

    def is_behind(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is what the `.grad` of a parameter was before it became a stand-in for what is held back."""

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add to the whole gradient of a parameter."""

    def use_outside(self, index: int) -> nn.Parameter | None:
        """A parameter is used outside of forwards in grad mode: the unsharded one, if it exists and stays until a backward has ended."""

    def begin_backward(self) -> None:
        """A backward begins that may not involve any forward of a unit."""
