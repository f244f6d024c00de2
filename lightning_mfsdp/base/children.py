"""What a process that this one has forked, such as a loader's worker, does before anything else: it leaves what is its parent's."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable

__all__ = ["call_in_children"]


def call_in_children(method: Callable[[], object]) -> None:
    """Have every process that is forked from now on call a bound method, as long as the object that has it is alive."""
    methods = _methods()
    reference = weakref.WeakMethod(method, lambda gone: methods.pop(id(gone), None))
    methods[id(reference)] = reference


@functools.cache
def _methods() -> dict[int, weakref.ref[Callable[[], object]]]:
    """The methods. Python keeps what it is to call after a fork for as long as the process lives, so that is one function for all fits."""
    methods: dict[int, weakref.ref[Callable[[], object]]] = {}

    def call_all() -> None:
        for reference in list(methods.values()):
            if (method := reference()) is not None:
                with contextlib.suppress(OSError):  # of a socket; the others must be called
                    method()

    os.register_at_fork(after_in_child=call_all)
    return methods
