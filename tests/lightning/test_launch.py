"""Scripts started the ways users start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked import Forked

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_script.py")

BY_LIGHTNING = [str(SCRIPT)]
BY_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]

# What launchers set and one test must not inherit.
LAUNCH_VARIABLES = (
    "LOCAL_RANK",
    "WORLD_SIZE",
    "RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
)


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCH_VARIABLES)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def launch(command: list[str], timeout_s: int = 100, **variables: str) -> str:
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch_together(
    command: list[str], variables: list[dict[str, str]], folder: Path, timeout_s: int = 60, code: int = 0
) -> list[str]:
    """A program in one forked process for each set of variables; what each printed. Once one fails, or time is up, all are killed."""
    outputs = [folder / f"output-{number}" for number in range(len(variables))]
    processes = [
        Forked(command, environment(**own), output, ROOT) for own, output in zip(variables, outputs, strict=True)
    ]
    with ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(process.wait, timeout_s) for process in processes]
        try:
            while not all(future.done() for future in futures):
                done, _ = wait(futures, return_when=FIRST_COMPLETED)
                if any(future.exception() or future.result() != code for future in done):
                    break
                wait([future for future in futures if future not in done], timeout=0.1)
        finally:
            for process in processes:
                process.kill()
    codes = [process.poll() for process in processes]
    texts = [output.read_text() for output in outputs]
    assert codes == [code] * len(codes), "\n".join([f"exit codes {codes}", *texts])
    return texts


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def results_of(folder: Path) -> list[dict[str, Any]]:
    """What the script wrote on two ranks, which agree on the weights."""
    ranks: list[dict[str, Any]] = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    for result in ranks:
        assert result["world_size"] == 2
        # 32 samples, 2 ranks, batches of 4: every rank sees its half
        assert result["batches"] == 4
        assert result["sampler"] == "ResumableSampler"
        assert result["val_loss"] == ranks[0]["val_loss"]
        # Lightning's summary counts whole parameters, though each rank holds a part
        assert result["parameters"] == 485
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name])
    return ranks


@pytest.mark.parametrize(
    "command",
    [BY_LIGHTNING, pytest.param(BY_TORCHRUN, marks=pytest.mark.nightly)],
    ids=["lightning", "torchrun"],
)
def test_a_script_trains_on_two_processes(command: list[str], tmp_path: Path) -> None:
    if command == BY_LIGHTNING:  # which starts the second process
        (output,) = launch_together([*command, str(tmp_path)], [{}], tmp_path, timeout_s=100)
    else:
        output = launch([*command, str(tmp_path)])
    results_of(tmp_path)
    # the table of units and the progress bar, from one rank
    assert output.count("mfsdp: ") == 1
    assert "4/4" in output


@pytest.mark.nightly
def test_two_nodes_started_by_hand_train_as_one(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [str(SCRIPT), str(tmp_path), "--devices=1", "--num-nodes=2", "--outer-size=2"]
    outputs = launch_together(command, [{**meeting, "NODE_RANK": str(node)} for node in range(2)], tmp_path)
    for node, result in enumerate(results_of(tmp_path)):
        assert result["node_rank"] == node
        assert result["environment"] == "LightningEnvironment"
        assert result["mesh"] == {"outer": 2, "data": 1}
    assert [output.count("mfsdp: ") for output in outputs] == [1, 0]


def slurm(task: int, num_nodes: int) -> dict[str, str]:
    """What `srun` tells one of the two tasks of a job."""
    per_node = 2 // num_nodes
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(task // per_node),
    }


@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_tasks_started_by_slurm_train_together(num_nodes: int, tmp_path: Path) -> None:
    # Lightning derives a port from the job's number, which two runs of this test on one machine would share.
    port = {"MASTER_PORT": str(free_port())}
    command = [str(SCRIPT), str(tmp_path), f"--devices={2 // num_nodes}", f"--num-nodes={num_nodes}"]
    outputs = launch_together(command, [slurm(task, num_nodes) | port for task in range(2)], tmp_path)
    for task, result in enumerate(results_of(tmp_path)):
        assert result["node_rank"] == task * num_nodes // 2
        assert result["environment"] == "SLURMEnvironment"
        assert result["mesh"] == {"data": 2}
    assert [output.count("mfsdp: ") for output in outputs] == [1, 0]


CLI = """
from lightning.pytorch.cli import LightningCLI
from tests.lightning.models import Classifier, TinyData
LightningCLI(Classifier, TinyData, save_config_callback=None)
"""

CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  use_distributed_sampler: false
  strategy:
    class_path: lightning_mfsdp.MFSDPStrategy
    init_args:
      sharding: optim_grads
      units: [Block]
      accumulation: sharded
      free_gradients: true
      compile: {backend: eager}
  callbacks:
    - class_path: lightning_mfsdp.callbacks.NaNGradientReporter
      init_args: {action: skip}
model: {lr: 0.01}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", ["[Block]", "tests.lightning.models.is_block"])
def test_yaml_with_class_paths_needs_no_import_of_the_package(chosen: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "main.py").write_text(CLI)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("[Block]", chosen))
    output = launch([sys.executable, str(tmp_path / "main.py"), "fit", "--config", str(tmp_path / "config.yaml")])
    assert "mfsdp: 3 units" in output
    assert "`max_epochs=1` reached" in output
