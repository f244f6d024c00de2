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
import weakref
from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.core.buffer import FlatBuffer

__all__ = ["RESHARDED", "Place", "Values", "Versions"]

RESHARDED = 1 << 31  # counters have 32 bits
_STEP = 1 << 10  # between two numbers: what a program adds to one by writing does not come to the next
_groups = itertools.count()


class Values:
    """Which versions say that the present values lie in a place. Saved weights refer to it and not to the place, which has the memory.

    Attributes:
        versions: One for each of the place's `tensors`; empty until values lay there, and while other values do.
    """

    __slots__ = ("__weakref__", "versions")

    def __init__(self) -> None:
        self.versions: list[int] = []

    def version_of(self, number: int) -> int:
        """The version of one of the tensors; -1 if the present values never lay there."""
        return self.versions[number] if self.versions else -1


class Place:
    """Where unsharded parameters may lie, and which versions say that their present values do.

    Attributes:
        buffers: One for each form.
        raw: With a codec, the raw data that parameters are pointed at: those of all parameters in the first form, then in the next.
        tensors: What has versions: the parameters, and raw data.
        values: Their versions here.
    """

    __slots__ = ("_starts", "buffers", "raw", "tensors", "values")

    def __init__(self, buffers: Sequence[FlatBuffer], parameters: Sequence[Tensor], raw: Sequence[Tensor]) -> None:
        self.buffers, self.raw = buffers, raw
        self.tensors = (*parameters, *raw)
        self.values = Values()
        self._starts: list[tuple[int, int, int]] = []  # bytes, form and number, of what begins there

    def number_at(self, offset_bytes: int) -> tuple[int, int]:
        """Which form lies that far from the beginning of the memory, and which of `tensors`."""
        if not self._starts:
            first, count = len(self.tensors) - len(self.raw), len(self.buffers[0].views)
            self._starts = sorted(
                (
                    int(view.storage_offset()) * view.element_size(),
                    form,
                    index + (first + form * count if self.raw else 0),
                )
                for form, buffer in enumerate(self.buffers)
                for index, view in enumerate(buffer.views)
                if view.numel()
            )
        _, form, number = self._starts[bisect_right(self._starts, offset_bytes, key=lambda start: start[0]) - 1]
        return form, number


class Versions:
    """Sets and compares the versions of one group's unsharded parameters.

    Attributes:
        place: Where the parameters lie; `None` while they are resharded.
        resharded: Their version meanwhile, different for each group of the process.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.place: Place | None = None
        self.resharded = RESHARDED + next(_groups) * _STEP
        self._parameters, self._count = tuple(parameters), len(parameters)
        self._lain: list[weakref.ref[Values]] = []  # of the places where values lay since all were written
        self._as_set = list(map(compat.version_of, self._parameters))  # of the parameters alone
        self._last = max(self._as_set, default=0) // _STEP  # number that was given to values

    def _next(self) -> int:
        self._last = self._last + 1 if self._last + 1 < RESHARDED // _STEP else 1
        return self._last * _STEP

    def lie_in(self, place: Place) -> None:
        """The present values are in a place, or will be when the all-gather has ended."""
        values = place.values
        if not values.versions:
            values.versions = [self._next()] * len(place.tensors)
            self._lain.append(weakref.ref(values))
        self.place = place
        compat.set_versions(place.tensors, values.versions)
        self._as_set = values.versions[: self._count]

    def leave(self) -> None:
        """The parameters are resharded."""
        place, self.place = self.place, None
        self._as_set = [self.resharded] * self._count
        compat.set_versions(self._parameters, self._as_set)
        if place is not None and place.raw:
            compat.set_versions(place.raw, [self.resharded] * len(place.raw))

    def were_resharded(self, found: int, expected: int) -> bool:
        """Whether autograd's error, a tensor "is at version" `found`, not `expected`, can be about a weight that was saved and resharded.

        It can be resharded still, or the same values were gathered to another place since.
        """
        lain = [values.versions for reference in self._lain if (values := reference()) is not None]
        pairs = (pair for now, before in itertools.permutations(lain, 2) for pair in zip(now, before, strict=True))
        return found == self.resharded or (found, expected) in pairs

    def are_as_set(self) -> bool:
        """Whether the program has written to no parameter since versions were set, or since `take_over`."""
        with compat.without_torch_function():  # a third of the time
            return list(map(compat.version_of, self._parameters)) == self._as_set

    def written(self) -> list[int]:
        """Which parameters it has written to, by index."""
        now = zip(map(compat.version_of, self._parameters), self._as_set, strict=True)
        return [index for index, (version, as_set) in enumerate(now) if version != as_set]

    def take_over(self, indices: Sequence[int]) -> None:
        """What the program wrote is their value now. What a graph saved before is out of date, and what it has saved since is not."""
        for index in indices:
            now = compat.version_of(self._parameters[index])
            self._last = max(self._last, now // _STEP)
            self._number_anew(index)
            if self.place is not None:
                self.place.values.versions[index] = now
            self._as_set[index] = now

    def outdate(self, indices: Sequence[int]) -> None:
        """Main weights of some parameters were written: graphs that saved these are out of date, as if they had been written in place."""
        if len(indices) == self._count:
            for reference in self._lain:
                if (values := reference()) is not None:
                    values.versions = []
            self._lain.clear()
            if self.place is not None:
                self.lie_in(self.place)
            return
        for index in indices:  # and no others: a forward that is running may have written to these
            self._number_anew(index)
            if self.place is not None:
                one = slice(index, None, self._count)
                compat.set_versions(self.place.tensors[one], self.place.values.versions[one])
                self._as_set[index] = self.place.values.versions[index]

    def _number_anew(self, index: int) -> None:
        """Give a parameter, and its raw data, another number in each place."""
        self._lain = [reference for reference in self._lain if reference() is not None]
        for reference in self._lain:
            values = reference()
            if values is not None:
                one = slice(index, None, self._count)  # raw data follow in the same order, once for each form
                values.versions[one] = [self._next()] * len(values.versions[one])
