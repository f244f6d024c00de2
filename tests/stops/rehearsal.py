"""What many ranks exchange at start, in a save and in a load, with no training: `python -m tests.stops.rehearsal ENDPOINTS [PROCESSES]`.

Endpoints are threads of some processes; the store, its connections and those between endpoints are real. Each endpoint does what its rank
would: meets, connects to the two trees of ranks, agrees, saves, and loads. The first has a process of its own. Rows are tiny tensors, of
which nothing is written or read; the table of contents is. The channel of failures is rehearsed by `channel.py`, which this starts.
Prints a JSON object: seconds of each phase, from when all have ended the one before until all have ended it, and of processors.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.tree import Tree
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.ranks import Ranks, same_on_all
from lightning_mfsdp.checkpoint.io.read import CountingLoadPlanner
from lightning_mfsdp.checkpoint.io.saving import save_together
from lightning_mfsdp.checkpoint.io.write import CountingSavePlanner, Writer, item_bytes
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.rank_states import RANK_BYTES, RANK_STATES, shared_rank_states
from lightning_mfsdp.engine.internals import Piece
from lightning_mfsdp.launch.meeting import meet

UNITS = 32
PARAMETERS = 4  # of a unit
STATES = ("exp_avg", "exp_avg_sq")
_LIMIT_S = 900
# Threads of one process would each have memory of their own set aside; and the store's clients look up names, of which the server may drop
# requests.
SETTINGS = {"MALLOC_ARENA_MAX": "1", "RES_OPTIONS": "timeout:1 attempts:1"}


class Planned:
    """A planner that is given the plan."""

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan

    def set_up_planner(self, *_: object) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def finish_plan(self, plan: SavePlan) -> SavePlan:
        return plan


class PlannedWriter(Writer):
    """Writes the table of contents and nothing else."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results, at = [], 0
        for item in plan.items:
            size = item_bytes(item)
            place = compat.storage_info(f"{plan.storage_data.prefix}0.distcp", at, size)
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=place))
            at += size
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def rows_of(rank: int, world_size: int) -> dict[str, DcpShard]:
    """Rows of a model's parameters that a rank has, of those of which it has some: each unit is divided among ranks by its rows."""
    shards: dict[str, DcpShard] = {}
    own = range(rank * PARAMETERS, (rank + 1) * PARAMETERS)
    for number in range(
        PARAMETERS
    ):  # a parameter has as many rows as there are ranks, a rank as many of a unit as that has parameters
        start = number * world_size
        rows = range(max(own.start - start, 0), min(own.stop - start, world_size))
        if len(rows):
            local = torch.zeros(len(rows), 1)
            piece = Piece(shape=torch.Size([world_size, 1]), rows=rows)
            shards |= {f"layers.{unit}.weight{number}": DcpShard.of(local, piece) for unit in range(UNITS)}
    return shards


def state_of(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank saves: weights, and the state of Adam."""
    shards = rows_of(rank, world_size)
    state = {name: dict.fromkeys(STATES, shard) | {"step": torch.tensor(1.0)} for name, shard in shards.items()}
    names = [f"layers.{unit}.weight{number}" for unit in range(UNITS) for number in range(PARAMETERS)]
    return {"model": dict(shards), "optimizer_0": {"state": state, "param_groups": [{"lr": 0.1, "params": names}]}}


def plan_of(rank: int, world_size: int) -> SavePlan:
    """The same plan that PyTorch makes of `state_of`, in a fraction of the time, which all ranks have at once and endpoints one by one."""
    plan = SavePlan([], planner_data={})
    scalar = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size([]), torch.Size([])), properties=TensorProperties(), size=torch.Size([])
    )
    for name, shard in rows_of(rank, world_size).items():
        add_to_plan(plan, ("model", name), shard)
        for key in STATES:
            add_to_plan(plan, ("optimizer_0", "state", name, key), shard)
        step = f"optimizer_0.state.{name}.step"
        plan.planner_data[step] = ("optimizer_0", "state", name, "step")
        plan.items.append(WriteItem(index=MetadataIndex(step), type=WriteItemType.TENSOR, tensor_data=scalar))
    return plan


def add_to_plan(plan: SavePlan, path: tuple[str, ...], shard: DcpShard) -> None:
    """Have a plan write a rank's rows of a tensor."""
    name = ".".join(path)
    plan.planner_data[name] = path
    size = torch.Size(shard.size())
    for chunk in shard.__create_chunk_list__():
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=size)
        plan.items.append(
            WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
        )


def planning_s(world_size: int) -> float:
    """What PyTorch's planners need of one rank's time, for a save and for a load of the whole. Nothing here grows with the world."""
    with tempfile.TemporaryDirectory() as folder:
        alone, state = Ranks.alone(), state_of(0, 1)
        save_together(state, PlannedWriter(folder, overwrite=False), CountingSavePlanner(None), alone)
        directory, _ = Directory.look_over(LocalLocation(Path(folder)), weights_only=None)
        assert directory is not None
        began = time.monotonic()
        planner = CountingSavePlanner(None)
        planner.set_up_planner(state_of(0, world_size))
        planner.create_local_plan()
        reader, targets = directory.location.reader(), targets_of(0, 1)
        directory.plan(targets, directory.fetched(targets, alone), reader, CountingLoadPlanner(reader))
        return time.monotonic() - began


