"""What the file system refuses is named on every rank, and costs nothing: the model goes on, the older checkpoint stays."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_mfsdp import fully_shard, fully_shard_optimizer
from lightning_mfsdp.checkpoint.io.write import Writer
from tests.checkpoint.internals import (
    ParameterIndex,
    Ranks,
    full_model_state,
    full_optimizer_state,
    lightning_io,
    locate,
)
from tests.helpers.distributed import run_distributed

WIDTH = 256
NOBODY = 65534


def made(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = fully_shard(torch.nn.Linear(WIDTH, WIDTH, bias=False), sharding="optim_grads")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(value)
    return model, optimizer


def save(
    path: Path, kind: str, value: float, where: AbstractContextManager[object] | None = None, **extra: Any
) -> None:
    model, optimizer = made(value)  # steps agree through a file here, which `where` might not let them write
    parts: dict[str, Any] = {"global_step": int(value), **extra}
    content: lightning_io.FullContent | lightning_io.ShardedContent
    if kind == "full":
        keep = dist.get_rank() == 0
        states = [full_optimizer_state(optimizer, keep=keep)]
        state = full_model_state(model.state_dict(), keep=keep)
        content = lightning_io.FullContent(checkpoint={"state_dict": state, "optimizer_states": states, **parts})
    else:
        index = ParameterIndex(model)
        parts |= {
            "state_dict": model.state_dict(),
            "optimizer_states": [lightning_io.optimizer_state(index, optimizer)],
        }
        content = lightning_io.ShardedContent.of(index, parts, Ranks())
    with where or nullcontext():
        lightning_io.save(locate(path), content, ranks=Ranks())


def load(path: Path) -> tuple[float, float]:
    """The number in the weights, or what was raised, and the number in the model afterwards."""
    model, optimizer = made(-1.0)
    try:
        lightning_io.load(locate(path), model, [optimizer], strict=True, weights_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}", float(optimizer.param_groups[0]["params"][0].detach().mean())  # type: ignore[return-value]
    return 0.0, float(optimizer.param_groups[0]["params"][0].detach().mean())


@contextmanager
def full_disk(on: int) -> Iterator[None]:
    """Files of one rank cannot grow beyond 64 KiB: less than its rows take."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A directory that this process may only read; root may write anywhere, so it becomes somebody else."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder.chmod(0o555)
    dist.barrier()
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        dist.barrier()
        folder.chmod(0o755)


def raised(action: Callable[[], None]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def refusals(rank: int, world: int, folder: str) -> dict[str, Any]:
    os.chmod(folder, 0o755)
    found: dict[str, Any] = {}
    for kind in ("sharded", "full"):
        place = Path(folder, kind)
        if rank == 0:
            place.mkdir()
        dist.barrier()
        path = place / "one.ckpt"
        save(path, kind, 1.0)
        for on in [0, 1] if kind == "sharded" else [0]:
            with full_disk(on):
                found[f"{kind}, disk of rank {on} full"] = raised(lambda path=path, kind=kind: save(path, kind, 2.0))
        found[f"{kind}, left"] = sorted(os.listdir(place))
        found[f"{kind}, unpicklable"] = raised(lambda path=path, kind=kind: save(path, kind, 2.0, callback=lambda: 0))
        found[f"{kind}, read-only"] = raised(
            lambda place=place, kind=kind: save(place / "two.ckpt", kind, 2.0, read_only(place))
        )
        found[f"{kind}, loaded"] = load(path)
    dist.barrier()
    if rank == 0:
        os.truncate(Path(folder, "full", "one.ckpt"), 300_000)
        torch.save({"weights": torch.ones(3)}, Path(folder, "other.pt"))
    dist.barrier()
    found["truncated"] = load(Path(folder, "full", "one.ckpt"))
    found["other"] = load(Path(folder, "other.pt"))
    return found


def test_what_the_file_system_refuses_is_named_on_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    for found in run_distributed(refusals, 2, str(tmp_path)):
        for kind, ranks in (("sharded", (0, 1)), ("full", (0,))):
            for rank in ranks:
                message = found[f"{kind}, disk of rank {rank} full"]
                assert "one.ckpt failed, and an earlier checkpoint there is unchanged" in message, message
                assert f"rank {rank}" in message, message
                assert "OSError: [Errno 27] File too large" in message, message
            assert found[f"{kind}, left"] == ["one.ckpt"], "nothing is left of what failed"
            assert "lambda" in found[f"{kind}, unpicklable"], found[f"{kind}, unpicklable"]
            message = found[f"{kind}, read-only"]
            assert "preparing to save" in message, message
            assert "two.ckpt: rank 0 failed with PermissionError" in message, message
            assert found[f"{kind}, loaded"] == (0.0, 1.0)
        message, weights = found["truncated"]
        assert "one.ckpt cannot be read, so nothing was" in message, message
        assert weights == -1.0
        message, weights = found["other"]
        assert "other.pt is no Lightning checkpoint: it has no 'state_dict', only ['weights']" in message
        assert weights == -1.0


def in_many_files(rank: int, world: int, folder: str) -> tuple[list[str], tuple[float, float]]:
    """Files of at most 128 KiB, where a rank's rows are 256 KiB with their momentum."""
    path = Path(folder, "one.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "file_bytes", 2**17)
        save(path, "sharded", 3.0)
    return sorted(name for name in os.listdir(path) if name.endswith(".distcp")), load(path)


def test_host_memory_holds_one_file_at_a_time_and_files_have_a_largest_size(tmp_path: Path) -> None:
    for names, loaded in run_distributed(in_many_files, 2, str(tmp_path)):
        assert names == [f"__{rank}_{number}_0.distcp" for rank in range(2) for number in range(2)]
        assert loaded == (0.0, 3.0)
