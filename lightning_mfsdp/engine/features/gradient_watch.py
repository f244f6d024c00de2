"""GradientWatch: finds on which rank, in which unit and parameter a gradient became NaN or infinite, by a check before the reduction.

    before a backward      the largest absolute value of the loss, if the loop passes it on: forward or backward is the first question
    backward of a unit     the largest absolute value of each parameter's own gradient on this rank, kept on the device
    end of a backward      which of them are not finite, with this rank and microbatch: of several the earliest microbatch counts
    before the step        one flag for each group of the reduced gradients, one reduction of flags and findings over all ranks, one
                           copy to the host that no call waits for

The gradients that the optimizer is about to use decide whether there is anything to report; those before the reduction, which mixes ranks,
show where it came from. Without a watch the engine does none of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.streams import Event
from lightning_mfsdp.engine.comm.mesh import is_expert_axis
from lightning_mfsdp.engine.core.group import ParameterGroup, owner_of, place_of
from lightning_mfsdp.engine.core.inspect import local_gradients, sharded_parameters
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.unit import Unit, unit_of

__all__ = ["GradientWatch", "NonFiniteGradients", "NonFiniteLoss", "NonFiniteParameter"]

_MAX_LINES = 40
_ADVICE = "Look first at the data and the forward of the unit, rank and microbatch above, then at the loss and the learning rate"
_BACKWARD_ADVICE = (
    "Look first at what the backward of the first unit above computes, since the forward gave a finite loss: roots, norms and logarithms "
    "near zero, your own autograd functions, and numbers too large for the dtype; then at the data of that rank and microbatch"
)
_NOT_SHARDED = "(ignored_parameters)"
# A finding is encoded as one number, so that the largest over all ranks is the earliest: microbatch, then rank, then whether it is NaN.
_LAST_MICROBATCH = (1 << 31) - 1
_LOW_BITS = 32


@dataclass(frozen=True, kw_only=True)
class NonFiniteParameter:
    """One parameter whose own gradient was NaN or infinite on some rank, before the reduction.

    Attributes:
        name: Full name inside the module that is watched.
        unit: Name of its unit.
        kind: "NaN" or "Inf", on `first_rank`.
        microbatch: The first in which it was, since the last check.
        first_rank: The lowest rank on which it was.
        last_rank: The highest rank on which it was.
        of_experts: It belongs to experts that compute for tokens of other ranks too, whose NaN it then has: those ranks need not be the
            origin.
    """

    name: str
    unit: str
    kind: str
    microbatch: int
    first_rank: int
    last_rank: int
    of_experts: bool = False

    @property
    def ranks(self) -> str:
        """The ranks in words, such as "rank 2" or "ranks 0 to 3", for messages."""
        return _described(self.first_rank, self.last_rank)


@dataclass(frozen=True, kw_only=True)
class NonFiniteLoss:
    """A loss that was NaN or infinite on some rank, before its backward.

    Attributes:
        kind: "NaN" or "Inf", on `first_rank`.
        microbatch: The first in which it was, since the last check.
        first_rank: The lowest rank on which it was.
        last_rank: The highest rank on which it was.
    """

    kind: str
    microbatch: int
    first_rank: int
    last_rank: int

    @property
    def ranks(self) -> str:
        """The ranks in words, such as "rank 2" or "ranks 0 to 3", for messages."""
        return _described(self.first_rank, self.last_rank)


@dataclass(frozen=True, kw_only=True)
class NonFiniteGradients:
    """What a check found, the same on all ranks.

    Attributes:
        step: What `submit` was given.
        loss: The earliest that was not finite; `None`: all were, as far as `note_loss` was called.
        has_losses: `note_loss` was called.
        parameters: Where it came from, the earliest microbatch and the first unit of the backward first.
        reduced_only: Units whose reduced gradient is not finite though no rank saw such a gradient before the reduction.
    """

    step: int
    loss: NonFiniteLoss | None
    has_losses: bool
    parameters: tuple[NonFiniteParameter, ...]
    reduced_only: tuple[str, ...]

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self) -> str:
        """Several lines, for people to read."""
        lines = [f"non-finite gradients in step {self.step}", *self._loss_in_words()]
        if self.parameters:
            first = self.parameters[0]
            # Gradients of a rank's own tokens alone show where it arose, if there are any.
            telling = [parameter for parameter in self.parameters if not parameter.of_experts] or self.parameters
            lowest_rank = min(parameter.first_rank for parameter in telling)
            highest_rank = max(parameter.last_rank for parameter in telling)
            lines[0] += (
                f", microbatch {first.microbatch}: {len(self.parameters)} parameters, on {_described(lowest_rank, highest_rank)}; first "
                f"unit in backward order: {first.unit or '(root)'}"
                + ("" if first.of_experts else f", on {first.ranks}")
            )
            for parameter in self.parameters[:_MAX_LINES]:
                place = f"{parameter.name} (unit {parameter.unit or '(root)'})"
                later = "" if parameter.microbatch == first.microbatch else f" in microbatch {parameter.microbatch}"
                among = ", whose experts compute for tokens of other ranks too" if parameter.of_experts else ""
                lines.append(f"  {place}: {parameter.kind} on {parameter.ranks}{later}{among}")
        if len(self.parameters) > _MAX_LINES:
            lines.append(f"  and {len(self.parameters) - _MAX_LINES} more")
        lines += [
            f"  unit {unit or '(root)'}: finite on every rank before the reduction. The sum over ranks or microbatches overflowed, or "
            "something else wrote into the gradient"
            for unit in self.reduced_only
        ]
        return "\n".join([*lines, _BACKWARD_ADVICE if self.has_losses and self.loss is None else _ADVICE])

    def _loss_in_words(self) -> list[str]:
        if self.loss is not None:
            loss = self.loss
            return [f"  the loss was {loss.kind} before its backward, on {loss.ranks} in microbatch {loss.microbatch}"]
        return ["  every loss was finite before its backward"] if self.has_losses else []


class _Places:
    """A place in tables for each parameter, the same on all ranks: units in the order they were sharded, then what is not sharded."""

    def __init__(self, groups: Sequence[ParameterGroup], whole: Sequence[nn.Parameter]) -> None:
        self.groups = list(groups)
        self.whole = list(whole)
        self.starts: dict[ParameterGroup, int] = {}
        self.start_of_whole = 0
        for group in groups:
            self.starts[group] = self.start_of_whole
            self.start_of_whole += len(group.entries)
        self.of_loss = self.start_of_whole + len(self.whole)
        self.count = self.of_loss + 1


@dataclass(frozen=True)
class _Pending:
    """A result that is being copied to the host."""

    step: int
    has_losses: bool
    places: _Places
    table: Tensor
    ready: Event

    @property
    def is_there(self) -> bool:
        return self.ready is None or bool(self.ready.query())


class GradientWatch:
    """Checks every gradient of a sharded module, on the rank where it arises.

    Create it before the backwards (and before CUDA graphs are recorded), and check once before each optimizer step, on all ranks::

        watch = GradientWatch(model)
        loss.backward()
        found = watch.check()  # waits for the device
        if found is None:
            optimizer.step()

    `submit` and `arrived` do the same without waiting: the result arrives a step late.

    Args:
        module: Sharded with `fully_shard`, outermost.

    Raises:
        ShardingError: `module` is not sharded, or is inside another sharded module.
    """

    def __init__(self, module: nn.Module) -> None:
        unit = unit_of(module)
        if unit is None or unit.context.root() is not unit:
            raise ShardingError(
                f"GradientWatch: expected the outermost module that fully_shard was called on, got {type(module).__name__}, which is "
                f"{'not sharded' if unit is None else 'inside another one'}"
            )
        self._module = module
        self._context = unit.context
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._microbatch = self._backwards = 0
        self._is_checked, self._has_losses = True, False
        self._pending: deque[_Pending] = deque()
        self._free: list[Tensor] = []
        self._places = _Places((), ())
        self._follow_units()
        self._context.reductions.watches.append(self._note_unit)

    def close(self) -> None:
        """Stop watching. What was submitted can still be read."""
        if self._note_unit in self._context.reductions.watches:
            self._context.reductions.watches.remove(self._note_unit)

    # -- in a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def note_loss(self, loss: Tensor) -> None:
        """Of the microbatch whose backward follows, so that a report says whether it was finite. On all ranks; does not wait."""
        self._has_losses = True
        self._note(self._places.of_loss, [_plain(loss.detach())])

    @torch.no_grad()
    def end_backward(self) -> None:
        """A backward, or the replay of a recorded one, is over: the next one is another microbatch. Does not wait.

        `submit` and `check` call it after the last backward if it was not called.
        """
        if self._is_checked:
            self._is_checked, self._microbatch = False, 0
            self._follow_units()
            self._first.zero_()
        if self._places.whole:
            self._note(self._places.start_of_whole, [_plain(parameter.grad) for parameter in self._places.whole])
        is_bad, is_nan = torch.isfinite(self._largest).logical_not_(), torch.isnan(self._largest).long()
        microbatch = (_LAST_MICROBATCH - self._microbatch) << _LOW_BITS
        for first, rank in zip(self._first, (self._world - self._rank, self._rank + 1), strict=True):
            torch.maximum(first, torch.where(is_bad, is_nan + (microbatch | rank << 1), 0), out=first)
        self._largest.zero_()
        self._microbatch += 1
        self._backwards = self._context.backward.num_ended

    @torch.no_grad()
    def submit(self, parameters: Iterable[Tensor] | None = None, *, step: int = 0) -> None:
        """Check on all ranks whether a reduced gradient is not finite, and where it came from. Collective; does not wait.

        Args:
            parameters: Those that an optimizer is about to step, as it holds them. `None`: all.
            step: For the report.
        """
        if self._backwards != self._context.backward.num_ended:
            self.end_backward()
        flags = self._flags(parameters)
        table = torch.cat([self._first.view(-1), flags.long()])
        for axis in self._context.mesh.all_axes:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=axis.group)
        host = self._host_table(table)
        host.copy_(table, non_blocking=True)
        self._pending.append(_Pending(step, self._has_losses, self._places, host, self._context.lane.streams.record()))
        # What is held back is part of a later step, and so is what was seen of it.
        self._is_checked = not any(gradients.is_accumulating for gradients in self._context.gradients)

    def arrived(self, *, wait: bool = False) -> list[NonFiniteGradients]:
        """What earlier calls of `submit` found, in their order; each once. Not collective.

        Args:
            wait: Wait for the results that are still under way. Otherwise a later call returns them.
        """
        reports = []
        while self._pending and (wait or self._pending[0].is_there):
            if (report := self._read(self._pending.popleft())) is not None:
                reports.append(report)
        return reports

    def check(self, parameters: Iterable[Tensor] | None = None, *, step: int = 0) -> NonFiniteGradients | None:
        """`submit`, and wait for the result: `None` if all is finite. The same on all ranks; collective."""
        self.submit(parameters, step=step)
        return self._read(self._pending.pop())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _follow_units(self) -> None:
        """Enlarge the tables for the present units. What no rank has in its tables yet is detected only after its reduction."""
        groups = [group for unit in self._context.units for group in unit.groups]
        if groups == self._places.groups:
            return
        whole = [parameter for parameter in self._module.parameters() if owner_of(parameter) is None]
        self._places = places = _Places(groups, whole)
        device = self._context.device
        with torch.inference_mode(False):
            self._zero = torch.zeros((), device=device)
            self._largest = torch.zeros(places.count, dtype=torch.float64, device=device)
            self._first = torch.zeros(2, places.count, dtype=torch.int64, device=device)

    def _note_unit(self, unit: Unit) -> None:
        """Keep the largest values of a unit's gradients, which have arrived and are not reduced yet."""
        with torch.no_grad():
            for group in unit.groups:
                start = self._places.starts.get(group)
                if start is None:
                    continue
                self._note(start, [_plain(entry.full._grad) if entry.is_trained else None for entry in group.entries])
                writes, outside = group.gradients.writes, group.gradients.outside
                if writes is not None:
                    views = enumerate(writes.target.views)
                    self._note(start, [view if index in writes.written else None for index, view in views])
                if outside:
                    self._note(start, [outside.get(index) for index in range(len(group.entries))])

    def _note(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Keep the largest absolute value of each; NaN is larger than anything."""
        present = [grad for grad in grads if grad is not None and grad.numel()]
        if not present:
            return
        norms = iter(compat.foreach_norm(present, float("inf")))
        each = [next(norms) if grad is not None and grad.numel() else self._zero for grad in grads]
        target = self._largest[start : start + len(grads)]
        torch.maximum(target, torch.stack(each), out=target)

    def _flags(self, parameters: Iterable[Tensor] | None) -> Tensor:
        """For each group, and for all that is not sharded, whether what this rank has of its reduced gradients is not finite: bool."""
        groups, whole = self._places.groups, self._places.whole
        wanted: dict[ParameterGroup, list[int] | None] = dict.fromkeys(groups)
        if parameters is not None:
            chosen: dict[ParameterGroup, list[int]] = {}
            chosen_parameters = list(parameters)
            for place in map(place_of, chosen_parameters):
                if place is not None:
                    chosen.setdefault(place[0], []).append(place[1])
            wanted = {group: sorted(set(chosen.get(group, ()))) for group in groups}
            chosen_ids = {id(parameter) for parameter in chosen_parameters}
            whole = [parameter for parameter in whole if id(parameter) in chosen_ids]
        parts = [local_gradients(group, wanted[group]) for group in groups]
        parts.append([grad for parameter in whole if (grad := _plain(parameter.grad)) is not None and grad.numel()])
        flat = [tensor for part in parts for tensor in part]
        norms = iter(compat.foreach_norm(flat, float("inf")) if flat else ())
        largest = []
        for part in parts:
            if len(part) > 1:
                largest.append(torch.stack([next(norms) for _ in part]).amax())
            else:
                largest.append(next(norms) if part else self._zero)
        return torch.isfinite(torch.stack(largest)).logical_not()

    def _host_table(self, like: Tensor) -> Tensor:
        """Memory on the host for a table; page-locked memory is allocated rarely."""
        while self._free:
            table = self._free.pop()
            if table.shape == like.shape:
                return table
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)

    # -- the report: slow, and only when something is wrong ------------------------------------------------------------

    def _read(self, pending: _Pending) -> NonFiniteGradients | None:
        if pending.ready is not None:
            pending.ready.synchronize()
        places = pending.places
        report = self._report(pending) if bool(pending.table[2 * places.count :].any()) else None
        self._free.append(pending.table)
        return report

    def _report(self, pending: _Pending) -> NonFiniteGradients:
        places = pending.places
        count, table = places.count, pending.table.tolist()
        lowest, highest, flags = table[:count], table[count : 2 * count], table[2 * count :]
        names = {id(view.local): (view.name, view.unit) for view in sharded_parameters(self._module)}
        names_of_whole = {id(parameter): name for name, parameter in self._module.named_parameters()}
        order = [unit.name for unit in self._context.units_in_backward_order]
        non_finite: list[NonFiniteParameter] = []
        reduced_only: list[str] = []
        for group, is_bad in zip([*places.groups, None], flags, strict=True):
            if not is_bad:
                continue
            if group is not None:
                start = places.starts[group]
                named = [(*names[id(entry.local)], _of_experts(entry)) for entry in group.entries]
            else:
                start = places.start_of_whole
                named = [(names_of_whole[id(parameter)], _NOT_SHARDED, False) for parameter in places.whole]
            seen = [
                NonFiniteParameter(
                    name=name,
                    unit=unit,
                    **self._decoded(lowest[index], highest[index]),
                    of_experts=of_experts,
                )
                for index, (name, unit, of_experts) in enumerate(named, start=start)
                if lowest[index]
            ]
            non_finite += seen
            if not seen and named[0][1] not in reduced_only:
                reduced_only.append(named[0][1])

        def earliest(parameter: NonFiniteParameter) -> tuple[int, int, str]:
            place = order.index(parameter.unit) if parameter.unit in order else len(order)
            return parameter.microbatch, place, parameter.name

        of_loss = (lowest[places.of_loss], highest[places.of_loss])
        return NonFiniteGradients(
            step=pending.step,
            loss=NonFiniteLoss(**self._decoded(*of_loss)) if any(of_loss) else None,
            has_losses=pending.has_losses,
            parameters=tuple(sorted(non_finite, key=earliest)),
            reduced_only=tuple(reduced_only),
        )

    def _decoded(self, lowest: int, highest: int) -> dict[str, Any]:
        """What two findings say, those of the lowest and of the highest rank."""
        return {
            "kind": "NaN" if lowest & 1 else "Inf",
            "microbatch": _LAST_MICROBATCH - (lowest >> _LOW_BITS),
            "first_rank": self._world - _rank_in(lowest),
            "last_rank": _rank_in(highest) - 1,
        }


def _of_experts(entry: Entry) -> bool:
    return any(map(is_expert_axis, entry.part_axes))


def _described(first_rank: int, last_rank: int) -> str:
    return f"rank {first_rank}" if first_rank == last_rank else f"ranks {first_rank} to {last_rank}"


def _rank_in(finding: int) -> int:
    return (finding & ((1 << _LOW_BITS) - 1)) >> 1


def _plain(grad: Tensor | None) -> Tensor | None:
    """The numbers of a gradient that lie here."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    return grad.coalesce().values() if grad is not None and grad.is_sparse else grad
