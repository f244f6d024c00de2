"""Ends a process that was asked to end and cannot: Python runs no handler of a signal while the main thread waits in C code.

The first SIGTERM has all ranks stop after the same batch and save (stopping.py). A step or a save may take as long as it needs while this
process computes, or reads or writes files. Where it has done neither for `grace`, it waits for something that does not come, and is ended.
A second SIGTERM ends it wherever it is; launchers and schedulers send one each, so it has to come later than those.

NCCL computes while it waits, so it is its own time-out, or the channel of failures (peers.py), that ends such a wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

__all__ = ["EXIT_CODE", "Overdue"]

_log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM  # as a shell says it of a process that SIGTERM ended
SECOND_S = 2.0  # SIGTERM that comes sooner belongs to the first
LOOKS_S = 1.0
# Since it was last seen to move. Threads that only watch need less in any grace, and messages over sockets are no files.
COMPUTES_S, _MOVES_BYTES = 0.25, 1 << 20


class Overdue:
    """Between the first SIGTERM and the end of a process; made in the main thread.

    Args:
        who: Which rank this is, for the message.
        grace: Seconds without any work after which the process is ended.
        end: What ends it.
    """

    def __init__(self, who: str, grace: float, end: Callable[[int], object] = os._exit) -> None:
        self._who, self._grace, self._end = who, grace, end
        self._asked_at: float | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Its C code writes the number of each signal there at once, whatever the main thread does.
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        forget = weakref.WeakMethod(self._forget_in_fork)
        os.register_at_fork(after_in_child=lambda: None if (own := forget()) is None else own())
        self._thread = threading.Thread(target=self._run, name="mfsdp-overdue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; called in the main thread."""
        signal.set_wakeup_fd(self._before)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()

    def _forget_in_fork(self) -> object:
        """A fork, such as a loader's worker, must not report its signals as those of its parent."""
        if self._writer.fileno() != -1:
            signal.set_wakeup_fd(-1)
            self._writer.close()
            self._reader.close()
        return None

    def _run(self) -> None:
        moved_at, moved = time.monotonic(), _work()
        while True:
            ready, _, _ = select.select([self._reader], [], [], None if self._asked_at is None else LOOKS_S)
            now = time.monotonic()
            if ready:
                numbers = self._reader.recv(4096)
                if not numbers:
                    return
                if self._before != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._before, numbers)
                if signal.SIGTERM in numbers:
                    if self._asked_at is None:
                        self._asked_at = moved_at = now
                        moved = _work()
                    elif now - self._asked_at > SECOND_S:
                        self._end_process("a second SIGTERM came")
                continue
            work = _work()
            if work[0] - moved[0] > COMPUTES_S or work[1] - moved[1] > _MOVES_BYTES:
                moved_at, moved = now, work
            elif now - moved_at > self._grace:
                self._end_process(
                    f"SIGTERM came {now - (self._asked_at or now):.0f} s ago, and for {self._grace:g} s it has neither computed nor read "
                    "or written files"
                )
                return

    def _end_process(self, why: str) -> None:
        _log.warning(f"{self._who} is ended: {why}. Go on from the newest complete checkpoint")
        for handler in logging.getLogger().handlers:
            handler.flush()
        self._end(EXIT_CODE)


def _work() -> tuple[float, int]:
    """Seconds that this process has computed, and bytes that it has read from and written to files."""
    moved = 0
    with contextlib.suppress(OSError):  # not on every system
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        moved = int(fields["rchar"]) + int(fields["wchar"])
    return time.process_time(), moved
