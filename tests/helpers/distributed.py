"""Run a function on several gloo processes and bring back what each rank returned.

Processes are forked from a server that has imported the heavy packages and started no thread, and serve call after call
(`lasting_ranks`). On CUDA they start from nothing: a driver does not survive a fork.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.helpers.gpus import environment_of
from tests.helpers.lasting_ranks import GRACE_S, Ranks, forking

# Many cases share one start of processes on GPUs and at night.
TIMEOUT_S = {"gloo": 1000 if os.environ.get("MFSDP_NIGHTLY") == "1" else 250, "nccl": 450}
RANKS = Ranks()
atexit.register(RANKS.stop)


def needs_gpus(ranks: int, *, apart: bool = False) -> pytest.MarkDecorator:
    """Skip a test where NCCL cannot join its ranks: without a GPU, or, if they must be on GPUs `apart`, with fewer than ranks."""
    least, found = ranks if apart else 1, torch.cuda.device_count()
    return pytest.mark.skipif(found < least, reason=f"needs {least} CUDA device(s), found {found}")


class RankError(AssertionError):
    """A rank failed; carries every failed rank's traceback."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    fresh: bool = False,
    apart: bool = False,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` in `world_size` processes of one process group.

    The function must be importable (top level of a test module). Ranks meet in a file, so no port can collide.

    Args:
        function: What each rank does.
        world_size: How many ranks.
        *args: For the function, after the rank and the world size.
        backend: Of the process group.
        fresh: Processes that share no memory with the server, for tests that meter it.
        apart: Forked for this call alone: for what is done once in a process, or ends it.

    Returns:
        What each rank returned, by rank (through a file: tensors are fine).

    Raises:
        RankError: Some rank raised or died; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        arguments = [(rank, world_size, folder, backend, environment, function, args) for rank in range(world_size)]
        if backend == "nccl" or fresh or apart:
            _run_apart(mp.get_context("spawn") if backend == "nccl" or fresh else forking(), arguments, folder, backend)
        elif errors := [error for error in RANKS.call(_serve, arguments, TIMEOUT_S[backend]) if error]:
            raise RankError("\n".join(errors))
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]


def _run_apart(context: Any, arguments: list[tuple[Any, ...]], folder: str, backend: str) -> None:
    processes = [context.Process(target=_main, args=own, daemon=True) for own in arguments]
    for process in processes:
        process.start()
    _join(processes, TIMEOUT_S[backend])
    alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    errors = [Path(folder, f"error-{rank}") for rank in range(len(processes))]
    failures = [path.read_text() for path in errors if path.exists()]
    if alive or failures or any(process.exitcode != 0 for process in processes):
        codes = [process.exitcode for process in processes]
        raise RankError(f"ranks still running: {alive}; exit codes: {codes}\n" + "\n".join(failures))


def _join(processes: list[Any], timeout_s: float) -> None:
    """Wait for all, or for a moment once one has failed: the others may wait for it in a collective."""
    deadline, failed = time.monotonic() + timeout_s, False
    running = list(processes)
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running], left)
        running = [process for process in running if process.is_alive()]
        if not failed and any(process.exitcode for process in processes):
            deadline, failed = min(deadline, time.monotonic() + GRACE_S), True


def _main(rank: int, world_size: int, folder: str, *arguments: Any) -> None:
    """In a process of its own."""
    error = _serve(rank, world_size, folder, *arguments)
    if error:
        Path(folder, f"error-{rank}").write_text(error)
    # Threads that gloo still winds down can abort the interpreter's own exit, now and then.
    os._exit(1 if error else 0)


def _serve(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> str:
    """Have the function's result in a file, or return what went wrong."""
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    device = None
    try:
        if backend == "nccl":
            os.environ.update(environment_of(rank, world_size))
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            # To stderr, before the process is ended: its start may have taken a minute on a busy machine.
            faulthandler.dump_traceback_later(TIMEOUT_S[backend] - 90)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S[backend] - 10),
            device_id=device,
        )
        dist.barrier()  # a rank that breaks off its group at once would break off the meeting of those behind it
        torch.save(function(rank, world_size, *args), Path(folder, f"result-{rank}"))
        gc.collect()  # what the call made goes before its process group does
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # whatever ends a rank, a skip or a timeout of pytest too, is told
        return f"rank {rank}:\n{traceback.format_exc()}"
    return ""
