"""FlatRows: rows of neighboring parameters of a unit, which an elementwise optimizer steps as one tensor.

An elementwise rule does to each number what it would do to it in any other tensor, and the rows of a unit lie next to each other in one
main weight, as their gradients do in one main gradient. So torch's AdamW has one or two tensors of a unit to look at, and its kernels have
long ones, instead of one for each parameter.

Members are stepped separately, each as a tensor of its own, in a step to which some have come without a gradient, or with one that a
program has put there. State follows them (`StateTable`): it is joined, moments as long as the flat tensor and one number (`step`) for all
members; or separate, where moments are views of the same memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.core.gradients import gradient_dtype
from lightning_mfsdp.engine.core.group import ParameterGroup, place_of
from lightning_mfsdp.engine.optimizer.state import has_shape

__all__ = ["FlatRows", "flat_rows_of"]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter among flat rows.

    Attributes:
        local: Its rows on this rank; there may be none.
        index: In its group.
        start: Of its rows in the flat tensor.
    """

    local: Tensor
    index: int
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """Its part of something that is as long as the flat tensor, in the shape of its rows."""
        return flat[self.start : self.start + self.local.numel()].view(self.local.shape)


class FlatRows:
    """Rows of parameters that lie next to each other in a main weight and are held by one entry of `param_groups`.

    Attributes:
        number: Of that entry.
        rows: `[numel]`, over the memory of the main weight.
        members: In the order of their rows.
    """

    def __init__(self, number: int, group: ParameterGroup, segment: int, start: int, indices: Sequence[int]) -> None:
        self.number = number
        self._group, self._segment = weakref.ref(group), segment
        members, length = list[Member](), 0
        for index in indices:
            local = group.entries[index].local
            members.append(Member(local, index, length))
            length += local.numel()
        self.members = tuple(members)
        self._member_of = {member.local: member for member in members}
        self._where = slice(start, start + length)
        with torch.inference_mode(False):
            self.rows = nn.Parameter(group.main.segments[segment][self._where])
        self._version = 0  # of `rows` when the step began

    # -- in a step -----------------------------------------------------------------------------------------------------

    def have_gradients_together(self) -> bool:
        """Whether all members have gradients, and these are the main gradient; or none has one."""
        group = self._group()
        has_gradients = self.members[0].local.grad is not None
        views = group.gradients.main.views if has_gradients and group is not None else None
        for member in self.members:  # noqa: SIM110 - a generator costs host time, in every unit
            if member.local.grad is not (None if views is None else views[member.index]):
                return False
        return True

    def begin_step(self) -> None:
        """Give the flat tensor the gradients of its members, if they have any."""
        self._version = self.rows._version
        if self.members[0].local.grad is not None and (group := self._group()) is not None:
            self.rows.grad = group.gradients.main.of_optimizer.segments[self._segment][self._where]

    def end_step(self) -> None:
        """Forget the gradient: references to its memory are counted (gradients.py)."""
        self.rows.grad = None

    def end_failed_step(self) -> None:
        """As `end_step` after a step that raised, since which a program may have cleared the gradient where `param_groups` hold `rows`."""
        group = self._group()
        if self.rows.grad is None and group is not None and group.gradients.is_open:
            views = group.gradients.main.views
            for member in self.members:
                if member.local.grad is views[member.index]:
                    member.local.grad = None
        if group is not None and self.rows._version != self._version:
            group.weights.versions.outdate([member.index for member in self.members])
        self.end_step()

    # -- state ---------------------------------------------------------------------------------------------------------

    def is_number(self, value: Any) -> bool:
        """Whether a value of joined state is one number for all members."""
        return isinstance(value, Tensor) and value.shape != self.rows.shape

    def part(self, value: Any, local: Tensor) -> Any:
        """A member's part of a value of joined state, in the same memory; of a number a copy."""
        if not isinstance(value, Tensor):
            return value
        return value.clone() if self.is_number(value) else self._member_of[local].of(value)

    def joined(self, tables: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The joined state of all members, whose own tables are empty then. `None`: they stay as they are, and separate.

        Args:
            tables: State of each member.
        """
        if not self._are_alike(tables):
            return None
        joined = {name: self._joined(name, tables) for name in tables[0]}
        for values in tables:
            values.clear()
        return joined

    def _are_alike(self, tables: Sequence[dict[str, Any]]) -> bool:
        """Whether all have the same names, numbers are equal, and no program has a tensor that would no longer be the optimizer's."""
        if any(type(values) is not dict or values.keys() != tables[0].keys() for values in tables):
            return False
        return all(self._can_join(name, tables) for name in tables[0])

    def _can_join(self, name: str, tables: Sequence[dict[str, Any]]) -> bool:
        values = [values[name] for values in tables]
        first = values[0]
        if not isinstance(first, Tensor):  # what may be changed in place is of one parameter
            is_plain = first is None or isinstance(first, (bool, int, float, str))
            return is_plain and all(type(value) is type(first) and value == first for value in values)
        if any(
            not isinstance(value, Tensor) or value.dtype != first.dtype or value.device != first.device
            for value in values
        ):
            return False
        is_shaped = self._are_shaped(name, values)
        if is_shaped and self._in_one_memory(values) is not None:
            return True
        del values, first
        if any(_is_referenced(values, name) for values in tables):
            return False
        numbers = [] if is_shaped else [values[name] for values in tables]
        return all(number.dim() == 0 for number in numbers) and (
            not numbers or bool((torch.stack(numbers) == numbers[0]).all())
        )

    def _are_shaped(self, name: str, values: Sequence[Tensor]) -> bool:
        """Whether each value has a number for each number of the member's rows."""
        return all(
            has_shape(name, value, member.local.shape) for value, member in zip(values, self.members, strict=True)
        )

    def _joined(self, name: str, tables: Sequence[dict[str, Any]]) -> Any:
        """One value for all members. Tensors as long as their rows come to lie in one memory, in which members have their parts at once."""
        values = [values[name] for values in tables]
        if not isinstance(values[0], Tensor) or not self._are_shaped(name, values):
            return values[0]
        if (flat := self._in_one_memory(values)) is not None:
            return flat
        flat = torch.empty_like(self.rows, dtype=values[0].dtype, device=values[0].device, requires_grad=False)
        for member, own in zip(self.members, tables, strict=True):
            own[name] = member.of(flat).copy_(own[name])
        return flat

    def _in_one_memory(self, values: Sequence[Tensor]) -> Tensor | None:
        """The flat tensor of which these values are the members' parts, if they lie as such in one memory."""
        filled = [(member, value) for member, value in zip(self.members, values, strict=True) if value.numel()]
        if not filled:
            return None
        first = filled[0][1]
        address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        for member, value in filled:
            is_next = value.data_ptr() == address + member.start * value.element_size()
            if not (is_next and value.is_contiguous() and value.untyped_storage().data_ptr() == storage):
                return None
        return first.as_strided(self.rows.shape, (1,))


def _is_referenced(values: dict[str, Any], name: str) -> bool:
    """Whether a program has a tensor of a table of state, another one over its memory, or that memory."""
    # The table and the call have the tensor; the tensor and the call its memory.
    if sys.getrefcount(values[name]) > 2 or compat.storage_users(values[name]) > 2:
        return True
    memory, is_on_host = values[name].untyped_storage(), values[name].device.type == "cpu"
    is_others = not memory.resizable() or (is_on_host and memory.is_shared())  # NumPy's, a file's, a process's
    fresh = torch.empty(0, device=values[name].device)
    of_fresh = fresh.untyped_storage()
    return is_others or sys.getrefcount(memory) > sys.getrefcount(of_fresh)


def flat_rows_of(stepped: Sequence[Sequence[Tensor]]) -> list[FlatRows]:
    """The flat rows of what an elementwise optimizer steps, wherever rows of several parameters lie next to each other.

    Args:
        stepped: Local rows, for each entry of `param_groups`.
    """
    found: list[FlatRows] = []
    for number, parameters in enumerate(stepped):
        by_group: dict[ParameterGroup, set[int]] = {}
        for parameter in parameters:
            if (place := place_of(parameter)) is not None and _can_be_flat(place[0]):
                by_group.setdefault(place[0], set()).add(place[1])
        for group, indices in by_group.items():
            runs = (run for segment in range(len(group.layout.segments)) for run in _runs(group, segment, indices))
            found += [FlatRows(number, group, *run) for run in runs if len(run[2]) > 1]
    return found


def _can_be_flat(group: ParameterGroup) -> bool:
    """Whether the gradient has the main weight's dtype, and numbers are stepped alike wherever they lie.

    PyTorch's kernels for CPUs round the last few numbers of a tensor in half precision otherwise than those before.
    """
    dtype = group.spec.main_dtype
    is_alike = group.device.type != "cpu" or dtype in (torch.float32, torch.float64)
    return is_alike and not group.offloads and gradient_dtype(group) == dtype


def _runs(group: ParameterGroup, segment: int, wanted: set[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Wanted parameters whose rows follow each other in the main weight: segment, start and indices. Those without rows are anywhere."""
    layout, extent = group.layout, group.main_extent
    base = extent.start * layout.segments[segment].shard_numel
    run: list[int] = []
    start, end = 0, -1  # of what lies in the run; -1: nothing yet
    for index in layout.segments[segment].tensors:
        first, stop = layout.owned_elements(index, extent.start, len(extent))
        if first == stop:
            run += [index] if index in wanted else []
            continue
        if run and (index not in wanted or end not in (-1, first - base)):
            yield segment, start, run
            run, end = [], -1
        if index in wanted:
            start = first - base if end < 0 else start
            end = stop - base
            run.append(index)
    if run:
        yield segment, start, run
