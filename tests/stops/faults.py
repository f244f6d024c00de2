"""Runs of real processes in which something goes wrong on one rank, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests.helpers.lasting_ranks import forking
from tests.lightning.models import Classifier, loader, make_trainer

LIMIT_S = (
    200  # many times what anything here takes, imports on a busy machine included; a process that is left then hangs
)


@dataclass
class End:
    """How a rank ended.

    Attributes:
        code: Of its process; negative: the signal that killed it; `None`: it was still there when time was up.
        error: Kind of what its program raised, and its text; empty if it raised nothing.
        chain: Kinds of that error and of what it came from.
        notes: What it wrote down.
        after_s: Seconds from the fault to its end.
    """

    code: int | None
    error: str
    chain: list[str]
    notes: list[Any]
    after_s: float


def run_faulty(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 2 * LIMIT_S) -> list[End]:
    """Call `function(rank, world, folder, *args)` in processes of one process group, until all have ended.

    `timeout_s` is that of collectives: so long by default that none ends what should end by itself.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = forking()
        processes = [
            context.Process(target=_main, args=(rank, world, name, timeout_s, function, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + LIMIT_S
        ended: dict[int, float] = {}
        while len(ended) < world and time.monotonic() < until:
            for rank, process in enumerate(processes):
                process.join(0.02)
                if process.exitcode is not None:
                    ended.setdefault(rank, time.time())
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        fault = min((path.stat().st_mtime for path in folder.glob("fault")), default=time.time())
        return [_end(folder, rank, code, ended.get(rank, time.time()) - fault) for rank, code in enumerate(codes)]


def _end(folder: Path, rank: int, code: int | None, after_s: float) -> End:
    path = folder / f"end-{rank}.json"
    said = json.loads(path.read_text()) if path.exists() else {"error": "", "chain": []}
    notes = folder / f"notes-{rank}"
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return End(code, said["error"], said["chain"], lines, after_s)


def _main(
    rank: int, world: int, name: str, timeout_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{name}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        function(rank, world, Path(name), *args)
    except BaseException as error:
        chain, link = [], error
        while link is not None:
            chain.append(type(link).__name__)
            link = link.__cause__ or link.__context__
        said = {"error": f"{type(error).__name__}: {error}", "chain": chain}
        Path(name, f"end-{rank}.json").write_text(json.dumps(said))
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def note(folder: Path, rank: int, what: Any) -> None:
    with Path(folder, f"notes-{rank}").open("a") as file:
        file.write(json.dumps(what) + "\n")


class Faulty(Classifier):
    """Something happens to one rank, in `training_step` of a batch."""

    def __init__(self, folder: Path, kind: str, rank: int, batch: int = 3) -> None:
        super().__init__()
        self.folder, self.kind, self.faulty_rank, self.faulty_batch = folder, kind, rank, batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.faulty_batch and self.trainer.global_rank == self.faulty_rank:
            (self.folder / "fault").touch()
            happen(self.kind)
        return super().training_step(batch, batch_idx)


def happen(kind: str) -> None:
    if kind == "exception":
        raise ZeroDivisionError("in training_step")
    if kind == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, kind))
    if kind == "SIGTERM to launcher and rank":  # as schedulers signal all processes of a job
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(1)  # until the launcher has passed it on
    if kind == "SIGTERM to launcher twice":  # as a person does whose run does not end
        kill = f"kill -TERM {os.getppid()}"
        subprocess.Popen(["sh", "-c", f"{kill}; sleep 6; {kill}"], start_new_session=True)
        while True:
            threading.Event().wait()


def fit(rank: int, world: int, folder: Path, model: Any, callbacks: list[Callback], **options: Any) -> Any:
    settings: dict[str, Any] = {"enable_checkpointing": bool(callbacks), "max_epochs": 1, **options}
    trainer = make_trainer(folder, world, callbacks=callbacks, **settings)
    trainer.fit(model, loader(4, 4 * 8 * world, rank, world))
    return trainer
