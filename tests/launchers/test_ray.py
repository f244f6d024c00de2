"""`lightning_mfsdp.ray` with a real Ray: workers on two nodes, one is killed, and then the run goes on with fewer.

Ray is no package of the tests, because of its size; `.ci/launchers` runs this file with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.events import check, starts_in
from tests.lightning.test_launch import ROOT, environment

SCRIPT = Path(__file__).with_name("ray_script.py")

pytestmark = pytest.mark.timeout(2000)


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    variables = environment(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of four steps on two nodes, with a fault in the second; then another program, on one node, until the end of the third."""
    pytest.importorskip("ray")
    path = tmp_path_factory.mktemp("ray")
    first = run(path, "--cpus", "2", "1", "--workers", "3", "--epochs", "2", "--kill", "6")
    assert first["metrics"]["step"] == 8
    run(path, "--cpus", "1", "--workers", "1", "--epochs", "3", "--every", "7", "--async-save")
    return path


def test_a_run_whose_worker_is_killed_and_then_has_fewer_reads_each_sample_once(folder: Path) -> None:
    print(check(folder, 3, "killed", 3, "stopped", 1))
    assert [start.first_step for start in starts_in(folder)] == [0, 4, 8]


def test_nodes_may_have_different_numbers_of_workers(folder: Path) -> None:
    assert [start.nodes for start in starts_in(folder)] == [[2, 1], [2, 1], [1]]


def test_all_ranks_get_the_checkpoint_that_was_reported_last(folder: Path) -> None:
    storage = folder / "storage" / "run"
    in_order = [
        "None",
        f"{storage}/checkpoint_step=4_*/checkpoint.ckpt",
        f"{storage}/checkpoint_step=8_*/checkpoint.ckpt",
    ]
    paths = [(folder / f"checkpoints-{rank}").read_text().splitlines() for rank in range(3)]
    assert [re.sub(r"_[0-9a-f]{8}/", "_*/", path) for path in paths[0]] == in_order
    assert paths[1:] == [paths[0][:2]] * 2


def test_checkpoints_lie_in_the_storage_whole_and_ray_keeps_two(folder: Path) -> None:
    storage, result = folder / "storage" / "run", json.loads((folder / "result.json").read_text())
    names = sorted(path.name for path in storage.iterdir() if path.is_dir())
    assert [name.rpartition("_")[0] for name in names] == ["checkpoint_step=14", "checkpoint_step=20"]
    assert sorted(result["kept"]) == [str(storage / name) for name in names]
    for name in names:
        assert [path.name for path in (storage / name).iterdir()] == ["checkpoint.ckpt"]
        files = {path.name for path in (storage / name / "checkpoint.ckpt").iterdir()}
        assert files == {".metadata", "meta.pt", "__0_0.distcp"}
    assert result["metrics"]["step"] == 20
    assert result["metrics"]["loss"] > 0
