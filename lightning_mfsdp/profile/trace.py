"""Reads a trace of torch.profiler: the file that `export_chrome_trace` writes, which Perfetto opens, too."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["END", "NEXT_BATCH", "OPTIMIZER", "STEP", "VALIDATION", "Event", "Trace", "read_trace"]

# Names of ranges, or how they begin: those of the profiler's schedule, of PyTorch's DataLoader, and of StepProfile. The engine's are
# `mfsdp gather ...` and the like.
STEP = "ProfilerStep#"
NEXT_BATCH = "enumerate(DataLoader)#"
OPTIMIZER = "mfsdp optimizer"
VALIDATION = "mfsdp validation"
END = "mfsdp profile ends"  # it waits for the device

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

    def named(self, name: str) -> list[Event]:
        """The ranges whose names begin so."""
        return [event for event in self.ranges if event.name.startswith(name)]


def read_trace(path: str | Path) -> Trace:
    """Read a trace, which may be compressed by gzip.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The file is something else, or has several GPUs.
    """
    content = Path(path).read_bytes()
    try:
        entries = json.loads(gzip.decompress(content) if content.startswith(_GZIP) else content)["traceEvents"]
        entries = [entry for entry in entries if entry.get("ph") == "X"]
        entries.sort(key=lambda entry: float(entry["ts"]))
        devices = {_arguments(entry).get("device") for entry in entries if entry.get("cat") in _ON_DEVICE}
        trace = _sorted_out(entries)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is no trace of torch.profiler ({type(error).__name__}: {str(error)[:80]}). Pass a file that export_chrome_trace, "
            "tensorboard_trace_handler or StepProfile(trace=...) has written"
        ) from error
    if len(devices) > 1:
        raise ValueError(
            f"{path} has kernels of {len(devices)} GPUs, which would hide each other's communication. Pass the trace of a process that "
            "uses one, before it was joined with others"
        )
    return trace


def _arguments(entry: dict[str, Any]) -> dict[str, Any]:
    return entry.get("args") or {}


def _sorted_out(entries: list[dict[str, Any]]) -> Trace:
    launched = {
        arguments["correlation"]: float(entry["ts"])
        for entry in entries
        if entry.get("cat") in _LAUNCHES and "correlation" in (arguments := _arguments(entry))
    }
    trace = Trace([], [], [], [])
    for entry in entries:
        kind = entry.get("cat")
        if kind in _ON_DEVICE:
            arguments = _arguments(entry)
            at = launched.get(arguments.get("correlation", -1))
            trace.device.append(_event(entry, arguments.get("stream", entry.get("tid")), at))
        elif kind == "user_annotation":
            trace.ranges.append(_event(entry, entry.get("tid")))
        elif kind in _LAUNCHES:
            trace.calls.append(_event(entry, entry.get("tid")))
        elif kind == "cpu_op":
            trace.operators.append(_event(entry, entry.get("tid")))
    return trace


def _event(entry: dict[str, Any], lane: Any, launched: float | None = None) -> Event:
    start = float(entry["ts"])
    number = lane if isinstance(lane, int) else hash(lane)
    end = start + float(entry.get("dur") or 0)
    return Event(str(entry["name"]), start, end, number, start if launched is None else launched)
