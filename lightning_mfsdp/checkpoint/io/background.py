"""Saves that run during training: one at a time, in a thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["BackgroundSaver"]


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
            RuntimeError: The save failed; from its error.
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
            raise RuntimeError(f"a checkpoint saved in the background failed: {error}") from error
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
