"""Kills trainings at random moments: `python killed_training.py FOLDER KILLS SEED sync|async`.

Forks two ranks that save numbered states over and over, kills both some time after their first save, and lets two others load what is
left: the checkpoint, and what was written beside it, if it was killed in the middle. Prints one line of JSON for each: the last number
whose save had returned, the files, the numbers that were loaded, and what was said of what lay beside.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mfsdp.checkpoint.io import local
from tests.checkpoint.internals import BackgroundSaver, ParameterIndex, Ranks, Staging, lightning_io, locate
from tests.lightning.interrupted_saves import fill, made

WORLD = 2


class Children:
    """Ranks of one process group, and a pipe that they write numbers to."""

    def __init__(self, meeting: Path, work: Callable[[int], None]) -> None:
        self.pipe, write = os.pipe()
        self.processes = [self._fork(rank, meeting, write, work) for rank in range(WORLD)]
        os.close(write)

    def _fork(self, rank: int, meeting: Path, write: int, work: Callable[[int], None]) -> int:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
            work(write)
            os._exit(0)
        return child

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)

    def wait(self) -> list[int]:
        """Statuses, and that nothing is left of them."""
        return [os.waitpid(process, 0)[1] for process in self.processes]

    def said(self) -> list[Any]:
        """All that is in the pipe, once everybody who writes to it is gone."""
        with os.fdopen(self.pipe) as lines:
            return [json.loads(line) for line in lines]


def say(pipe: int, what: Any) -> None:
    os.write(pipe, f"{json.dumps(what)}\n".encode())


def train(pipe: int, path: Path, number: int, *, is_async: bool) -> None:
    model, optimizer = made(0)
    location, saver, staging = locate(path), BackgroundSaver(), Staging()
    ranks = Ranks.patient()
    while True:
        fill(optimizer, number)
        index = ParameterIndex(model)
        parts = {"state_dict": model.state_dict(), "global_step": number}
        parts["optimizer_states"] = [lightning_io.optimizer_state(index, optimizer)]
        content = lightning_io.ShardedContent.of(index, parts, Ranks())
        if is_async:
            if saver.is_saving:
                saver.wait()
                say(pipe, number - 1)
            staged = content.staged(staging)
            saver.start(lambda staged=staged: lightning_io.save(location, staged, ranks=ranks))
        else:
            lightning_io.save(location, content, ranks=Ranks())
            say(pipe, number)
        number += 1


def load(path: Path) -> list[Any]:
    """All numbers that were loaded, which should be one; or why nothing was."""
    model, optimizer = made(-1)
    try:
        rest = lightning_io.load(locate(path), model, [optimizer], strict=True, weights_only=True)
    except (RuntimeError, ValueError) as error:
        assert numbers_in(optimizer) == {-1.0}, "partly loaded"
        return [str(error)]
    return sorted(numbers_in(optimizer) | {float(rest["global_step"])})


def numbers_in(optimizer: torch.optim.Optimizer) -> set[float]:
    weights = optimizer.param_groups[0]["params"]
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    return {float(value) for part in (*weights, *moments) for value in part.detach().flatten()}


def load_what_is_left(pipe: int, path: Path) -> None:
    part = local.part_of(path)
    if part.exists():
        say(pipe, {"beside": load(part)})
    say(pipe, {"loaded": load(path)})


def main(folder: Path, kills: int, seed: int, *, is_async: bool) -> None:
    path, chance, first = folder / "last.ckpt", random.Random(seed), 1
    for attempt in range(kills):

        def work(pipe: int, first: int = first) -> None:
            train(pipe, path, first, is_async=is_async)

        training = Children(folder / f"meet-{attempt}", work)
        assert select.select([training.pipe], [], [], 60)[0], "the first save never ended"
        # Nobody ends by itself, so this waits for a random time: some saves long.
        select.select([], [], [], chance.uniform(0.0, 0.15))
        training.kill()
        assert training.wait() == [signal.SIGKILL] * WORLD
        finished = max(training.said())
        names = sorted(name for name in os.listdir(folder) if "ckpt" in name)
        loading = Children(folder / f"load-{attempt}", lambda pipe: load_what_is_left(pipe, path))
        assert loading.wait() == [0] * WORLD, "loading failed"
        found: dict[str, Any] = {"first": first, "finished": finished, "names": names, "beside": [], "loaded": []}
        for said in loading.said():
            for key, values in said.items():
                found[key] += [value for value in values if value not in found[key]]
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        first = int(finished) + 100


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), is_async=sys.argv[4] == "async")