def targets_of(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank reads."""
    targets: dict[str, Any] = {}
    for name, shard in rows_of(rank, world_size).items():
        targets |= {f"model.{name}": shard} | {f"optimizer_0.state.{name}.{key}": shard for key in STATES}
    return targets


class Endpoint:
    """One rank."""

    def __init__(self, rank: int, world_size: int, port: int, folder: str) -> None:
        self.rank, self.size, self.port, self.folder = rank, world_size, port, folder
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}  # of its process, in which others run meanwhile
        self.others: dict[str, Any] = {}

    def run(self) -> None:
        began, cpu_began = time.monotonic(), time.process_time()
        wait = timedelta(seconds=_LIMIT_S)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=wait, wait_for_workers=False)
        own_store = meet(store, self.rank, self.size, wait)
        met = time.monotonic()
        first = Tree.connected(own_store, "ranks", self.rank, self.size, limit_s=_LIMIT_S, meeting_s=_LIMIT_S)
        second = first.another(limit_s=_LIMIT_S, meeting_s=_LIMIT_S)
        second.decide(None, len)  # all are connected
        self.seconds |= {"meet": met - began, "connect": time.monotonic() - met}
        self.cpu_seconds["start"] = time.process_time() - cpu_began
        self.ranks = Ranks(tree=first)
        # What each rank does by itself is no part of the phases: all do it at the same time, and here one after the other.
        self.targets = targets_of(self.rank, self.size)
        self.plan = plan_of(self.rank, self.size)
        for name in ("agree", "save", "load"):
            self.timed(name, getattr(self, name))

    def timed(self, name: str, action: Callable[[], None]) -> None:
        self.ranks.decide(None, len)
        began, cpu_began = time.monotonic(), time.process_time()
        action()
        self.ranks.decide(None, len)
        self.seconds[name] = time.monotonic() - began
        self.cpu_seconds[name] = time.process_time() - cpu_began

    def agree(self) -> None:
        same_on_all("ckpt_path", "last.ckpt", self.ranks)

    def save(self) -> None:
        own = {
            "data_rank": self.rank,
            "data_size": self.size,
            "gradients": {},
            "random": torch.zeros(5056, dtype=torch.uint8),
        }
        rank_states, _ = shared_rank_states(own, self.ranks)
        add_to_plan(self.plan, (RANK_STATES, RANK_BYTES), rank_states[RANK_BYTES])
        planner: Any = Planned(self.plan)
        table = save_together({}, PlannedWriter(self.folder, overwrite=False), planner, self.ranks)
        if table is not None:
            self.others["chunks"] = len(table.storage_data)
            self.others["table_mib"] = round(Path(self.folder, ".metadata").stat().st_size / 2**20, 1)
            for file in {place.relative_path for place in table.storage_data.values()}:
                with Path(self.folder, file).open("wb") as written:
                    written.truncate(1 << 20)

    def load(self) -> None:
        directory = Directory.open(LocalLocation(Path(self.folder)), self.ranks, weights_only=None)
        targets = self.targets
        part = directory.table.part(targets, directory.fetched(targets, self.ranks))
        sizes = [chunk.sizes.numel() for entry in part.state_dict_metadata.values() for chunk in entry.chunks]
        assert sum(sizes) == sum(shard.local.numel() for shard in targets.values())


def serve(ranks: range, world_size: int, port: int, folder: str, results: Any) -> None:
    """The endpoints of a process."""
    torch.set_num_threads(1)
    gc.disable()  # the garbage of one endpoint is no work of another
    threading.stack_size(1 << 20)
    sys.setswitchinterval(0.05)  # of many threads that wait, each asks for the interpreter so often
    endpoints = [Endpoint(rank, world_size, port, folder) for rank in ranks]
    failures: list[str] = []

    def run(endpoint: Endpoint) -> None:
        try:
            endpoint.run()
        except BaseException:
            failures.append(f"rank {endpoint.rank}: {traceback.format_exc()}")

    before = peak_mib()
    threads = [threading.Thread(target=run, args=(endpoint,), daemon=True) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
    first = endpoints[0]
    results.put((ranks.start, first.seconds, first.cpu_seconds, first.others, peak_mib() - before, failures[:2]))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(world_size: int, num_processes: int) -> dict[str, Any]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bounds = [0, 1, *(1 + (world_size - 1) * number // num_processes for number in range(1, num_processes + 1))]
    parts = [part for part in map(range, bounds, bounds[1:]) if len(part)]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=serve, args=(part, world_size, store.port, folder, results)) for part in parts
        ]
        for process in processes:
            process.start()
        outcomes = sorted(results.get() for _ in processes)
        for process in processes:
            process.join()
    failures = [text for *_, texts in outcomes for text in texts]
    if failures:
        raise RuntimeError("\n".join(failures[:4]))
    _, seconds, _, others, first_mib, _ = outcomes[0]
    cpu_seconds = [outcome[2] for outcome in outcomes]
    return {
        "endpoints": world_size,
        **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
        **{f"{name}_cpu_s": round(sum(part[name] for part in cpu_seconds), 3) for name in cpu_seconds[0]},
        **others,
        "plan_of_a_rank_s": round(planning_s(world_size), 3),
        "first_rank_mib": round(first_mib),
        "all_ranks_mib": round(sum(outcome[4] for outcome in outcomes)),
    }


def main() -> None:
    settings = {**SETTINGS, "PYTHONPATH": os.pathsep.join(sys.path)}
    if SETTINGS.items() - os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.stops.rehearsal", *sys.argv[1:]], {**os.environ, **settings}
        )
    logging.disable(logging.WARNING)
    world_size = int(sys.argv[1])
    rows = measure(world_size, int(sys.argv[2]) if len(sys.argv) > 2 else 2)
    channel = [sys.executable, "-S", str(Path(__file__).with_name("channel.py")), str(world_size)]
    done = subprocess.run(channel, capture_output=True, text=True, check=True)
    rows["channel"] = json.loads(done.stdout)
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
