"""Run a function on several gloo processes and bring back what each rank returned.

Processes are forked from a server that has imported the heavy packages and started no thread, which saves seconds for each. On
CUDA they start from nothing: a driver does not survive a fork.
"""

from __future__ import annotations

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

TIMEOUT_S = {"gloo": 250, "nccl": 300}  # many cases share one start of processes on GPUs
GRACE_S = 10  # for ranks to fail as well, once one has
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.tensor", "lightning.pytorch", "lightning_mfsdp.fabric"]


def needs_gpus(ranks: int, *, apart: bool = False) -> pytest.MarkDecorator:
    """Skip a test where NCCL cannot join its ranks: without a GPU, or, if they must be on GPUs `apart`, with fewer than ranks."""
    least, found = ranks if apart else 1, torch.cuda.device_count()
    return pytest.mark.skipif(found < least, reason=f"needs {least} CUDA device(s), found {found}")


class RankError(AssertionError):
    """A rank failed; carries every failed rank's traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", fresh: bool = False
) -> list[Any]:
    """Call `function(rank, world_size, *args)` in `world_size` processes of one process group.

    The function must be importable (top level of a test module). Ranks meet in a file, so no port can collide.

    Args:
        function: What each rank does.
        world_size: How many ranks.
        *args: For the function, after the rank and the world size.
        backend: Of the process group.
        fresh: Processes that share no memory with the server, for tests that meter it.

    Returns:
        What each rank returned, by rank (through a file: tensors are fine).

    Raises:
        RankError: Some rank raised or died; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        forks = backend != "nccl" and not fresh
        context: Any = mp.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(PRELOADED)
        environment = dict(os.environ)
        processes = [
            context.Process(
                target=_main, args=(rank, world_size, folder, backend, environment, function, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _join(processes, TIMEOUT_S[backend])
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        failures = [
            Path(folder, f"error-{rank}").read_text()
            for rank in range(world_size)
            if Path(folder, f"error-{rank}").exists()
        ]
        if alive or failures or any(process.exitcode != 0 for process in processes):
            codes = [process.exitcode for process in processes]
            raise RankError(f"ranks still running: {alive}; exit codes: {codes}\n" + "\n".join(failures))
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]


def _join(processes: list[Any], timeout_s: float) -> None:
    """Wait for all, or for a moment once one has failed: the others may wait for it in a collective."""
    deadline, failed = time.monotonic() + timeout_s, False
    running = list(processes)
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running], left)
        running = [process for process in running if process.is_alive()]
        if not failed and any(process.exitcode for process in processes):
            deadline, failed = min(deadline, time.monotonic() + GRACE_S), True


def _main(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    device = None
    if backend == "nccl":
        os.environ.update(environment_of(rank, world_size))
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S[backend] - 10),
            device_id=device,
        )
        result = function(rank, world_size, *args)
        torch.save(result, Path(folder, f"result-{rank}"))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        # The result is written. Threads that gloo still winds down can abort the interpreter's own exit, now and then.
        os._exit(0)
    except BaseException:  # whatever ends a rank, a skip or a timeout of pytest too, is told, and goes on
        Path(folder, f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
