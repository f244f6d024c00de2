"""One of two ranks on GPUs fails: communicators are aborted, and all end soon, where collectives alone would wait for their timeout."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.benchmark.faults import FAULTS
from tests.helpers.distributed import needs_gpus
from tests.lightning.test_launch import ROOT, environment

SCRIPT = ROOT / "examples/benchmark/faults.py"

pytestmark = [
    pytest.mark.gpus2,
    needs_gpus(2),
    pytest.mark.timeout(600),
]


def run(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--strategies", "mfsdp", "--runs", "1", "--limit", "60", *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=550, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_faults_on_one_rank_end_or_restart_the_job(tmp_path: Path) -> None:
    """At a timeout of collectives of ten minutes, which ends nothing here."""
    with ThreadPoolExecutor() as jobs:  # each a job of its own, beside the others
        runs = jobs.map(lambda fault: run("--faults", fault, "--timeout", "600", "--keep", str(tmp_path)), FAULTS)
        found = {one["fault"]: one for ones in runs for one in ones}
    assert {kind for kind, one in found.items() if one["outcome"].startswith("still there")} == set(), found
    assert found["SIGKILL"]["outcome"] == "trains again from step 15", found
    for kind in ("out of memory", "out of memory after backward"):
        assert any(error.startswith("OutOfMemoryError") for error in found[kind]["errors"]), found
    # The other rank may be one batch ahead; all stop after the same.
    stopped = {"epoch=0-step=18.ckpt", "epoch=0-step=19.ckpt"} & set(found["SIGTERM"]["saved"])
    assert len(stopped) == 1, found
