"""Ends this process by a second SIGTERM wherever it is. docs/design/stopping.md says why it is done so, and what else was considered.

The first SIGTERM has all ranks stop after the same batch and save (stopping.py), however long that takes. Python runs the handler of a
signal in the main thread, between two instructions, so a process in a collective that never ends would handle no second one. The kernel's
own action needs no Python. It is set in advance, for SIGTERM that comes `SECOND_S` or more after the first; what comes sooner belongs to
the first, because schedulers signal all processes of a job, and torchrun passes the signal on to the same ones.

    noted    Python's C code writes the number of each signal into the wakeup file descriptor at once, wherever the main thread is. A
             process has one, which asyncio and others use too; where it is theirs, the handler of the first SIGTERM notes it
    armed    a thread reads that, waits, and sets the kernel's action, with a traceback before it. Where a C call keeps Python's lock
             all that time, this waits for its end; a call that begins later makes no difference

Nothing is armed in a SLURM job. SLURM itself sends SIGTERM twice, when the GraceTime of a preempted job begins and when it is over, and a
save may go on after the second: SIGKILL follows in any case, `KillWait` later.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from lightning_mfsdp.base.children import call_in_children

__all__ = ["SECOND_S", "SecondSigterm"]

_log = logging.getLogger(__name__)

SECOND_S = 5.0
_STDERR = 2  # its number: sys.stderr may be anything


class SecondSigterm:
    """From the beginning of a run until `close`, or the end of the process. Made in the main thread.

    Args:
        handler: Of the first SIGTERM. Where the program has installed another one since, its own is left alone.
        tells: Whether this rank says that a further SIGTERM ends processes; one of them is enough.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None], *, tells: bool) -> None:
        self._handler, self._tells = handler, tells
        self._is_armed = False
        self._closed, self._has_read = threading.Event(), threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        others = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        call_in_children(self._forget_in_fork)
        self._thread = threading.Thread(target=self._run, name="mfsdp-second-sigterm", daemon=True)
        self._thread.start()

    def note_first(self) -> None:
        """SIGTERM came. For its handler, which may interrupt itself: takes no lock. Later calls change nothing."""
        with contextlib.suppress(OSError):  # nothing reads any more
            self._writer.send(bytes([signal.SIGTERM]))

    def release(self) -> None:
        """Note no further SIGTERM, and give the wakeup file descriptor back. What was noted is armed in time, unless the handler changes.

        Called in the main thread.
        """
        self._leave_wakeup_fd()
        self._writer.shutdown(socket.SHUT_WR)  # ends the reading, also while a fork has a copy of this end
        self._has_read.wait()
        self._writer.close()
        self._reader.close()

    def close(self) -> None:
        """Take back all of it but the kernel's action, which the next handler replaces. Called in the main thread."""
        self._closed.set()
        self.release()
        self._thread.join()
        if self._is_armed:
            faulthandler.unregister(signal.SIGTERM)

    def _leave_wakeup_fd(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(current)

    def _forget_in_fork(self) -> None:
        """Signals of a fork, such as a loader's worker, are not those of its parent."""
        if self._writer.fileno() != -1:
            self._leave_wakeup_fd()
            self._writer.close()
            self._reader.close()

    def _run(self) -> None:
        while (numbers := self._reader.recv(4096)) and signal.SIGTERM not in numbers:
            pass
        self._has_read.set()
        if not numbers:
            return
        if not self._closed.wait(SECOND_S) and signal.getsignal(signal.SIGTERM) == self._handler:
            self._arm()

    def _arm(self) -> None:
        # signal.signal works in the main thread alone.
        set_action = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
            ("PyOS_setsig", ctypes.pythonapi)
        )
        faulthandler.unregister(signal.SIGTERM)  # the program's own registration would stay, and chain to its handler
        set_action(signal.SIGTERM, None)
        # Of the main thread alone: others may change their stacks while these are read.
        faulthandler.register(signal.SIGTERM, file=_STDERR, all_threads=False, chain=True)
        self._is_armed = True
        if self._tells:
            _log.warning(
                f"SIGTERM came {SECOND_S:g} s ago, and this run has not ended: its batch, validation or save may take as long as it "
                "needs. A further SIGTERM ends a process at once, wherever it is; it then prints where that was and saves nothing"
            )
