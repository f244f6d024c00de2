"""A stream besides the caller's, created when it is first used. On CPU everything is done at once and there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_mfsdp.base.streams import join_when_gone

__all__ = ["Event", "SideStream", "is_capturing"]

Event = Any  # torch.cuda.Event, or None on CPU


class SideStream:
    """Work that begins after what the caller has issued so far, and that the caller joins when it needs it.

    Args:
        device: The device.
        is_own: Whether there is a separate stream. If not, work is issued on the caller's: nothing overlaps, and nothing has to be joined
            before a CUDA graph ends.
    """

    def __init__(self, device: torch.device, *, is_own: bool = True) -> None:
        self._device = device
        self._is_own = is_own
        self._stream: Any = None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Issue work on the side stream, after everything on the current stream."""
        if self._device.type == "cpu" or not self._is_own:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            join_when_gone(self, self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> Event:
        """An event after the work issued on the side stream so far."""
        if self._device.type == "cpu" or (self._is_own and self._stream is None):
            return None
        event = torch.cuda.Event()
        event.record(self._stream if self._is_own else torch.cuda.current_stream(self._device))
        return event

    def join(self, event: Event) -> None:
        """Let later work on the current stream begin after `event`."""
        if event is not None and self._is_own:
            torch.cuda.current_stream(self._device).wait_event(event)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
