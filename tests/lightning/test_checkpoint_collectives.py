"""Sharded checkpoints describe rows where they lie: how often ranks send each other pickled objects does not depend on the model's size."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from lightning_mfsdp.base.tree import Tree
from lightning_mfsdp.callbacks import ShardedEMA
from tests.engine.test_collective_counts import Dispatched
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Block, Classifier, loader, make_trainer, seeded, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

WORLD = 3
STEPS = 2
DEPTHS = (2, 14)


def code_of(function: Any) -> CodeType:
    found: CodeType = inspect.unwrap(function).__code__
    return found


# Everything of torch.distributed that pickles, sends and unpickles; and what goes over connections of our own.
OBJECT_COLLECTIVES = {
    code_of(function): function.__name__
    for function in (
        dist.all_gather_object,
        dist.broadcast_object_list,
        dist.gather_object,
        dist.recv_object_list,
        dist.scatter_object_list,
        dist.send_object_list,
        Tree.bytes_to_first,
        Tree.bytes_from_first,
        Tree.bytes_for_each,
    )
}
# Through these two goes each object they send or receive.
PICKLING = {code_of(getattr(dist.distributed_c10d, name)) for name in ("_object_to_tensor", "_tensor_to_object")}

# Who sends objects, and what for. What a rank has written names tensors, in one object for each rank.
PURPOSES = {
    "saving": {
        "communication.broadcast": "rank 0's path",
        "rank_states.shared_rank_states": "how long every rank's random and loader states are, and so where each writes them",
        "state_dict.rows_by_name": "names of values whose rows nobody knows, which all ranks refuse together",
        "full_state.with_whole_tensors": "which sharded tensors hooks have put beside the states, since all ranks gather these",
        "lightning_io.packed": "whether rank 0 could pickle what goes into meta.pt",
        "location.saving": "whether rank 0 could make room, and put the new checkpoint in place",
        "shared_folder.see_on_all": "whether every rank sees where it will write",
        "saving.save_together": "who writes what several have, and where all was written; whether rank 0 could write the table of that",
        "lightning_io.write": "whether meta.pt was written",
    },
    "loading": {
        "checkpointing.load_checkpoint": "the path, which all ranks must have been given",
        "location.finish_interrupted_save": "whether rank 0 had to finish an exchange that was interrupted",
        "directory.open": "the table of contents, and what is wrong with the files, as every host sees them",
        "lightning_io.open": "whether any rank could not read meta.pt",
        "lightning_io._agree": "that on_load_checkpoint has left the same entries on all ranks",
        "state_dict.rows_by_name": "as above, of the model that is loaded into",
        "lightning_io._check": "whether an optimizer does not fit on any rank, before weights are read",
        "lightning_io.load_optimizers": "the same when its state is read",
        "on_disk.run": "whether any rank has something to read",
        "directory.fetched": "where the parts of tensors lie that each rank reads",
        "directory._read": "whether all ranks know what to read of the model, then of optimizers, and whether all was read",
    },
}


class Watched:
    """What was called meanwhile: object collectives by name, by who asked for them; and all collectives."""

    def __init__(self) -> None:
        self.objects: Counter[tuple[str, str]] = Counter()
        self.all: Counter[str] = Counter()

    def look(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code in OBJECT_COLLECTIVES:
            self.objects[asker(frame), OBJECT_COLLECTIVES[frame.f_code]] += 1
        elif frame.f_code in PICKLING:
            assert any(above.f_code in OBJECT_COLLECTIVES for above in frames_from(frame)), "pickled in another way"


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def asker(frame: FrameType) -> str:
    """The function of this package that wanted it, seen through the helpers that all use."""
    for above in frames_from(frame):
        file = above.f_code.co_filename
        if "/lightning_mfsdp/" in file and not file.endswith(("/io/ranks.py", "/tree.py", "contextlib.py")):
            return f"{Path(file).stem}.{above.f_code.co_name}"
    return "somebody else"


@contextmanager
def watching() -> Iterator[Watched]:
    watched = Watched()
    sys.setprofile(watched.look)
    try:
        with Dispatched() as dispatched:
            yield watched
    finally:
        sys.setprofile(None)
    watched.all = dispatched.calls


class Deep(Classifier):
    """As many blocks as wanted; their 12 rows and the head's 5 do not divide evenly among ranks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))


class Loading(MFSDPStrategy):
    """Watches how it loads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watched = Watched()

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        with self.watching():
            return super().load_checkpoint(*args, **options)

    def load_model_state_dict(self, *args: Any, **options: Any) -> None:
        with self.watching():
            super().load_model_state_dict(*args, **options)

    def load_optimizer_state_dict(self, *args: Any) -> None:
        with self.watching():
            super().load_optimizer_state_dict(*args)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with watching() as watched:
            yield
        self.watched.objects += watched.objects
        self.watched.all += watched.all


def save_and_load(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """For each depth: what a save and a load in the Trainer called. The second save is watched: the first makes a process group."""
    strict_warnings()
    found = []
    for depth in DEPTHS:
        path = f"{folder}/{depth}.ckpt"
        model, data = seeded(Deep, depth=depth), loader(2, 4 * world, rank, world)
        trainer = make_trainer(
            folder, world, max_steps=STEPS, strategy=MFSDPStrategy(units=["Block"]), callbacks=[ShardedEMA()]
        )
        trainer.fit(model, data)
        trainer.save_checkpoint(f"{folder}/first.ckpt")
        with watching() as saving:
            trainer.save_checkpoint(path)
        strategy = Loading(units=["Block"])
        resumed = make_trainer(folder, world, max_steps=STEPS + 1, strategy=strategy, callbacks=[ShardedEMA()])
        resumed.fit(seeded(Deep, depth=depth), data, ckpt_path=path)
        shares = {view.name: len(view.rows) for view in sharded_parameters(model)}
        found.append({"saving": saving, "loading": strategy.watched, "shares": shares})
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_distributed(save_and_load, WORLD, str(tmp_path_factory.mktemp("counts")))


def test_rows_lie_unevenly_and_some_ranks_have_none(ran: list[list[dict[str, Any]]]) -> None:
    """Else nothing would need to be described."""
    for small, large in ran:
        assert len(large["shares"]) > 4 * len(small["shares"])
    assert len({found[0]["shares"]["blocks.0.linear.weight"] for found in ran}) == WORLD
    assert any(0 in found[0]["shares"].values() for found in ran)


@pytest.mark.parametrize("doing", PURPOSES)
def test_no_object_is_sent_for_a_tensor(ran: list[list[dict[str, Any]]], doing: str) -> None:
    for small, large in ran:
        assert small[doing].objects == large[doing].objects
        assert small[doing].all == large[doing].all, "nor are tensors sent"
        assert small[doing].objects == ran[0][0][doing].objects, "the same on all ranks"


@pytest.mark.parametrize("doing", PURPOSES)
def test_every_object_that_is_sent_has_a_purpose(ran: list[list[dict[str, Any]]], doing: str) -> None:
    assert {who for who, _ in ran[0][0][doing].objects} == set(PURPOSES[doing])
