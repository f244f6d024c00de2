"""The streams an engine works on, and events between them. On CPU all of it is a no-op: gloo's calls return when done."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Event", "Streams"]

Event = torch.Event | None

# Making an event costs the host several times as much as recording one, so they are used in turn. Far more than a step records:
# by the time one comes round again, nobody waits for what it stood for.
_EVENTS = 4096


class Streams:
    """Compute (whatever stream the caller is on), gather and reduce; and copies from and to host memory, each way by itself.

    Memory is allocated on the stream that writes it (gathered weights) or on the compute stream (gradients), and given back once
    the other stream's event has been waited for, so nothing needs `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.gather = self._new_stream()
        self.reduce = self._new_stream()
        self.copy_in = self._new_stream()
        self.copy_out = self._new_stream()
        self._events: list[Any] = []
        self._turn = 0

    def _new_stream(self) -> Any:
        # High priority: a collective that starts late holds up every rank.
        return None if self._module is None else self._module.Stream(self.device, priority=-1)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue work on `stream` (`None` on CPU)."""
        return nullcontext() if stream is None else self._module.stream(stream)

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

    def wait_for_collectives(self) -> None:
        """Have the host wait until all gathers and reductions issued so far have come through."""
        for stream in (self.gather, self.reduce):
            if stream is not None:
                stream.synchronize()

    def wait(self, event: Event, stream: Any = None) -> None:
        """Later work on `stream` (`None`: the current one) starts after `event`."""
        if event is not None:
            (stream or self._module.current_stream()).wait_event(event)
