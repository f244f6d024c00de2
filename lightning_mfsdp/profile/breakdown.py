"""Breaks a trace of training steps down by kind, so that each moment of the GPU counts once.

A moment belongs to the first of these that ran then: computation (of the optimizer or of the rest), all-gathers, reductions, other
communication, copies to and from the host. The rest is idle time. So communication is what no computation hides.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_mfsdp.profile.intervals import Interval, clipped, length, merged, without
from lightning_mfsdp.profile.trace import NEXT_BATCH, OPTIMIZER, STEP, Event, Trace

__all__ = ["END", "KINDS", "Breakdown", "break_down", "kind_of"]

# In the order in which a moment is given to them.
KINDS = ("compute", "optimizer", "all-gathers", "reductions", "other communication", "copies to and from the host")
_COMPUTATION, _COMMUNICATION = KINDS[:2], KINDS[2:5]
# The profiler's own wait for the device, at its end.
END = "mfsdp profile ends"
_WAITS = re.compile(r"(Stream|Event|Device|Ctx)Synchronize$")
_OF_UNIT = re.compile(r"mfsdp (?:gather|reduce) (.+?)(?:\[\d+\])?$")


@dataclass
class Breakdown:
    """Where the time of some steps went; all times are in microseconds a step.

    Attributes:
        steps: How many were recorded.
        step: From the beginning of a step to that of the next one.
        shown: Of the GPU, by kind, each moment once.
        hidden: Of communication and copies: what ran behind something that comes before it in the list of kinds.
        idle: Nothing ran on the GPU.
        idle_for_data: Of this, while the host waited for the next batch.
        waiting: The host waited for the GPU.
        waits: How often a step, by the operator in which it did; the call where it was in none.
        for_data: The host waited for the next batch.
        exposed: Communication that no computation hides, by unit.
        host: Of ranges that the engine and StepProfile name, on the host.
    """

    steps: int
    step: float
    shown: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    idle_for_data: float = 0.0
    waiting: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    for_data: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.shown)


def kind_of(event: Event) -> str:
    """Which of the kinds something on a device is, optimizer apart: that shows by where it was launched."""
    name = event.name.lower()
    plain = name.replace("_", "").replace(" ", "")
    if "nccl" in name or "allgather" in plain or "reducescatter" in plain:
        if "allgather" in plain:
            return "all-gathers"
        return "reductions" if "reduce" in plain else "other communication"
    if name.startswith(("memcpy ptop", "memcpy p2p")):
        return "all-gathers"  # by copy engines
    if name.startswith(("memcpy htod", "memcpy dtoh")):
        return "copies to and from the host"
    return "compute"


def break_down(trace: Trace) -> Breakdown:
    """Sum up a trace.

    Raises:
        ValueError: It has neither steps nor anything that ran on a device.
    """
    steps = [event for event in trace.ranges if event.name.startswith(STEP)]
    steps = list({event.name: event for event in steps}.values())
    window = _window(steps, trace.device)
    result = Breakdown(max(1, len(steps)), (window[1] - window[0]) / max(1, len(steps)))
    _break_down_host(result, trace, window)
    if trace.device:
        _break_down_device(result, trace, window)
    return result


def _window(steps: list[Event], device: list[Event]) -> Interval:
    moments = [moment for event in steps or device for moment in event[1:3]]
    if not moments:
        raise ValueError(
            "the trace has neither steps nor kernels. Record steps with the schedule of torch.profiler and call its step() after each, or "
            "record the activities of CUDA"
        )
    return min(moments), max(moments)


def _intervals(events: Iterable[Event], window: Interval) -> list[Interval]:
    return clipped(merged((event.start, event.end) for event in events), window)


def _break_down_device(result: Breakdown, trace: Trace, window: Interval) -> None:
    optimizer = _intervals((event for event in trace.ranges if event.name == OPTIMIZER), window)
    by_kind: dict[str, list[Event]] = {kind: [] for kind in KINDS}
    for event in trace.device:
        kind = kind_of(event)
        by_kind["optimizer" if kind == "compute" and _is_in(event.launched, optimizer) else kind].append(event)
    taken: list[Interval] = []
    for kind, events in by_kind.items():
        if not events:
            continue
        every = _intervals(events, window)
        shown = length(without(every, taken))
        result.shown[kind] = shown / result.steps
        if kind not in _COMPUTATION:
            result.hidden[kind] = (length(every) - shown) / result.steps
        taken = merged([*taken, *every])
    idle = without([window], taken)
    data = _intervals((event for event in trace.ranges if event.name == NEXT_BATCH), window)
    result.idle = length(idle) / result.steps
    result.idle_for_data = (length(idle) - length(without(idle, data))) / result.steps
    computing = _intervals((event for kind in _COMPUTATION for event in by_kind[kind]), window)
    result.exposed = _exposed_by_unit(trace, by_kind, computing, result.steps)


def _is_in(moment: float, intervals: list[Interval]) -> bool:
    index = bisect_right(intervals, (moment, float("inf"))) - 1
    return index >= 0 and moment <= intervals[index][1]


def _exposed_by_unit(
    trace: Trace, by_kind: dict[str, list[Event]], computing: list[Interval], steps: int
) -> dict[str, float]:
    """By the range in which a collective was launched. Ranges of a thread do not overlap unless one is inside the other."""
    named = [(event, match[1]) for event in trace.ranges if (match := _OF_UNIT.match(event.name))]
    starts = [event.start for event, _ in named]
    found: Counter[str] = Counter()
    for kind in _COMMUNICATION:
        for event in by_kind[kind]:
            index = bisect_right(starts, event.launched) - 1
            if index >= 0 and event.launched <= named[index][0].end:
                found[named[index][1]] += length(without([(event.start, event.end)], computing)) / steps  # type: ignore[assignment]
    return dict(found.most_common())


def _break_down_host(result: Breakdown, trace: Trace, window: Interval) -> None:
    by_name: dict[str, list[Event]] = {}
    for event in trace.ranges:
        name = " ".join(event.name.split()[:2])
        if name in ("mfsdp gather", "mfsdp reduce", OPTIMIZER):
            by_name.setdefault(name, []).append(event)
    result.host = {name: length(_intervals(events, window)) / result.steps for name, events in by_name.items()}
    data = _intervals((event for event in trace.ranges if event.name == NEXT_BATCH), window)
    result.for_data = length(data) / result.steps
    own = _intervals((event for event in trace.ranges if event.name == END), window)
    threads = {event.lane for event in (*trace.operators, *trace.ranges)}  # of the program: NCCL has others, which wait
    calls = [event for event in trace.calls if _WAITS.search(event.name) and event.lane in threads]
    waits = [event for event in calls if window[0] <= event.start <= window[1] and not _is_in(event.start, own)]
    result.waiting = length(without(_intervals(waits, window), data)) / result.steps
    counts = Counter(_operator_around(trace.operators, event) or event.name for event in waits)
    result.waits = {name: count / result.steps for name, count in counts.most_common()}


def _operator_around(operators: list[Event], call: Event) -> str:
    """The innermost operator that a call was made in; empty if in none."""
    index = bisect_right(operators, call.start, key=lambda event: event.start) - 1
    for operator in reversed(operators[max(0, index - 50) : index + 1]):  # one that is around has begun not long before
        if operator.lane == call.lane and operator.end >= call.end:
            return operator.name
    return ""
