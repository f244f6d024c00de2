"""Threads that call PyTorch beside a program have ended when the interpreter ends: otherwise a program that succeeded aborts."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from textwrap import dedent

import pytest

from lightning_mfsdp.base.threads import start_for


class Owner:
    """Of a thread."""


def outcome(program: str) -> tuple[int, str]:
    """Exit code and errors of a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


CALLS_THE_STORE = """
    import datetime
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=20))
    calls = []

    def call():
        for _ in range(1000):
            store.check(["x"])
            calls.append(1)
"""


@pytest.mark.parametrize(
    "program",
    [
        """
            from lightning_mfsdp.base.threads import start_for

            class Owner:
                pass

            def run(ended):
                while not ended.is_set():
                    call()

            owner = Owner()
            start_for(owner, run, "calls")
            """,
        """
            from lightning_mfsdp.engine.comm import gather_order

            gather_order._STILL_S = 0
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            watch = gather_order._Watch()
            order = watch.order([0], 0, lambda: [], has_reductions=False)
            order.report_progress = call
            """,
    ],
    ids=["a thread that is ended", "the one that reports positions in the order of gathers"],
)
def test_a_program_ends_well_while_a_thread_of_it_calls_the_store(program: str) -> None:
    """Nearly always inside a call. A plain daemon thread in place of these aborts every time, with CPython before 3.14."""
    waits = "while len(calls) < 100:\n    pass\n"
    code, errors = outcome(dedent(CALLS_THE_STORE) + dedent(program) + waits)
    assert (code, "terminate" in errors) == (0, False), errors


def test_a_thread_ends_when_its_owner_is_gone() -> None:
    begun, events = threading.Event(), list[threading.Event]()

    def run(ended: threading.Event) -> None:
        events.append(ended)
        begun.set()
        ended.wait(60)

    owner = Owner()
    reference = weakref.ref(owner)
    start_for(owner, run, "of a test")
    assert begun.wait(60)
    assert "of a test" in {thread.name for thread in threading.enumerate()}
    del owner
    gc.collect()
    assert reference() is None
    assert events[0].is_set()
    assert "of a test" not in {thread.name for thread in threading.enumerate()}, "it was waited for"
