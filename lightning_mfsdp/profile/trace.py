"""Reads a trace of torch.profiler: the file that `export_chrome_trace` writes, which Perfetto opens, too."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["NEXT_BATCH", "OPTIMIZER", "STEP", "Event", "Trace", "read_trace"]

# Names of ranges. The profiler writes the first for each step of its schedule, StepProfile the others, and the engine `mfsdp gather ...`.
STEP = "ProfilerStep#"
OPTIMIZER = "mfsdp optimizer"
NEXT_BATCH = "mfsdp next batch"

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_GZIP = b"\x1f\x8b"


class Event(NamedTuple):
    """Something that took time; in microseconds since a moment that all events of a trace share.

    Attributes:
        name: Of a kernel, a copy, a call or a range.
        start: When it began.
        end: When it had ended.
        lane: The thread, or the stream of the device.
        launched: For what ran on a device: when the host had it run. Otherwise, and where that is not recorded, `start`.
    """

    name: str
    start: float
    end: float
    lane: int
    launched: float


@dataclass(frozen=True)
class Trace:
    """What a trace has, each in order of time.

    Attributes:
        device: Kernels, copies and fills.
        ranges: What the program has named, and the steps of the profiler's schedule.
        calls: Calls of the CUDA runtime and driver.
        operators: Of PyTorch, on the host.
    """

    device: list[Event]
    ranges: list[Event]
    calls: list[Event]
    operators: list[Event]


def read_trace(path: str | Path) -> Trace:
    """Read a trace, which may be compressed by gzip.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The file is something else.
    """
    content = Path(path).read_bytes()
    try:
        entries = json.loads(gzip.decompress(content) if content.startswith(_GZIP) else content)["traceEvents"]
        return _sorted_out([entry for entry in entries if entry.get("ph") == "X"])
    except (ValueError, TypeError, KeyError, AttributeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is no trace of torch.profiler ({type(error).__name__}: {str(error)[:80]}). Pass a file that export_chrome_trace, "
            "tensorboard_trace_handler or StepProfile(trace=...) has written"
        ) from error


def _sorted_out(entries: list[dict[str, Any]]) -> Trace:
    entries.sort(key=lambda entry: float(entry["ts"]))
    launched: dict[int, float] = {}
    for entry in entries:
        if entry.get("cat") in _LAUNCHES and "correlation" in entry.get("args", {}):
            launched[entry["args"]["correlation"]] = float(entry["ts"])
    trace = Trace([], [], [], [])
    for entry in entries:
        kind, start = entry.get("cat"), float(entry["ts"])
        if kind in _ON_DEVICE:
            arguments = entry.get("args", {})
            at = launched.get(arguments.get("correlation", -1), start)
            trace.device.append(_event(entry, lane=arguments.get("stream", entry.get("tid")), launched=at))
        elif kind == "user_annotation":
            trace.ranges.append(_event(entry))
        elif kind in _LAUNCHES:
            trace.calls.append(_event(entry))
        elif kind == "cpu_op":
            trace.operators.append(_event(entry))
    return trace


def _event(entry: dict[str, Any], lane: Any = None, launched: float | None = None) -> Event:
    start = float(entry["ts"])
    thread = entry.get("tid", 0) if lane is None else lane
    number = thread if isinstance(thread, int) else hash(thread)
    return Event(
        str(entry["name"]), start, start + float(entry.get("dur", 0)), number, start if launched is None else launched
    )
