"""Versions: the version counters of a group's unsharded parameters.

Autograd notes the version of a tensor that it saves, and raises where a backward reads a tensor that has another one by then. The engine
frees and refills memory without autograd's knowledge, so it sets the counters itself. A version stands for values in a place:

    in memory     a number of its own for each place: the same values in the same place have the same number again
    resharded     one number for each group, from `RESHARDED` on, which no saved tensor has: so a backward that reads it ungathered raises
    written       by the program in a forward, or as main weights by anything: a number that was not used before, in every place

Each parameter has a counter of its own, which views of it share (`weight.t()`): its `data` is set to a view of the place and the counter
stays. Writes to the place do not move it, so every other number comes from the program. What hooks on saved tensors keep, functions keep
as attributes and closures keep is not compared by autograd; a resharded parameter is therefore NaN as well (weights.py).

Source: `_unsafe_set_version_counter`, which `torch.autograd._unsafe_preserve_version_counter` is made of; cost 0.7 us for nine parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.memory.buffer import FlatBuffer

__all__ = ["RESHARDED", "Place", "Versions"]

RESHARDED = 1 << 31  # counters have 32 bits
_groups = itertools.count()
_LAST = RESHARDED - (1 << 24)  # what a program may add to a number stays below


class Place:
    """Where unsharded parameters may lie, and which versions say that their present values do.

    Attributes:
        buffers: One for each form.
        raw: With a codec, the raw data that parameters are pointed at: those of all parameters in the first form, then in the next.
        tensors: What has versions: the parameters, and raw data.
        versions: One for each of them; empty until values lay here.
    """

    __slots__ = ("buffers", "raw", "tensors", "versions")

    def __init__(self, buffers: Sequence[FlatBuffer], parameters: Sequence[Tensor], raw: Sequence[Tensor]) -> None:
        self.buffers, self.raw = buffers, raw
        self.tensors = (*parameters, *raw)
        self.versions: tuple[int, ...] = ()


class Versions:
    """Sets and compares the versions of one group's unsharded parameters.

    Attributes:
        place: Where the parameters lie; `None` while they are resharded.
        resharded: Their version meanwhile, different for each group of the process.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.place: Place | None = None
        self.resharded = RESHARDED + next(_groups)
        self._parameters, self._count = tuple(parameters), len(parameters)
        self._places: list[Place] = []
        self._as_set = tuple(map(compat.version_of, self._parameters))  # of the parameters alone
        self._last = max(self._as_set, default=0)

    def _next(self) -> int:
        self._last = self._last + 1 if self._last < _LAST else 1
        return self._last

    def lie_in(self, place: Place) -> None:
        """The present values are in a place, or will be when the all-gather has ended."""
        if not place.versions:
            self._last = self._last + 1 if self._last < _LAST else 1
            place.versions = (self._last,) * len(place.tensors)
            self._places.append(place)
        self.place = place
        compat.set_versions(place.tensors, place.versions)
        self._as_set = place.versions[: self._count]

    def leave(self) -> None:
        """The parameters are resharded."""
        place, self.place = self.place, None
        self._as_set = (self.resharded,) * self._count
        if place is None or not place.raw:
            compat.set_versions(self._parameters, self._as_set)
        else:
            compat.set_versions(place.tensors, (self.resharded,) * len(place.tensors))

    def are_as_set(self) -> bool:
        """Whether the program has written to no parameter since versions were set, or since `take_over`."""
        return tuple(map(compat.version_of, self._parameters)) == self._as_set

    def written(self) -> list[int]:
        """Which parameters it has written to, by index."""
        now = zip(map(compat.version_of, self._parameters), self._as_set, strict=True)
        return [index for index, (version, as_set) in enumerate(now) if version != as_set]

    def take_over(self, indices: Sequence[int]) -> None:
        """What the program wrote is their value now. What a graph saved before is out of date, and what it has saved since is not."""
        now = {index: compat.version_of(self._parameters[index]) for index in indices}
        self._last = max(self._last, *now.values())
        for place in self._places:
            self._change(place, now if place is self.place else {index: self._next() for index in indices})
        if self.place is not None:
            self._as_set = self.place.versions[: self._count]

    def outdate(self, indices: Sequence[int]) -> None:
        """Main weights of some parameters were written: graphs that saved these are out of date, as if they had been written in place."""
        for place in self._places:
            self._change(place, dict.fromkeys(indices, self._next()))
        if self.place is not None:
            self.lie_in(self.place)

    def outdate_all(self) -> None:
        """Main weights of all parameters were written."""
        for place in self._places:
            place.versions = ()
        self._places.clear()
        if self.place is not None:
            self.lie_in(self.place)

    def _change(self, place: Place, versions: dict[int, int]) -> None:
        # Raw data of a parameter follow in the order of the parameters, once for each form.
        place.versions = tuple(
            versions.get(index % self._count, version) for index, version in enumerate(place.versions)
        )
