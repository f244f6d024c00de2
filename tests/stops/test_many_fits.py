"""Many fits in one process: what the first ones needed of groups, threads and descriptors serves the later ones."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.base.kept_groups import kept
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, loader, make_trainer, seeded, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"async_save": True},
    {"state_dict_type": "full"},
    {"outer_size": 2},
    {"outer_sharding": "optim", "sharding": "optim_grads"},
)


def held() -> dict[str, int]:
    gc.collect()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def fits(rank: int, world: int, folder: str, rounds: int) -> list[dict[str, int]]:
    """What is held after each round; a round fits and saves once in every way."""
    strict_warnings()
    seen = []
    for _ in range(rounds):
        for number, kind in enumerate(KINDS):
            trainer = make_trainer(folder, world, strategy=MFSDPStrategy(units=["Block"], **kind), max_steps=1)
            trainer.fit(seeded(), loader(4, 8))
            trainer.save_checkpoint(f"{folder}/{number}.ckpt")
            trainer.strategy.teardown()
        dist.barrier()
        seen.append(held())
    return seen


def test_fits_that_save_share_what_they_need(tmp_path: Path) -> None:
    for seen in run_distributed(fits, 2, str(tmp_path), 3):
        assert seen[-1] == seen[1], "later fits held more than earlier ones"


def fits_in_new_groups(rank: int, world: int, folder: str, rounds: int) -> list[int]:
    """How many descriptors there are after each round, which fits in a process group of its own."""
    strict_warnings()
    seen, of_earlier = [], list[threading.Thread]()
    for number in range(rounds):
        if number:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=world)
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(units=["Block"]), max_steps=1)
        trainer.fit(seeded(), loader(4, 8))
        trainer.strategy.teardown()
        for thread in of_earlier:
            thread.join(10)
            assert not thread.is_alive(), thread.name
        of_earlier = [thread for thread in threading.enumerate() if thread.name == "mfsdp-peers"]
        assert len(of_earlier) == 1
        dist.barrier()
        seen.append(held()["descriptors"])
    return seen


def test_connections_end_when_another_process_group_is_made(tmp_path: Path) -> None:
    for seen in run_distributed(fits_in_new_groups, 2, str(tmp_path), 4):
        assert seen[-1] == seen[1], "later fits held more than earlier ones"


@pytest.mark.nightly
def test_two_hundred_fits_in_one_process_hold_what_ten_do(tmp_path: Path) -> None:
    for seen in run_distributed(fits, 2, str(tmp_path), 40):
        assert seen[-1] == seen[1]


def begin_anew(rank: int, world: int, folder: str) -> list[bool]:
    """What was kept is forgotten with the process group it was made in."""
    first = kept("here", object)
    again = kept("here", object)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)
    return [first is again, kept("here", object) is first]


def test_groups_of_a_destroyed_process_group_are_not_used_again(tmp_path: Path) -> None:
    assert run_distributed(begin_anew, 1, str(tmp_path)) == [[True, False]]
