"""torchrun starts a job again after a fault on one rank, and it goes on from its newest checkpoint without reading anything twice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.test_launch import ROOT, environment
from tests.stops.torchrun_script import BATCHES, FAULT_AT

SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def run(folder: Path, kind: str, rank: int, *options: str) -> tuple[int, list[list[dict[str, Any]]], str]:
    command = [*TORCHRUN, *(options or ("--standalone",)), str(SCRIPT), str(folder), kind, str(rank)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, cwd=ROOT)
    events = [[json.loads(line) for line in (folder / f"events-{rank}").read_text().splitlines()] for rank in range(2)]
    return done.returncode, events, done.stdout[-3000:] + done.stderr[-30000:]


def batches_of(events: list[dict[str, Any]], start: int) -> list[int]:
    return [event["batch"] for event in events if event["what"] == "step" and event["start"] == start]


@pytest.mark.parametrize(("kind", "rank"), [("SIGKILL", 0), ("SIGKILL", 1), ("exception", 1)])
def test_a_job_is_started_again_and_goes_on_from_its_newest_checkpoint(kind: str, rank: int, tmp_path: Path) -> None:
    code, events, output = run(tmp_path, kind, rank)
    assert code == 0, output
    fault = next(event["time"] for event in events[rank] if event["what"] == "fault")
    ready = max(event["time"] for own in events for event in own if event["what"] == "ready" and event["start"] == 1)
    for own in events:
        assert batches_of(own, 0) == list(range(FAULT_AT)), output
        assert batches_of(own, 1) == list(range(5, BATCHES)), "saved after 5 batches"
        assert own[-1]["what"] == "done"
        rows = [event["rows"] for event in own if event["what"] == "step"]
        assert rows[5:FAULT_AT] == rows[FAULT_AT : FAULT_AT + FAULT_AT - 5], "the same samples again after the save"
    print(f"{kind} on rank {rank}: started again after {ready - fault:.1f} s, imports included")


def test_a_job_with_the_static_rendezvous_is_started_again(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, events, output = run(tmp_path, "SIGKILL", 1, "--master-addr=127.0.0.1", f"--master-port={port}")
    assert code == 0, output
    assert all(own[-1]["what"] == "done" for own in events)


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGTERM to launcher and rank"])
def test_sigterm_on_one_rank_saves_on_all_and_ends_the_job(kind: str, tmp_path: Path) -> None:
    """Also where torchrun gets it, too, and passes it on: what comes in one moment is one request."""
    _, events, output = run(tmp_path, kind, 1)
    for own in events:
        assert own[-1]["what"] == "error", output
        assert own[-1]["error"].startswith("SIGTERMException")
        assert batches_of(own, 0) == list(range(FAULT_AT + 1)), "the step in which it came is the last"
    assert list(tmp_path.glob(f"*step={FAULT_AT + 1}.ckpt")), "saved after it"


def test_a_second_sigterm_to_torchrun_ends_a_step_that_never_does(tmp_path: Path) -> None:
    code, events, output = run(tmp_path, "SIGTERM to launcher twice", 1)
    assert code != 0
    assert all(own[-1]["what"] in ("step", "fault") for own in events), "no exception, and nothing saved"
    assert not list(tmp_path.glob(f"*step={FAULT_AT + 1}.ckpt"))
    assert "A further SIGTERM ends a process at once" in output, output
    assert "Stack (most recent call first)" in output or "Current thread" in output, output
    assert "Unable to shutdown process" not in output, "torchrun had to send no SIGKILL"
