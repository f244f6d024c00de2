"""Which part of a whole parameter a rank of a tensor axis has, and the marks on parameters that say so.

A mark is an attribute of the parameter. Whatever replaces a parameter copies its marks (`copy_marks`). `copy.deepcopy` drops all attributes
of parameters; `divide` marks the parameters of a copied model again.

Who divides layers (tensor_parallel, another program) sets the marks, and the engine reads them; neither needs the other for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mfsdp.base.errors import ShardingError

__all__ = ["PART", "SUMMED", "Part", "Strip", "copy_marks", "is_summed", "mark_part", "mark_summed", "part_of"]

# Attributes of parameters.
PART = "_tensor_part"  # a `Part`; without it, every rank of the tensor axis has the whole parameter
SUMMED = (
    "_tensor_summed"  # True: each rank computes a term of the gradient, and a hook adds them up over the tensor axis
)


class Strip(NamedTuple):
    """Consecutive rows (entries along the divided dim) of a rank.

    Attributes:
        whole: Where they begin in the whole parameter.
        local: Where they begin in the part.
        length: How many they are.
    """

    whole: int
    local: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of `size` equal parts of a parameter. Parts of two ranks differ in `rank` alone.

    Attributes:
        dim: The one that is divided.
        sections: Lengths of the sections of the whole parameter along it, each of which is divided by itself: one for an ordinary weight,
            two for a weight that has gate and up one after the other, three for queries, keys and values.
        size: How many ranks divide it.
        rank: This one's place among them.

    Raises:
        ShardingError: A section is not divisible by `size`.
    """

    dim: int
    sections: tuple[int, ...]
    size: int
    rank: int

    def __post_init__(self) -> None:
        if any(section % self.size for section in self.sections):
            lengths = " + ".join(map(str, self.sections))
            raise ShardingError(
                f"dim {self.dim} of length {lengths} cannot be divided into {self.size} equal parts; use a smaller"
                " tensor size"
            )

    @property
    def strips(self) -> tuple[Strip, ...]:
        """This rank's, one for each section, in the order of the part."""
        lengths = [section // self.size for section in self.sections]
        begins = itertools.accumulate(self.sections, initial=0)
        places = itertools.accumulate(lengths, initial=0)
        return tuple(
            Strip(whole=begin + self.rank * length, local=place, length=length)
            for begin, place, length in zip(begins, places, lengths, strict=False)
        )

    def of(self, rank: int) -> Part:
        """The part of the same parameter that another rank has."""
        return replace(self, rank=rank)

    def local_shape(self, whole: Sequence[int]) -> torch.Size:
        """The shape of a part of a parameter of shape `whole`."""
        return torch.Size([*whole[: self.dim], sum(self.sections) // self.size, *whole[self.dim + 1 :]])

    def whole_shape(self, local: Sequence[int]) -> torch.Size:
        """The shape of the parameter whose parts have shape `local`."""
        return torch.Size([*local[: self.dim], sum(self.sections), *local[self.dim + 1 :]])

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in new contiguous memory. Differentiable."""
        strips = [whole.narrow(self.dim, strip.whole, strip.length) for strip in self.strips]
        return torch.cat(strips, dim=self.dim).contiguous()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in order: the inverse of `own`. Differentiable."""
        pieces = [
            part.narrow(self.dim, strip.local, strip.length)
            for number in range(len(self.sections))
            for rank, part in enumerate(parts)
            for strip in [self.of(rank).strips[number]]
        ]
        return torch.cat(pieces, dim=self.dim).contiguous()


def mark_part(parameter: Tensor, part: Part) -> None:
    """Note which part of a whole parameter this one is."""
    setattr(parameter, PART, part)


def part_of(parameter: Tensor) -> Part | None:
    """The part that `mark_part` noted; `None`: every rank has the whole parameter."""
    part: Part | None = getattr(parameter, PART, None)
    return part


def mark_summed(parameter: Tensor) -> None:
    """Note that a hook adds up the gradient of a whole parameter over the tensor axis."""
    setattr(parameter, SUMMED, True)


def is_summed(parameter: Tensor) -> bool:
    """Whether `mark_summed` has noted that a hook adds up the parameter's gradient."""
    return bool(getattr(parameter, SUMMED, False))


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Give a parameter the marks of the one that it replaces."""
    for mark in (PART, SUMMED):
        if mark in source.__dict__:
            setattr(target, mark, source.__dict__[mark])
