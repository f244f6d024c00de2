"""The benchmark of mixtures of experts: every way of training gives the same losses, failures are rows, and floors are judged rightly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.benchmark import moe, moe_layer
from examples.benchmark.moe import parse_args, rows_of
from examples.benchmark.moe_report import floors, short, write_report
from examples.benchmark.moe_rows import SIZES, Row
from examples.benchmark.moe_step import ENGINES, WAYS, buffers, measure_experts, measure_sharded
from tests.helpers.distributed import run_distributed

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"size": "tiny", "device": "cpu", "steps": 2, "warmup": 5}


class Replayed:
    """Stands for a step in a graph, where there is none."""

    is_captured, failure, pool_bytes = True, "", 0

    def __init__(self, step: Callable[[Tensor], Tensor], *_: Any, warmup: int) -> None:
        self.step = step

    def __call__(self, ids: Tensor) -> Tensor:
        return self.step(ids)


def all_rows(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    found = []
    for capacity, ways in ((4.0, WAYS), (1.5, WAYS[:2])):
        for name in ways:
            trace = f"{folder}/pages.json" if name == "stash" else ""
            row = Row(kind="experts", name=name, capacity=capacity, graph=name != "stash keep", trace=trace, **TINY)
            results = measure_experts(row, CPU, capture=Replayed)
            found += [{"kind": row.kind, "name": name, "capacity": capacity, **one} for one in results]
    for name in ENGINES:
        if not name.endswith("-symm"):
            row = Row(kind="sharded", name=name, **TINY)
            found.append(
                {"kind": row.kind, "name": name, "capacity": 0.0, "size": row.size, **measure_sharded(row, CPU)}
            )
    return found


@pytest.mark.nightly
def test_all_ways_and_engines_train_alike_and_are_reported(tmp_path: Path) -> None:
    results, others = run_distributed(all_rows, 2, str(tmp_path))
    assert [one["losses"] for one in results] == [one["losses"] for one in others]
    for capacity, recorded in ((1.5, False), (1.5, True), (4.0, False), (4.0, True)):
        rows = [one for one in results if (one["capacity"], one.get("recorded")) == (capacity, recorded)]
        assert len(rows) == (2 if capacity == 1.5 else len(WAYS) - recorded)
        for one in rows:
            assert one["losses"] == rows[0]["losses"], one["name"]
            assert not one["over_budget"]
            # 32 tokens with 2 choices; one more row, then up to a multiple of 16.
            assert one["capacity_rows"] == (112 if capacity == 1.5 else 272)
            if "stash" in one["name"]:
                assert one["stash"]["overflowed"] == one["growths"] == 0
                assert 0.5 < one["stash"]["live_share"] * capacity < 1.5
    spilled = [one["stash"]["spilled"] for one in results if one["name"] == "stash with host"]
    assert all(count > 0 for count in spilled)
    sharded = [one["losses"] for one in results if one["kind"] == "sharded"]
    assert sharded[0] == pytest.approx(sharded[1], abs=2e-4) == sharded[2]
    assert sharded[0] == pytest.approx(results[0]["losses"], abs=2e-4), "dividing experts changes nothing"

    write_report(results, ["layer eager: out of memory"], "two processes", tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 1.5 | stash, CUDA graph |" in text
    assert "| tiny | fsdp2 |" in text
    assert "- layer eager: out of memory" in text
    assert (tmp_path / "pages.png").read_bytes()[:4] == b"\x89PNG"
    assert all(one["name"] in short(one) for one in results)


@pytest.mark.nightly
def test_implementations_of_a_layer_compute_the_same() -> None:
    for tokens, index in ((1, 0), (32, 1)):
        found = {
            name: list(moe_layer.measure(Row(kind="layer", name=name, **TINY), CPU))[index]
            for name in moe_layer.IMPLEMENTATIONS
        }
        expected = found[moe_layer.OURS]["mean_square"]
        assert expected > 0
        for one in found.values():
            assert one["tokens"] == tokens
            assert one["mean_square"] == pytest.approx(expected, rel=1e-4)
            assert one["tokens_per_s"] > 0 < one["saved_gib"]


def test_buffers_are_as_long_as_asked_for_on_any_number_of_ranks() -> None:
    assert buffers(0, 4, 8) == (None, 0)
    assert buffers(1.5, 4, 8) == (1.5, 0)
    assert buffers(4, 4, 8) == (4, 0)
    assert buffers(4, 2, 8) == (2, 8)
    assert buffers(1.5, 1, 8) == (None, 4)


def test_sizes_are_what_they_are_called() -> None:
    big = SIZES["8b"]
    assert (big.experts, big.top_k) == (64, 8)
    assert big.parameters == pytest.approx(7.7e9, rel=0.01)
    assert big.active == pytest.approx(1.3e9, rel=0.04)


def test_rows_that_matter_most_come_first(tmp_path: Path) -> None:
    rows = [str(row) for row in rows_of(parse_args([f"--out={tmp_path}", "--capacity", "2", "4"]))]
    assert rows[: len(WAYS)] == [f"experts x2 {name}" for name in WAYS]
    assert rows[len(WAYS)] == "sharded mfsdp"
    assert rows[-1] == "experts x4 recompute"
    graphs = {row.name: row.graph for row in rows_of(parse_args([]))}
    assert graphs["ordinary"]
    assert not graphs["stash keep"]
    on_cpu = rows_of(parse_args(["--device=cpu", "--rows", "sharded", "layer"]))
    assert not any(row.graph or row.name.endswith("-symm") for row in on_cpu)


WORKER = """
import json, os, sys, threading
row = json.loads(sys.argv[1])
print("RESULT " + json.dumps({"name": row["name"], "rank": os.environ["RANK"]}), flush=True)
if row["name"] == "slow" or os.environ["RANK"] == "0" and row["name"] == "wrong":
    threading.Event().wait()  # until it is stopped
