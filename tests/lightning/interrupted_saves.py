"""Kills a process at every file operation of a save, and says what is left: `python interrupted_saves.py FOLDER sharded|full`.

A child process makes one save over an older checkpoint and sends itself SIGKILL at its n-th file operation; another child then loads.
n grows until a save gets through. Prints one line for each n: the operation, and what was loaded.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp import fully_shard, fully_shard_optimizer
from lightning_mfsdp.checkpoint.io import local
from tests.checkpoint.internals import (
    ParameterIndex,
    Ranks,
    full_model_state,
    full_optimizer_state,
    lightning_io,
    locate,
)

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.unlink", "os.truncate")
OLD, NEW = 1, 2
PART_NAME = local.part_of(Path("last.ckpt")).name


def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    fill(optimizer, value)
    return model, optimizer


def fill(optimizer: torch.optim.Optimizer, value: float) -> None:
    """All weights and all state; a rank may have none of some parameter."""
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.fill_(value)
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(value)


def save(path: Path | str, kind: str, value: int) -> None:
    model, optimizer = made(value)
    rest = {"global_step": value}
    content: lightning_io.FullContent | lightning_io.ShardedContent
    if kind == "full":
        states = [full_optimizer_state(optimizer, keep=True)]
        whole = {"state_dict": full_model_state(model.state_dict(), keep=True), "optimizer_states": states, **rest}
        content = lightning_io.FullContent(checkpoint=whole)
    else:
        index = ParameterIndex(model)
        states = [lightning_io.optimizer_state(index, optimizer)]
        parts = {"state_dict": model.state_dict(), "optimizer_states": states, **rest}
        content = lightning_io.ShardedContent.of(index, parts, Ranks())
    lightning_io.save(locate(path), content, ranks=Ranks())


def load(path: Path | str) -> str:
    """The one number that everything loaded shows; or what was raised."""
    model, optimizer = made(0)
    try:
        rest = lightning_io.load(locate(path), model, [optimizer], strict=True, weights_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    tensors = list(optimizer.param_groups[0]["params"]) + [s["momentum_buffer"] for s in optimizer.state.values()]
    found = {rest["global_step"]} | {float(number) for tensor in tensors for number in tensor.detach().flatten()}
    return "/".join(map(str, sorted(found)))


def kill_at(number: int, folder: str) -> None:
    """Send this process SIGKILL when it is about to do its `number`-th operation on a file in `folder`."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(folder):
            count += 1
            if count == number:
                print(f"{event} {Path(arguments[0]).name}", end=" ", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(work: Callable[[], Any]) -> bool:
    """Run in a fork with a process group of its own; whether it was killed."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        work()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return False


def main(folder: Path, kind: str) -> None:
    path = folder / "last.ckpt"
    number, killed = 0, True
    with tempfile.TemporaryDirectory() as before:
        in_child(lambda: save(Path(before, path.name), kind, OLD))
        while killed:
            number += 1
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(before, folder)
            killed = attempt(number, path, kind)


def attempt(number: int, path: Path, kind: str) -> bool:
    """Whether a save was killed at its `number`-th operation."""
    folder = path.parent

    def killed_save() -> None:
        kill_at(number, str(folder))
        save(path, kind, NEW)

    killed = in_child(killed_save)
    if (
        killed
        and PART_NAME in os.listdir(folder)
        and not (folder / PART_NAME / "meta.pt").exists()
        and kind == "sharded"
    ):
        in_child(lambda: print(f"[{load(folder / PART_NAME)}]", end=" "))
    in_child(lambda: print("loaded", load(path)))
    return killed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # that a save was interrupted would be told between the lines
    if sys.argv[3:] == ["two renames"]:
        local.exchange = lambda one, other: False
    main(Path(sys.argv[1]), sys.argv[2])
