"""Streams: the streams that an engine works on, and events between them. On a CPU nothing happens: gloo's calls return when done."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

__all__ = ["Event", "Streams", "join_when_gone"]

Event = torch.Event | None

# Creating an event costs the host several times as much as recording one, so they are reused in turn. Far more than a step records:
# by the time one is reused, nothing waits for what it recorded before.
_EVENTS = 4096
_NOTHING = nullcontext()


class Streams:
    """Compute (the caller's current stream), gather, and reduce; outer for reductions over that axis; and copies from and to the host.

    Memory is allocated on the stream that writes it (gathered weights) or on the compute stream (gradients), and freed once
    the other stream's event has been waited for, so nothing needs `record_stream`. Only a model that is deleted does not wait: see
    `join_when_gone`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.gather = self._new_stream()
        self.reduce = self._new_stream()
        self.outer = self._new_stream()
        self.copy_in = self._new_stream()
        self.copy_out = self._new_stream()
        self._events: list[Any] = []
        self._turn = 0
        self._compute: dict[Any, None] = {}  # streams that were current

    def _new_stream(self) -> Any:
        # High priority: a collective that starts late holds up every rank.
        return None if self._module is None else self._module.Stream(self.device, priority=-1)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue work on `stream` (`None` on CPU)."""
        return _NOTHING if stream is None else self._module.stream(stream)

    def record(self) -> Event:
        """An event after the work issued so far on the current stream."""
        if self._module is None:
            return None
        if len(self._events) < _EVENTS:
            self._events.append(self._module.Event())
        event = self._events[self._turn]
        self._turn = (self._turn + 1) % _EVENTS
        event.record()
        return event  # type: ignore[no-any-return]

    def wait(self, event: Event, stream: Any = None) -> None:
        """Later work on `stream` (`None`: the current one) starts after `event`."""
        if event is not None:
            if stream is None:
                stream = self._module.current_stream()
                self._compute[stream] = None
            stream.wait_event(event)

    def join_when_gone(self, owner: object) -> None:
        """When `owner` is deleted, make all streams of the engine and those that compute wait for each other."""
        if self._module is not None:
            self._compute[self._module.current_stream(self.device)] = None
            streams = self.gather, self.reduce, self.outer, self.copy_in, self.copy_out
            _join_when_gone(owner, self.device, streams, self._compute)


def join_when_gone(owner: object, stream: torch.cuda.Stream) -> None:
    """When `owner` is deleted with its memory, make a stream and the one that is current now wait for each other.

    The allocator reuses freed memory at once. Without this a copy that is still in flight would write into unrelated
    tensors.
    """
    _join_when_gone(owner, stream.device, (stream,), {torch.cuda.current_stream(stream.device): None})


def _join_when_gone(owner: object, device: torch.device, streams: tuple[Any, ...], compute: dict[Any, None]) -> None:
    # At the interpreter's exit nothing is computed anymore, and the device may be gone.
    weakref.finalize(owner, _join, os.getpid(), device, streams, compute).atexit = False


def _join(process: int, device: torch.device, streams: tuple[Any, ...], compute: dict[Any, None]) -> None:
    """Make streams wait for each other. Runs wherever the last reference is dropped: in another thread, inside another engine's gather.

    Args:
        process: Process of the streams; nothing is done in processes forked from it.
        device: Of the streams.
        streams: Where work on the memory may be in flight, besides
        compute: where it was allocated.
    """
    module = torch.get_device_module(device)
    if os.getpid() != process or module.is_current_stream_capturing():
        return  # before a recording PyTorch waits for the device, and has it use memory of its own
    with suppress(RuntimeError):  # after a device error, which was reported already, no waiting is possible
        done = [stream.record_event() for stream in streams]
        for computing in dict.fromkeys((*compute, module.current_stream(device))):
            for event in done:
                computing.wait_event(event)
            reached = computing.record_event()
            for stream in streams:
                stream.wait_event(reached)
