"""plan_recompute: computes from one recorded step how many layers to recompute for a memory budget.

Tensors that autograd keeps share memory (a layer's result is the next one's input), so memory is a set of pieces, and what a choice keeps
is a union: of what is kept outside of layers, of the inputs of recomputed layers, and of all that the others save.

A choice moves the peak: with little kept it is no longer at the loss, but in the backward of some layer, in addition to the gradients
that exist by then. So the step is recorded in parts, one per backward of a layer and one per stretch between, each with the most that
was allocated in it and the layers that waited for their backward. From each part a choice subtracts what those layers would not have
kept; all else in it (weights, gradients, work spaces) stays the same. The peak is the largest remainder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_mfsdp.base.tables import readable_bytes, table_lines
from lightning_mfsdp.recompute.config import Recompute

__all__ = ["LayerRecord", "Part", "Plan", "PlanRow", "StepRecord", "plan_recompute"]

Pieces = Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One layer in a step.

    Attributes:
        name: Of the module.
        stack: Name of the module around it; layers of a stack are counted together.
        saved: Memory that autograd kept for it until backward: bytes by the identity of the piece. Weights are not counted.
        inputs: Memory of its inputs, which is what remains if it is recomputed; empty if it has nothing to differentiate.
        seconds: Of its forward, up to the last tensor that backward needs if recomputation ends there.
        forward_bytes: The most that its forward allocated at once; 0 if memory is not counted.
    """

    name: str
    stack: str
    saved: Pieces
    inputs: Pieces
    seconds: float
    forward_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a step: the backward of a layer, or what is between two of them or before them.

    Attributes:
        layer: Name of the layer whose backward it is; empty for other parts.
        waiting: Names of layers whose forward has run and whose backward has not begun.
        start_bytes: Allocated on the device when it began; 0 if memory is not counted.
        peak_bytes: The most in it; 0 if memory is not counted.
    """

    layer: str = ""
    waiting: tuple[str, ...] = ()
    start_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A forward and its backward.

    Attributes:
        layers: In registration order.
        others: Memory that autograd kept outside of layers.
        seconds: Of the step.
        parts: In their order in time.
        recomputed: Layers, or parts of them, that were recomputed in it.
        modules: Patterns of names of layers, if they were not found automatically.
    """

    layers: tuple[LayerRecord, ...]
    others: Pieces
    seconds: float
    parts: tuple[Part, ...]
    recomputed: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated on the device; 0 if memory is not counted."""
        return max((part.peak_bytes for part in self.parts), default=0)

    @property
    def saved_bytes(self) -> int:
        """All that autograd kept from forward to backward."""
        return _bytes([self.others, *(layer.saved for layer in self.layers)])


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What one choice costs.

    Attributes:
        num_layers: First layers of each stack that are recomputed.
        saved_bytes: Kept by autograd at the end of the forward.
        peak_bytes: The most memory in a step; of activations alone, where the record has no device.
        extra_seconds: Of recomputation.
        step_seconds: Of the step with recomputation.
    """

    num_layers: int
    saved_bytes: int
    peak_bytes: int
    extra_seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices, and the one that was made. `str(plan)` is a table.

    Attributes:
        rows: From no layer to all.
        chosen: The first that fits.
        budget_bytes: As given.
        modules: Patterns of names of layers, as recorded.
    """

    rows: tuple[PlanRow, ...]
    chosen: PlanRow
    budget_bytes: int
    modules: tuple[str, ...] = ()

    @property
    def recompute(self) -> Recompute:
        """What to pass to the strategy, or to `apply_recompute`."""
        count = self.chosen.num_layers
        return Recompute(method="block", num_layers=count, modules=self.modules) if count else Recompute(method="none")

    def __str__(self) -> str:
        head = ("layers", "saved", "peak", "extra time", "step", "")
        cells = [
            (
                str(row.num_layers),
                readable_bytes(row.saved_bytes),
                readable_bytes(row.peak_bytes),
                f"{1e3 * row.extra_seconds:.1f} ms",
                f"{1e3 * row.step_seconds:.1f} ms",
                f"the first within {readable_bytes(self.budget_bytes)}" if row is self.chosen else "",
            )
            for row in self.rows
        ]
        return "\n".join(table_lines([head, *cells]))


def plan_recompute(record: StepRecord, budget_bytes: int) -> Plan:
    """The fewest layers to recompute so that a step fits.

    Args:
        record: Of a step in which nothing was recomputed.
        budget_bytes: For everything on the device; for activations alone, if the record has no device.

    Raises:
        ValueError: A budget that is not a positive number, a record of a step without backward or of one that recomputed something, or no
            choice that fits.
    """
    if budget_bytes < 1:
        raise ValueError(f"plan_recompute: budget_bytes: expected a positive number, got {budget_bytes}")
    if record.recomputed:
        raise ValueError(
            f"plan_recompute: in the recorded step {record.recomputed[0]} was recomputed already, so it is unknown what it would keep; "
            "record a step without recompute, of a smaller batch if it does not fit"
        )
    if not any(part.layer for part in record.parts):
        raise ValueError(
            "plan_recompute: no layer's backward ran in the recorded step, so it is unknown what layers keep for it; run a forward with "
            "gradients and its backward inside record_step"
        )
    longest = max(_by_stack(record).values(), key=len, default=[])
    rows = tuple(_row(record, count) for count in range(len(longest) + 1))
    fitting = [row for row in rows if row.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(rows, key=lambda row: row.peak_bytes)
        raise ValueError(
            f"plan_recompute: a step takes {readable_bytes(least.peak_bytes)} with {least.num_layers} layers recomputed, which is the "
            f"least, and the budget is {readable_bytes(budget_bytes)}; take a smaller batch, or Recompute(num_layers=..., offload=True)"
        )
    return Plan(rows=rows, chosen=fitting[0], budget_bytes=budget_bytes, modules=record.modules)


def _row(record: StepRecord, count: int) -> PlanRow:
    again = _again(record, count)
    extra = sum(layer.seconds for layer in again)
    chosen = frozenset(layer.name for layer in again)
    return PlanRow(
        num_layers=count,
        saved_bytes=_kept(record, [layer.name for layer in record.layers], chosen),
        peak_bytes=max((_most(record, part, chosen) for part in record.parts), default=0),
        extra_seconds=extra,
        step_seconds=record.seconds + extra,
    )


def _most(record: StepRecord, part: Part, again: frozenset[str]) -> int:
    """The most memory in one part of the step if the layers in `again` are recomputed."""
    own_layers = [layer for layer in record.layers if layer.name == part.layer]
    saved = [layer.saved for layer in own_layers]
    before = _kept(record, part.waiting, frozenset(), saved)
    inputs = [layer.inputs for layer in own_layers if layer.name in again]
    during = _kept(
        record, part.waiting, again, [*saved, *inputs]
    )  # in its backward a layer has all it saves, kept or recomputed
    if not part.peak_bytes:
        return during
    most = part.peak_bytes - before + during
    for layer in own_layers:
        if layer.name in again:
            start = part.start_bytes - before + _kept(record, part.waiting, again, inputs)
            most = max(most, start + layer.forward_bytes)
    return most


def _kept(record: StepRecord, names: Iterable[str], again: frozenset[str], more: Sequence[Pieces] = ()) -> int:
    """Bytes of what these layers keep, with what is kept outside of layers, and more."""
    layers = {layer.name: layer for layer in record.layers}
    kept = [layers[name].inputs if name in again else layers[name].saved for name in names]
    return _bytes([record.others, *kept, *more])


def _again(record: StepRecord, count: int) -> list[LayerRecord]:
    """The first `count` layers of each stack."""
    return [layer for stack in _by_stack(record).values() for layer in stack[:count]]


def _by_stack(record: StepRecord) -> dict[str, list[LayerRecord]]:
    stacks: dict[str, list[LayerRecord]] = {}
    for layer in record.layers:
        stacks.setdefault(layer.stack, []).append(layer)
    return stacks


def _bytes(pieces: Iterable[Pieces]) -> int:
    """Bytes of all pieces, each counted once: layers share some."""
    union: dict[int, int] = {}
    for sizes in pieces:
        union.update(sizes)
    return sum(union.values())
