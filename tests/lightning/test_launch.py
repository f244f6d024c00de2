"""Scripts started the ways users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_script.py")

BY_LIGHTNING = [sys.executable, str(SCRIPT)]
BY_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]


def launch(command: list[str], timeout_s: int = 100) -> str:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "NODE_RANK")
    }
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", [BY_LIGHTNING, BY_TORCHRUN], ids=["lightning", "torchrun"])
def test_a_script_trains_on_two_processes(command: list[str], tmp_path: Path) -> None:
    output = launch([*command, str(tmp_path)])
    ranks: list[dict[str, Any]] = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    for result in ranks:
        assert result["world_size"] == 2
        # 32 samples, 2 ranks, batches of 4: every rank sees its half
        assert result["batches"] == 4
        assert result["sampler"] == "DistributedSampler"
        assert result["val_loss"] == ranks[0]["val_loss"]
        # Lightning's summary counts whole parameters, though each rank holds a part
        assert result["parameters"] == 485
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name])
    # the table of units and the progress bar, from one rank
    assert output.count("mfsdp: ") == 1
    assert "4/4" in output


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
  callbacks:
    - class_path: lightning_mfsdp.callbacks.NaNGradientReporter
      init_args: {action: skip}
model: {lr: 0.01}
"""


def test_yaml_with_class_paths_needs_no_import_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "main.py").write_text(CLI)
    (tmp_path / "config.yaml").write_text(CONFIG)
    output = launch([sys.executable, str(tmp_path / "main.py"), "fit", "--config", str(tmp_path / "config.yaml")])
    assert "mfsdp: 3 units" in output
    assert "`max_epochs=1` reached" in output