if row["name"] == "wrong":
    raise MemoryError("it is full")
"""


def test_a_row_that_fails_or_takes_too_long_says_so_and_keeps_what_it_found(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(moe, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(moe, "GRACE_S", 0.1)
    limits = {"good": 60.0, "wrong": 60.0, "slow": 3.0}
    log = tmp_path / "failures.log"
    found = {name: moe.launch(Row(kind="layer", name=name, **TINY), 2, limit, log) for name, limit in limits.items()}
    assert all(results == [{"name": name, "rank": "0"}] for name, (results, _) in found.items())
    assert [problem for _, problem in found.values()] == [
        "",
        "rank 1 ended with 1: MemoryError: it is full",
        "took more than 3 s",
    ]
    assert "Traceback" in log.read_text()
    assert log.read_text().count("it is full") == 2, "in the line that raised, and at the end"


@pytest.mark.nightly
def test_a_row_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    row = Row(kind="layer", name=moe_layer.OURS, **TINY)
    results, problem = moe.launch(row, 1, 100.0, tmp_path / "failures.log")
    assert [(one["name"], one["tokens"], one["world"]) for one in results] == [(row.name, 1, 1), (row.name, 32, 1)]
    assert not problem


def step(name: str, ms: float, *, held: float = 0.0, recorded: bool = False, **more: Any) -> dict[str, Any]:
    known = {"kind": "experts", "capacity": 2.0, "name": name, "recorded": recorded, "step_ms": ms, "held_gib": held}
    return {**known, **more}


def test_floors_are_judged() -> None:
    counted = {"ordinary_bytes": 8 * 2**30, "live_share": 0.5, "page_bytes": 4 * 2**30}
    results = [
        step("ordinary", 100.0, held=10.0, host_syncs=0),
        step("stash", 102.0, held=2.5, stash=counted, host_syncs=1),
        step("ordinary", 90.0, recorded=True),
        step("stash", 95.0, recorded=True),
        {"kind": "sharded", "capacity": 0.0, "name": "mfsdp", "step_ms": 100.0},
        {"kind": "sharded", "capacity": 0.0, "name": "fsdp2", "step_ms": 111.0},
        {"kind": "sharded", "capacity": 0.0, "name": "fsdp2-tuned", "step_ms": 109.0},
    ]
    judged = {floor.what: (floor.found, floor.reached) for floor in floors(results)}
    assert list(judged.values()) == [
        ("1.020 (stash 102.0 ms, ordinary 100.0 ms)", True),
        ("88%", True),  # 3.5 of 4 GiB
        ("ordinary 0, stash 1", False),
        ("1.056 (stash 95.0 ms, ordinary 90.0 ms)", False),
        ("1.090 (fsdp2-tuned 109.0 ms, mfsdp 100.0 ms)", False),
    ]
    missing = floors([step("stash", 1.0)])
    assert [floor.reached for floor in missing] == [None] * 4
