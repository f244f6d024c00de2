"""Bases of optimizers outside `torch.optim` that step local rows, and where the other rows of a parameter are.

`fully_shard_optimizer` gives plain local rows to a `LocalRowsOptimizer`, which collects by itself what its rule needs of other ranks. An
`ElementwiseOptimizer` needs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.rows import holders

__all__ = ["ElementwiseOptimizer", "LocalRowsOptimizer", "RowPlacement", "has_gradient", "row_placement"]


@dataclass(frozen=True, kw_only=True)
class RowPlacement:
    """Which ranks have which rows of one sharded parameter.

    Attributes:
        name: Inside the module given to `fully_shard`.
        shape: Of all rows together; where ranks compute with different parts, of this rank's part.
        group: The ranks that share the rows out among them; `None` where every rank has all of them.
        rows: Of dim 0, by rank of `group`; of this rank alone where there is no group. Together all of them, each once.
        parts: Of how many parts this rank's is one: other ranks have other experts, or other parts along a tensor axis.
        has_whole_rows: A row here, an index of dim 0, is a whole one: what other ranks have are other rows.
    """

    name: str
    shape: torch.Size
    group: dist.ProcessGroup | None
    rows: tuple[range, ...]
    parts: int
    has_whole_rows: bool


class LocalRowsOptimizer(Optimizer):
    """Base of optimizers that step plain local rows and exchange what else their rule needs; see `row_placement` and `has_gradient`.

    Its `step(closure=None)` calls the closure first, as PyTorch's optimizers do, and finds local rows in `param_groups` from then on. At
    other times they hold what the module shows. One whose `step` takes no closure has local rows there at all times.

    A rank without rows of a parameter has an empty gradient of it. Such an optimizer creates the same state there as elsewhere, over no
    rows: `state_dict()` has to show the same on all ranks.
    """


class ElementwiseOptimizer(Optimizer):
    """Base of optimizers that do to each number what they would do to it in any other tensor, and write in `step` alone, after its closure.

    A class that has it as its direct base is treated as the elementwise optimizers of `torch.optim`: rows of neighboring parameters are
    stepped as one tensor, and with `offload="optimizer"` a few parameters at a time. A class derived from that may do anything. State
    with a number for each number of a parameter is likewise of any tensor; what else is in it, such as `step`, is the same for all
    parameters that have been stepped equally often.
    """


def row_placement(parameter: Tensor) -> RowPlacement | None:
    """Which ranks have which rows of a parameter, of whichever representation; `None` if it is not sharded by this engine.

    The first call for a parameter that is split over both axes of a mesh is collective: it may make a process group.
    """
    owner = owner_of(parameter)
    if owner is None:
        return None
    group, entry = owner
    index = group.entries.index(entry)
    process_group, shards = holders(group)
    return RowPlacement(
        name=entry.name,
        shape=torch.Size(group.layout.shapes[index]),
        group=process_group,
        rows=tuple(group.layout.owned_rows(index, shard) for shard in shards),
        parts=math.prod(axis.size for axis in entry.part_axes),
        has_whole_rows=all(part.dim == 0 for part in entry.piece.parts),
    )


def has_gradient(parameter: Tensor) -> bool:
    """Whether there is a reduced gradient, also where this rank has no rows of it: all ranks that share the parameter agree."""
    owner = owner_of(parameter)
    if owner is None:
        return parameter.grad is not None
    entry = owner[1]
    return entry.is_trained and entry.local.grad is not None
