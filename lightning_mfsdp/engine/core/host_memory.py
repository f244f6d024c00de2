"""Host memory that is seen as a tensor of the device: storage for what is needed once in a step.

CUDA addresses page-locked host memory like its own, only slower: every access crosses the bus. A tensor over such memory may
therefore be a CUDA tensor. Code that accesses it occasionally (checkpoints, averages, `unshard`) needs no change; code that does so in
every step copies it to the device and back, through `HostMemory.host`, with the copy engines.

On CPU it is ordinary memory, and both are one tensor.

Alternatives considered: `pin_memory=True`, whose allocator rounds sizes up to powers of two, so that up to half of the memory is lost;
managed memory, which moves pages when they are touched and stalls the access.

Source: "Unified Virtual Address Space" in NVIDIA's CUDA programming guide; version 3 of the CUDA array interface.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from lightning_mfsdp.base.errors import EngineStateError

__all__ = ["HostMemory", "aligned"]

_ALIGNMENT_BYTES = 512


def aligned(size_bytes: int) -> int:
    """A size rounded up so that anything may begin at its end."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class HostMemory:
    """Zeroed bytes in host memory.

    Attributes:
        size_bytes: How many.
        host: `[size_bytes]` uint8 on the CPU, page-locked: for copies that overlap with other work.
        seen: The same memory as a tensor of the device: for all other code.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        with torch.inference_mode(False):
            if device.type == "cuda" and size_bytes:
                locked = _PageLocked(size_bytes, device)
                self.host, self.seen = locked.memory, torch.as_tensor(locked, device=device)
                if self.seen.data_ptr() != self.host.data_ptr():
                    raise EngineStateError(
                        f'offload="optimizer": {device} sees host memory at another address than the host, so tensors cannot share it; '
                        "expected unified addressing, which 64-bit Linux has. Leave offload out"
                    )
            else:
                self.host = self.seen = torch.zeros(size_bytes, dtype=torch.uint8, device=device)


class _PageLocked:
    """Whole pages of host memory that are registered with CUDA until the last reference is dropped.

    PyTorch keeps this object alive as long as a tensor made of it.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        pages = _pages(size_bytes)
        with torch.cuda.device(device):  # the device that the memory is attributed to
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(pages.data_ptr(), pages.numel(), 0))
        self.memory = pages[:size_bytes]
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }
        # At the interpreter's exit all memory is freed with the process, and tensors may still be in use.
        weakref.finalize(self, _unlock, pages, device).atexit = False


def _pages(size_bytes: int) -> Tensor:
    """Zeroed pages that share none with other memory, `[at least size_bytes]` uint8.

    A forked process (a loader's worker) does not get them: copy-on-write would separate the host's pages from those that CUDA knows.
    """
    room_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(room, dtype=torch.uint8)


def _unlock(pages: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may be under way
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(pages.data_ptr()))
