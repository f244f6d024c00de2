"""HostCopies: keeps inputs of what is recomputed in host memory from forward to backward.

    forward     on a side stream, an input is copied out once its region has run; it is released when the next region's is being copied,
                which waits for the copy, done long before
    backward    an input is copied in while the region after it is recomputed

Host memory is pinned, by PyTorch's allocator, which keeps it for the next step. On a CPU there is one memory, and it is a copy there.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_mfsdp.base.streams import join_when_gone
from lightning_mfsdp.engine import EngineStateError

__all__ = ["HostCopies", "HostCopy"]


class HostCopies:
    """Copies of one model, in the order in which they were copied out."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: HostCopy | None = None
        self._last: weakref.ref[HostCopy] | None = None
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream on which inputs are copied in both directions; made at the first call."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            join_when_gone(self, self._stream)
        return self._stream

    def went(self, copy: HostCopy) -> weakref.ref[HostCopy] | None:
        """A copy out has started: the previous one can be released. Returns that one."""
        if self._leaving is not None:
            self._leaving.let_go()
        before, self._leaving, self._last = self._last, copy, weakref.ref(copy)
        return before

    def stays(self, copy: HostCopy) -> None:
        """The original is still needed: backward came before it was released."""
        if self._leaving is copy:
            self._leaving = None

    def comes(self, tensor: Tensor, event: torch.cuda.Event) -> None:
        """Keep memory that the side stream writes alive until it was written."""
        if self._arriving is not None:
            self._arriving[1].wait()
        self._arriving = (tensor, event)

    def arrived(self) -> None:
        """Let the computation wait for the last copy."""
        self._arriving = None


class HostCopy:
    """One input of a region, on the device or in host memory.

    Args:
        tensor: Computed by the model; not written to before backward.
        name: Of the region, for messages.
        copies: Of the model.
    """

    def __init__(self, tensor: Tensor, name: str, copies: HostCopies) -> None:
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._name, self._copies = name, copies
        self._device, self._needs_grad = tensor.device, tensor.requires_grad
        self._host: Tensor | None = None
        self._left: torch.cuda.Event | None = None
        self._ahead: tuple[Tensor, torch.cuda.Event] | None = None
        self._before: weakref.ref[HostCopy] | None = None

    def send(self) -> None:
        """Start copying it to host memory: the forward has read it."""
        assert self._tensor is not None, "once"
        tensor = self._tensor.detach()
        if self._device.type != "cuda":
            self._host = tensor.clone()
            self.let_go()
            return
        side, current = self._copies.stream(self._device), torch.cuda.current_stream(self._device)
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # strides, too, if it is dense
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._host.copy_(tensor, non_blocking=True)
            self._left = side.record_event()
        self._before = self._copies.went(self)

    def let_go(self) -> None:
        """Wait for the copy, on the current stream."""
        tensor = self._tensor
        assert tensor is not None, "once"
        if tensor._version != self._version:
            raise EngineStateError(
                f"{self._name}: its input was written in place after its forward, which has to read it again in backward; write into a "
                "copy (x = x + y, not x += y), or leave it out of what is recomputed"
            )
        if self._left is not None:
            self._left.wait()
        self._tensor = None

    def take(self) -> Tensor:
        """The input for another forward, detached from what computed it."""
        if self._tensor is not None:
            self._copies.stays(self)
            return self._tensor.detach().requires_grad_(self._needs_grad)
        assert self._host is not None, "send() made it"
        if self._device.type != "cuda":
            return self._host.clone().requires_grad_(self._needs_grad)
        tensor = self._fetched()
        # Backward needs the input that was copied out before this one next: it arrives while this one's region is recomputed.
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return tensor.requires_grad_(self._needs_grad)

    def fetch(self) -> None:
        """Start copying it back, if it was released."""
        if self._tensor is not None or self._ahead is not None or self._host is None:
            return
        side = self._copies.stream(self._device)
        tensor = torch.empty_like(self._host, device=self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))  # which used that memory before
        with torch.cuda.stream(side), torch.no_grad():
            tensor.copy_(self._host, non_blocking=True)
            event = side.record_event()
        self._ahead = (tensor, event)
        self._copies.comes(tensor, event)

    def _fetched(self) -> Tensor:
        self.fetch()
        assert self._ahead is not None, "fetch() began it"
        (tensor, event), self._ahead = self._ahead, None
        event.wait()
        self._copies.arrived()
        return tensor.detach()
