"""A folder that leads to another storage in one process, as on a node that does not share it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

_NEW_NAMESPACE = 0x20000  # CLONE_NEWNS
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18  # MS_BIND, MS_REC, MS_PRIVATE


def hide(folder: Path | str, private: Path | str) -> None:
    """Mount `private` at `folder`, for this process (its main thread and threads that it starts) alone, until it ends.

    Raises:
        OSError: The kernel does not permit it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_NEW_NAMESPACE))
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))
    check(libc.mount(os.fsencode(private), os.fsencode(folder), None, ctypes.c_ulong(_BIND), None))


@cache
def cannot_hide_because() -> str:
    """Why this process may not mount; empty if it may. Tried in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        reason = ""
        try:
            hide("/tmp", "/var/tmp")
        except (OSError, AttributeError) as error:
            reason = f"the kernel does not permit private mounts: {error}"
        os.write(writing, reason.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode()
