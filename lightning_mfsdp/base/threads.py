"""Threads that call PyTorch's C++ code beside a program, and have ended before the interpreter ends.

CPython before 3.14 ends a daemon thread where it comes back from such a call while the interpreter is finalized, by unwinding its stack.
C++ frames that hold the GIL's release admit no unwinding, so the process aborts ("terminate called without an active exception"), after a
program that has succeeded.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["start_for"]

_LIMIT_S = 5.0  # to wait for one; a call that takes longer asks something that does not answer


def start_for(owner: object, run: Callable[[threading.Event], None], name: str) -> None:
    """Run a function in a daemon thread as long as an object lives, and until the interpreter ends.

    Args:
        owner: The object.
        run: Returns soon after the event that it is called with is set. It must not keep the owner alive.
        name: Of the thread.
    """
    ended = threading.Event()
    thread = threading.Thread(target=run, args=(ended,), name=name, daemon=True)
    weakref.finalize(owner, _end, os.getpid(), ended, thread)  # called at exit, too, while threads still run
    thread.start()


def _end(process: int, ended: threading.Event, thread: threading.Thread) -> None:
    if os.getpid() != process:  # a fork has no such thread, and perhaps a lock that was held
        return
    ended.set()
    if thread is not threading.current_thread():  # which may have had the last reference
        thread.join(_LIMIT_S)
