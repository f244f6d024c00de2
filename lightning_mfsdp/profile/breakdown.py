"""Breaks a trace of training steps down by kind, so that each moment of the GPU counts once.

A moment belongs to the first of these that ran then: computation (of the optimizer or of the rest), all-gathers, reductions, other
communication, copies to and from the host. The rest is idle time. So communication is what no computation hides.

What was launched in the steps counts, whenever it ran. Where it had all run when the last step ended, as StepProfile sees to it, a step is
as long as on the host; where the device lags behind, as long as on the device.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_mfsdp.profile.intervals import Interval, common, contains, length, merged, without
from lightning_mfsdp.profile.trace import END, NEXT_BATCH, OPTIMIZER, STEP, VALIDATION, Event, Trace

__all__ = ["KINDS", "Breakdown", "break_down", "by_kind"]

# In the order in which a moment is given to them.
KINDS = (
    *("compute", "optimizer", "copies on the device"),
    *("all-gathers", "reductions", "other communication", "copies to and from the host"),
)
_COMPUTATION, _COMMUNICATION = KINDS[:2], KINDS[3:6]
_WAITS = re.compile(r"((Stream|Event|Device|Ctx)Synchronize(_ptsz)?|^cudaMemcpy|^cudaFree)$")
_OF_UNIT = re.compile(r"mfsdp (?:gather|reduce) (.+?)(?:\[\d+\])?$")
# Kernels of NCCL, NVSHMEM, DeepEP, PyTorch's symmetric memory and the like. Inductor's names (triton_) tell what a kernel was fused of.
_COMMUNICATES = re.compile(
    r"nccl|nvshmem|deep_ep|multimem|(one|two)_shot_|cross_device_reduce|all_?gather|(all|cross)_?reduce|reduce_?scatter|all_?to_?all"
)
# Those of PyTorch (FusedAdamMathFunctor, FusedSgdMathFunctor, ...) and of Transformer Engine and Apex (AdamFunctor).
_FUSED = re.compile(r"Fused(Adam|Sgd|Adagrad|Optimizer)|\bAdam\w*Functor")


@dataclass
class Breakdown:
    """Where the time of some steps went; all times are in microseconds a step. A validation between steps is no part of them.

    Attributes:
        steps: How many were recorded.
        step: How long one took.
        shown: Of the GPU, by kind, each moment once.
        hidden: Of communication and copies: what ran behind something that comes before it in the list of kinds.
        idle: Nothing ran on the GPU.
        idle_for_data: Of this, while the host waited for the next batch.
        at_work: Of the host: what is none of the following.
        waiting: The host waited for the GPU.
        for_data: The host waited for the next batch of a DataLoader.
        waits: How often a step the host waited for the GPU, by the operator in which it did; the call where it was in none.
        exposed: Communication that no computation hides, by unit.
        optimizer_is_fused: A kernel that does a whole step of many parameters is among the optimizer's.
        host: Of ranges that the engine and StepProfile name, on the host.
    """

    steps: int
    step: float
    shown: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    idle_for_data: float = 0.0
    at_work: float = 0.0
    waiting: float = 0.0
    for_data: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    optimizer_is_fused: bool = False
    host: dict[str, float] = field(default_factory=dict)

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return bool(self.shown)


def by_kind(trace: Trace) -> dict[str, list[Event]]:
    """What ran on the device, for each of the kinds. The optimizer's, and copies for communication, show by where they were launched."""
    optimizer = _intervals(trace.named(OPTIMIZER))
    around_communication = _intervals(event for event in trace.ranges if _OF_UNIT.match(event.name))
    found: dict[str, list[Event]] = {kind: [] for kind in KINDS}
    for event in trace.device:
        kind = _kind_of(event)
        if kind == "compute" and contains(optimizer, event.launched):
            kind = "optimizer"
        elif kind == "compute" and contains(around_communication, event.launched):
            kind = "copies on the device"
        found[kind].append(event)
    return found


def _kind_of(event: Event) -> str:
    name = event.name.lower()
    if name.startswith(("memcpy ptop", "memcpy p2p")):
        return "all-gathers"  # by copy engines
    if name.startswith(("memcpy htod", "memcpy dtoh")):
        return "copies to and from the host"
    if name.startswith("triton_") or not _COMMUNICATES.search(name):
        return "compute"
    if "gather" in name:
        return "all-gathers"
    return "reductions" if "reduce" in name else "other communication"


