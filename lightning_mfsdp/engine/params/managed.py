"""What sharded tensors know of the parameter whose rows they hold, and of the group that it belongs to.

`Entry` (parameter.py) and `ParameterGroup` (group.py) are what is meant. Both are built on sharded tensors, so they lie above them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from lightning_mfsdp.engine.comm.collectives import Axes, Mesh
from lightning_mfsdp.engine.layout.layout import Layout
from lightning_mfsdp.engine.layout.placement import Placement
from lightning_mfsdp.engine.params.group_spec import GroupSpec
from lightning_mfsdp.engine.params.policy import MixedPrecisionPolicy

__all__ = ["ManagedGroup", "ManagedParameter"]


class ManagedParameter(Protocol):
    """One parameter in its representations.

    Attributes:
        name: Inside the module given to `fully_shard`.
        shape: Of the whole parameter.
        local: This rank's rows, plain.
    """

    name: str
    shape: torch.Size
    local: nn.Parameter

    @property
    def full(self) -> nn.Parameter:
        """The unsharded one."""

    @property
    def sharded(self) -> DTensor:
        """Of the global shape, over this rank's rows."""

    def outdate_graphs(self) -> None:
        """The main weight was written: a graph that saved the unsharded one raises."""


class ManagedGroup(Protocol):
    """Where the rows of a group's parameters lie, and what the unit and the root around it are told or asked.

    Attributes:
        layout: Where each parameter lies.
        mesh: Whose axes the group is shared out over.
        placement: What is divided over which of them.
        main_extent: Shards of the layout that this rank holds of the main weight.
        advised: It was said that a use outside of forwards costs a gather each time.
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
    def dtensor_placements(self) -> list[DTensorPlacement]:
        """How the main weight lies on the user's mesh."""

    @property
    def unit_name(self) -> str:
        """Of the unit it belongs to; empty once that is gone."""

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are set aside."""

    def around_gather(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Around the gather of one parameter."""

    def over_both_axes(self) -> dist.ProcessGroup:
        """The ranks of the shard axis and the outer one together. Collective, the first time."""

    def known_writes(self, *, weights: bool) -> int:
        """How often main weights, or else gradients, were written, as far as all ranks know."""

    def note_write(self, *, weights: bool = True) -> None:
        """Main weights may have been written, or gradients surely: forward must see it."""

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back in the root, before anybody looks. Collective, and known to all ranks."""

    def zero_held_back(self, index: int) -> None:
        """Make what is held back of a parameter zeros."""

    def is_behind(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is what the `.grad` of a parameter was before it stood for what is held back."""

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add to the whole gradient of a parameter."""

    def use_outside(self, index: int) -> nn.Parameter | None:
        """A parameter is used outside of forwards in grad mode: the unsharded one, if it is there and stays until a backward has ended."""

    def begin_backward(self) -> None:
        """A backward begins in which no forward of a unit may take part."""
