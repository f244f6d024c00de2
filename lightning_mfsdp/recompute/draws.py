"""KeptDraws: where the generators of random numbers stand after operators whose results are kept.

What is kept is not run again, so it does not draw again, and whatever draws after it would get its numbers. Where the generators stood is
read on the host: nobody waits for a device. A CUDA graph that is being recorded has nothing to read, and draws nothing in a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat

__all__ = ["KeptDraws", "cuda_position"]


class KeptDraws:
    """Of one call of a region.

    Args:
        draws: Which operators are kept and may draw; `None`: none.
        device: Of the region, whose generator stands beside the CPU's.
    """

    def __init__(self, draws: Callable[[Any], bool] | None, device: torch.device | None) -> None:
        self._draws, self._device = draws, device
        self._noted: list[tuple[Tensor, int | None]] = []

    def around(self, *, again: bool) -> AbstractContextManager[Any]:
        """Inside, note where the generators stand after each of those operators, or put them there."""
        if self._draws is None:
            return nullcontext()
        if not again:
            return _AfterEach(self._draws, lambda: self._noted.append(self._read()))
        noted: Iterator[tuple[Tensor, int | None]] = iter(self._noted)
        return _AfterEach(self._draws, lambda: self._write(*next(noted)))

    def _read(self) -> tuple[Tensor, int | None]:
        on_cuda = self._device is not None and self._device.type == "cuda"
        position = cuda_position(self._device) if on_cuda and not torch.cuda.is_current_stream_capturing() else None  # type: ignore[arg-type]
        return torch.default_generator.get_state(), position

    def _write(self, state: Tensor, position: int | None) -> None:
        torch.default_generator.set_state(state)
        if position is not None and self._device is not None:
            _cuda_generator(self._device).set_offset(position)


class _AfterEach(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Calls `then` after each operator that `draws`."""

    supports_higher_order_operators = True  # they pass

    def __init__(self, draws: Callable[[Any], bool], then: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._then = draws, then

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside stays compiled, as under PyTorch's own modes of a selective checkpoint."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._draws(func):
            self._then()
        return result


def cuda_position(device: torch.device) -> int:
    """How many random numbers were drawn on a CUDA device."""
    return _cuda_generator(device).get_offset()


def _cuda_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0]
