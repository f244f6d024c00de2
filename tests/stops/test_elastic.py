"""A node is lost, and later comes back: torchrun starts the job again, and it makes the steps of an undisturbed run, sample by sample."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mfsdp import ElasticEnvironment, launched_nodes
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.lightning.models import make_trainer
from tests.lightning.test_launch import ROOT, environment, free_port, launch
from tests.stops.elastic_script import EPOCHS, GLOBAL, SIZE

SCRIPT = Path(__file__).with_name("elastic_script.py")
STEPS = EPOCHS * SIZE // GLOBAL
LOST_AT, BACK_AT = 5, 10  # steps that wait for it

pytestmark = pytest.mark.timeout(600)


class Agent:
    """torchrun on one node, with its processes in a group of their own."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.output = folder / f"output-{name}"
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--monitor-interval=0.5"]
        options += ["--rdzv-conf=join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder)],
                env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As if the node were gone: the agent, then what it has started, which has sessions of its own."""
        children = _descendants(self.process.pid)
        for process in (self.process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def _descendants(process: int) -> list[int]:
    children = [
        int(pid) for path in Path(f"/proc/{process}/task").glob("*/children") for pid in path.read_text().split()
    ]
    return [*children, *(below for child in children for below in _descendants(child))]


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("events-*") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda event: event["time"])


def wait_for(folder: Path, agents: list[Agent], what: Callable[[list[dict[str, Any]]], bool]) -> None:
    limit = time.monotonic() + 240
    while not what(events_of(folder)):
        outputs = "\n".join(agent.output.read_text()[-4000:] for agent in agents)
        assert time.monotonic() < limit, outputs
        assert agents[0].process.poll() is None, outputs
        time.sleep(0.1)


def samples(events: list[dict[str, Any]]) -> dict[int, list[list[float]]]:
    """By step, the samples of all ranks, each time that the step was made."""
    made: dict[int, list[list[float]]] = {}
    start = -1
    for event in events:
        if event["what"] == "from" and event["rank"] == 0:
            start += 1
        if event["what"] == "step":
            of_step = made.setdefault(event["step"], [])
            while len(of_step) <= start:
                of_step.append([])
            of_step[start].extend(event["samples"])
    return {step: [sorted(once) for once in every if once] for step, every in made.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, list[float]], dict[str, torch.Tensor]]:
    """Two processes that Lightning starts, which `latest_checkpoint` needs first."""
    folder = tmp_path_factory.mktemp("undisturbed")
    output = launch([sys.executable, str(SCRIPT), str(folder)], 240)
    events = events_of(folder)
    assert sorted(event["rank"] for event in events if event["what"] == "from") == [0, 1], output
    assert [event["step"] for event in events if event["what"] == "done"] == [STEPS, STEPS], output
    assert [event["world"] for event in events if event["what"] == "start"] == [2, 2]
    every = samples(events)
    assert all(len(made) == 1 and len(made[0]) == GLOBAL for made in every.values())
    return {step: made[0] for step, made in every.items()}, torch.load(folder / "end.pt")


@pytest.mark.nightly  # Lightning's launcher is on a push in tests/lightning/test_launch.py, "latest" in test_latest.py
def test_the_script_runs_undisturbed_with_lightnings_own_launcher(undisturbed: Any) -> None:
    assert sorted(undisturbed[0]) == list(range(STEPS))


def held_at(step: int, ranks: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda events: sum(event["what"] == "step" and event["step"] == step for event in events) == ranks


@pytest.mark.nightly
def test_a_node_is_lost_and_comes_back(undisturbed: Any, tmp_path: Path) -> None:
    port = free_port()
    for step in (LOST_AT, BACK_AT):
        (tmp_path / f"hold-{step}").touch()
    agents = [Agent(tmp_path, "first", port)]
    try:
        wait_for(tmp_path, agents, lambda _: listens(port))  # the first has the store
        agents.append(Agent(tmp_path, "second", port))
        wait_for(tmp_path, agents, held_at(LOST_AT, 2))
        agents[1].kill()
        (tmp_path / f"hold-{LOST_AT}").unlink()
        wait_for(tmp_path, agents, held_at(BACK_AT, 1))
        agents.append(Agent(tmp_path, "second again", port))
        for agent in (agents[0], agents[2]):
            assert agent.process.wait(240) == 0, agent.output.read_text()[-6000:]
    finally:
        for agent in agents:
            agent.kill()
    events, (expected, weights) = events_of(tmp_path), undisturbed
    assert [event["world"] for event in events if event["what"] == "start"] == [2, 2, 1, 2, 2]
    assert [event["nodes"] for event in events if event["what"] == "start"] == [2, 2, 1, 2, 2]
    assert [event["step"] for event in events if event["what"] == "start"] == [0, 0, 3, BACK_AT, BACK_AT]
    made = samples(events)
    assert {step: every[-1] for step, every in made.items()} == expected
    assert {step for step, every in made.items() if len(every) > 1} == {3, 4, LOST_AT, BACK_AT}
    for name, value in torch.load(tmp_path / "end.pt").items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)
    warned = [agent.output.read_text().count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") for agent in agents]
    assert warned == [0, 0, 0]


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_launcher_says_how_many_nodes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    assert launched_nodes() == 1
    with pytest.raises(RuntimeError, match="torchrun did not start this process"):
        ElasticEnvironment()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert launched_nodes() == 4
    monkeypatch.setenv("SLURM_NTASKS", "6")
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert launched_nodes() == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launched_nodes() == 2, "torchrun inside of SLURM"


def test_torchrun_says_how_many_nodes_the_trainer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": 3,
        "GROUP_WORLD_SIZE": 4,
    }
    for name, value in (started | {"TORCHELASTIC_RUN_ID": "run"}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # the Trainer sets its own
    trainer = make_trainer("", 1, plugins=[ElasticEnvironment()])
    assert (trainer.num_nodes, trainer.world_size, trainer.strategy.distributed_sampler_kwargs) == (
        4,
        4,
        {"num_replicas": 4, "rank": 3},
    )
    fabric = Fabric(accelerator="cpu", devices=1, strategy=MFSDPFabricStrategy(), plugins=[ElasticEnvironment()])
    assert fabric.strategy.num_nodes == 4
    with pytest.raises(ValueError, match=r"num_nodes=3 beside ElasticEnvironment, .* now 4"):
        make_trainer("", 1, plugins=[ElasticEnvironment()], num_nodes=3)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with pytest.warns(UserWarning, match="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"):
        ElasticEnvironment()
