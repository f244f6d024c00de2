"""Saves while training goes on: what will be written is copied to host memory (`Staging`), and written in a thread (`BackgroundSaver`)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard

__all__ = ["BackgroundSaver", "Staging"]


class Staging:
    """Host buffers, pinned for tensors on a GPU. They are kept from one save to the next: pinning takes longer than copying."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, tree: Any) -> Any:
        """A copy of nested dictionaries, lists and tuples with tensors on the host; complete on return.

        The buffers of the previous copy are reused: it must no longer be in use.
        """
        devices: dict[torch.device, None] = {}
        copied = self._copy((), tree, devices)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _copy(self, key: tuple[Any, ...], value: Any, devices: dict[torch.device, None]) -> Any:
        if isinstance(value, DcpShard):
            return value.with_local(self._copy(key, value.local, devices))
        if isinstance(value, Tensor):
            if value.is_cuda:
                devices[value.device] = None
            return self._buffer(key, value).copy_(value.detach(), non_blocking=True)
        if isinstance(value, dict):
            return {name: self._copy((*key, name), part, devices) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [self._copy((*key, number), part, devices) for number, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        return copy.deepcopy(value)

    def _buffer(self, key: tuple[Any, ...], value: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
            self._buffers[key] = buffer
        return buffer


class BackgroundSaver:
    """Runs at most one save in the background, and afterwards the actions that depend on its success."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._save: Future[None] | None = None
        self._waiting: list[tuple[str, Callable[[], None]]] = []

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun that was not waited for yet."""
        return self._save is not None

    def start(self, save: Callable[[], None]) -> None:
        """Begin a save. The previous one must have been waited for."""
        assert self._save is None, "wait for the save before this one first"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mfsdp-save")
        self._save = self._thread.submit(save)

    def after(self, doing: str, action: Callable[[], None]) -> None:
        """Run an action once the save has succeeded, or at once if there is none. `doing` names it if it cannot be done."""
        if self._save is None:
            action()
        else:
            self._waiting.append((doing, action))

    def wait(self) -> None:
        """Wait for the save, and run the actions that waited for it.

        Raises:
            RuntimeError: The save failed; from its error. `CollectiveError`: because another rank is missing.
        """
        if self._save is None:
            return
        save, self._save = self._save, None
        waiting, self._waiting = self._waiting, []
        try:
            save.result()
        except Exception as error:
            for doing, _ in waiting:
                warnings.warn(
                    f"{doing} was left out: the checkpoint saved before it failed; remove by hand what is not wanted",
                    stacklevel=2,
                )
            failed = f"a checkpoint saved in the background failed: {error}"
            if isinstance(error, CollectiveError):
                raise CollectiveError(failed) from error
            raise RuntimeError(failed) from error
        for doing, action in waiting:
            try:
                action()
            except OSError as error:  # on this rank alone, so the others would wait for it if it were raised
                warnings.warn(
                    f"{doing} failed after the checkpoint was saved: {error}. Remove it by hand", stacklevel=2
                )

    def close(self) -> None:
        """Wait, then end the thread.

        Raises:
            RuntimeError: The save failed.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