def break_down(trace: Trace) -> Breakdown:
    """Sum up a trace.

    Raises:
        ValueError: It has neither steps nor anything that ran on a device.
    """
    steps = {event.name: event for event in trace.named(STEP)}
    on_host = _intervals(steps.values()) or _span(trace.device)
    if not on_host:
        raise ValueError(
            "the trace has neither steps nor kernels. Record steps with the schedule of torch.profiler and call its step() after each, or "
            "record the activities of CUDA"
        )
    on_host = without(on_host, _intervals(trace.named(VALIDATION)))
    launched = [event for event in trace.device if contains(on_host, event.launched)]
    on_device = _span(launched) if launched and max(event.end for event in launched) > on_host[-1][1] else on_host
    on_device = without(on_device, _intervals(trace.named(VALIDATION)))
    count = max(1, len(steps))
    result = Breakdown(count, length(on_device) / count)
    _break_down_host(result, trace, on_host)
    if launched:
        _break_down_device(result, Trace(launched, trace.ranges, trace.calls, trace.operators), on_device)
    return result


def _span(events: list[Event]) -> list[Interval]:
    return [(events[0].start, max(event.end for event in events))] if events else []


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return merged((event.start, event.end) for event in events)


def _break_down_device(result: Breakdown, trace: Trace, window: list[Interval]) -> None:
    found = by_kind(trace)
    taken: list[Interval] = []
    for kind, events in found.items():
        if not events:
            continue
        every = common(_intervals(events), window)
        shown = length(without(every, taken))
        result.shown[kind] = shown / result.steps
        if kind not in _COMPUTATION:
            result.hidden[kind] = (length(every) - shown) / result.steps
        taken = merged([*taken, *every])
    result.optimizer_is_fused = any(_FUSED.search(event.name) for event in found["optimizer"])
    idle = without(window, taken)
    result.idle = length(idle) / result.steps
    result.idle_for_data = length(common(idle, _intervals(trace.named(NEXT_BATCH)))) / result.steps
    computing = _intervals(event for kind in _COMPUTATION for event in found[kind])
    exposed = Counter[str]()
    for kind in _COMMUNICATION:
        for event, unit in _with_units(found[kind], trace):
            moments = without(common([(event.start, event.end)], window), computing)
            exposed[unit] += length(moments) / result.steps  # type: ignore[assignment]
    result.exposed = dict(exposed.most_common())


def _with_units(events: list[Event], trace: Trace) -> Iterable[tuple[Event, str]]:
    """Those that were launched in a range of a unit. Such ranges of a thread do not overlap."""
    named = [(event, match[1]) for event in trace.ranges if (match := _OF_UNIT.match(event.name))]
    starts = [event.start for event, _ in named]
    for event in events:
        index = bisect_right(starts, event.launched) - 1
        if index >= 0 and event.launched <= named[index][0].end:
            yield event, named[index][1]


def _break_down_host(result: Breakdown, trace: Trace, window: list[Interval]) -> None:
    by_name: dict[str, list[Event]] = {}
    for event in trace.ranges:
        name = " ".join(event.name.split()[:2])
        if name in ("mfsdp gather", "mfsdp reduce", OPTIMIZER):
            by_name.setdefault(name, []).append(event)
    for name, events in by_name.items():
        result.host[name] = length(common(_intervals(events), window)) / result.steps
    named = merged((event.start, event.end) for events in by_name.values() for event in events)
    end, data = _intervals(trace.named(END)), common(_intervals(trace.named(NEXT_BATCH)), window)
    threads = {event.lane for event in (*trace.operators, *trace.ranges)}  # of the program: NCCL has others, which wait
    waits = [
        event
        for event in trace.calls
        if _WAITS.search(event.name)
        and event.lane in threads
        and contains(window, event.start)
        and not contains(end, event.start)
    ]
    waiting = without(common(_intervals(waits), window), data)
    result.host["the rest"] = length(without(window, merged([*data, *end, *named]))) / result.steps
    result.for_data, result.waiting = length(data) / result.steps, length(waiting) / result.steps
    result.at_work = length(without(window, merged([*data, *waiting, *end]))) / result.steps
    counts = Counter(_operators_around(trace.operators, waits))
    result.waits = {name: count / result.steps for name, count in counts.most_common()}


def _operators_around(operators: list[Event], calls: list[Event]) -> Iterable[str]:
    """For each call the innermost operator that it was made in, or itself if in none."""
    open_in: dict[int, list[Event]] = {}
    asked = set(calls)
    for event in sorted([*operators, *calls], key=lambda event: (event.start, -event.end)):
        around = open_in.setdefault(event.lane, [])
        while around and around[-1].end < event.end:
            around.pop()
        if event in asked:
            yield around[-1].name if around else event.name
        else:
            around.append(event)
