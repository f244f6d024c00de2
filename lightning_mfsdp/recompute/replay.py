"""Has a repeated forward find its state as in the first one: its arguments, the precision, norms, routes, random numbers.

arguments     containers of its own, from which tensors are taken out. A layer may replace entries of a dict that it is given, or add to a
              list. The forward gets the caller's containers, so the caller sees changes; the repeated one gets them as they were before.
              Tensors inside are saved like those outside, which detects in-place writes.
precision     a backward has contexts of its own, or none. `torch.autocast` is restored by the checkpoint (PyTorch's, Transformer
              Engine's); the default dtype ("*-true" precisions) and the recipe of Transformer Engine, FP8 or FP4 or none, are not.
statistics    a batch counts once in the running statistics of norms, in its forward.
routes        routers' choices are kept, so that tokens are routed the same way in backward. Recomputed scores are the same numbers only if
              every kernel before them is; a near tie that decided differently would change how many tokens an expert gets, and with experts
              on other ranks also which rank waits for which.
draws         what is kept is not run again, so it does not draw random numbers again, and the next draws would get its numbers.
              Generators' positions are read on the host, without waiting for a device. A CUDA graph that is being recorded has nothing to
              read, and draws nothing in a region.

Used by `region.RegionCall` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

import lightning_mfsdp.te as te
from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import renewed

__all__ = [
    "KeptChoices",
    "KeptDraws",
    "PrecisionSnapshot",
    "counted_once",
    "cuda_position",
    "filled",
    "keeps_statistics",
    "outlined",
    "routers_in",
    "uncached_casts",
]


class _Place:
    """What stands in an outline for a tensor: its index among those that were taken out."""

    def __init__(self, index: int) -> None:
        self.index = index


def outlined(value: Any, tensors: list[Tensor]) -> Any:
    """`value` without its tensors, which are appended to `tensors`: those in tuples, lists, dicts and dataclasses, nested."""

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return renewed(outline, value)


def filled(outline: Any, tensors: Sequence[Tensor]) -> Any:
    """What was outlined, with these tensors, in new containers."""
    return renewed(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf, outline)


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used: the same operators run every time."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class PrecisionSnapshot:
    """Captured at creation; entered whenever a backward recomputes.

    Args:
        with_engine: Whether modules of Transformer Engine are used, so that the library is loaded.
    """

    def __init__(self, *, with_engine: bool) -> None:
        self._dtype = torch.get_default_dtype()
        self._engine = te.autocast_snapshot() if with_engine else nullcontext

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the precision is as it was."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with self._engine():
                yield
        finally:
            torch.set_default_dtype(before)


# The buffer by which PyTorch's batch and instance norms that keep statistics are recognized, including subclasses and synchronized ones.
_COUNT = "num_batches_tracked"


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm with running statistics, or has one inside."""
    return any(part._buffers.get(_COUNT) is not None for part in module.modules())


@contextmanager
def counted_once(module: nn.Module) -> Iterator[None]:
    """Inside, norms in `module` write their statistics to copies."""
    norms = [part for part in module.modules() if part.training and part._buffers.get(_COUNT) is not None]
    # Copies instead of no writes: as many tensors must be saved for backward as the first time.
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


@runtime_checkable
class _Chooses(Protocol):
    """A module that queries a keeper for each choice, as `lightning_mfsdp.moe.TopKRouter` does."""

    choice_keeper: Any


def routers_in(module: nn.Module) -> list[nn.Module]:
    """Modules that let their choices be kept."""
    return [part for part in module.modules() if isinstance(part, _Chooses)]


class KeptChoices:
    """Choices of one call, by router in the order in which it made them."""

    def __init__(self, count: int) -> None:
        self._choices: list[list[Tensor]] = [[] for _ in range(count)]

    @contextmanager
    def around(self, routers: Sequence[Any], *, again: bool) -> Iterator[None]:
        """Inside, routers store their choices, or reuse the stored ones."""
        before = [router.choice_keeper for router in routers]
        for router, kept in zip(routers, self._choices, strict=True):
            router.choice_keeper = _Replaying(kept) if again else _Keeping(kept)
        try:
            yield
        finally:
            for router, keeper in zip(routers, before, strict=True):
                router.choice_keeper = keeper


class _Keeping:
    def __init__(self, kept: list[Tensor]) -> None:
        self._kept = kept

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, choose: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        choice = choose()
        self._kept.append(choice.detach())
        return choice, False


class _Replaying:
    def __init__(self, kept: list[Tensor]) -> None:
        self._next = iter(kept)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, choose: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        return next(self._next), True


class KeptDraws:
    """Random state of one call of a region.

    Args:
        draws: Which operators are kept and may draw; `None`: none.
        device: Of the region, whose generator is used besides the CPU's.
    """

    def __init__(self, draws: Callable[[Any], bool] | None, device: torch.device | None) -> None:
        self._draws, self._device = draws, device
        self._noted: list[tuple[Tensor, int | None]] = []

    def around(self, *, again: bool) -> AbstractContextManager[Any]:
        """Inside, record the generators' positions after each of those operators, or restore them."""
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


class _AfterEach(compat.DispatchMode):
    """Calls `then` after each operator that `draws`."""

    supports_higher_order_operators = True  # they pass through

    def __init__(self, draws: Callable[[Any], bool], then: Callable[[], None]) -> None:
        super().__init__()
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
