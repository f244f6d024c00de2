"""A module that DeepSpeed trained, and the program that trains it and writes `tests/data/deepspeed-<version>.tar.xz`.

DeepSpeed is not needed to read the file. To write it, on a CPU:

    DS_ACCELERATOR=cpu python -m tests.checkpoint.written_by_deepspeed

Lightning's DeepSpeedStrategy writes the checkpoints. What is in them by parameter is what DeepSpeed's own converter to its universal
format takes out of them, so the test compares two independent readers. With `round_robin_gradients` that converter takes parameters for
others (0.19.8); there the test compares with plain training.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ARCHIVE = Path(__file__).resolve().parents[1] / "data/deepspeed-0.19.8.tar.xz"
WIDTH, RANKS, STEPS = 5, 3, 3
# Options of the strategy and of the Trainer.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "zero1": ({"stage": 1}, "bf16-mixed"),
    "zero2": ({"stage": 2, "round_robin_gradients": True}, "32-true"),
    "zero3": ({"stage": 3, "sub_group_size": 20}, "bf16-mixed"),
}


class Net(LightningModule):
    """With tied and frozen weights, buffers, a parameter of fewer elements than ranks, and two groups of the optimizer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inputs = nn.Linear(width, width, bias=False)
        self.layers = nn.Sequential(nn.Linear(width, 7), nn.LayerNorm(7), nn.Linear(7, width))
        self.mean: Tensor
        self.count: Tensor
        self.frozen = nn.Linear(width, 3).requires_grad_(False)
        self.outputs = nn.Linear(width, width, bias=False)
        self.outputs.weight = self.inputs.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = batch[0].to(self.inputs.weight.dtype)
        y = self.outputs(self.layers(self.inputs(x))) * self.scale
        self.mean.copy_(y.detach().mean(0))
        self.count.add_(1)
        return y.square().mean() + self.frozen(y).square().mean()

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        others = [parameter for parameter in trained if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def make_loader(batches: int = STEPS * RANKS) -> DataLoader[Any]:
    data = torch.randn(4 * batches, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4)


class OnCPU(DeepSpeedStrategy):
    """Lightning refuses a CPU, DeepSpeed does not."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def train(folder: Path, options: dict[str, Any], precision: Any) -> None:
    """On RANKS processes, which Lightning starts."""
    own = {"round_robin_gradients"} & options.keys()
    strategy = OnCPU(process_group_backend="gloo", **{key: value for key, value in options.items() if key not in own})
    assert isinstance(strategy.config, dict)
    strategy.config["zero_optimization"].update({key: options[key] for key in own})
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_steps=STEPS,
        max_epochs=-1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make_net(), make_loader())
    trainer.save_checkpoint(folder)


def expected_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Main weights ("fp32") and Adam's state by parameter, by DeepSpeed's converter."""
    with tempfile.TemporaryDirectory() as scratch:
        program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        folders = ["--input_folder", str(folder / "checkpoint"), "--output_folder", scratch]
        subprocess.run([*program, "--num_extract_workers", "1", "--num_merge_workers", "1", *folders], check=True)
        expected: dict[str, dict[str, Tensor]] = {}
        for file in sorted(Path(scratch, "zero").glob("*/*.pt")):
            content = torch.load(file, weights_only=False)
            value = content["param"] if isinstance(content, dict) else content
            expected.setdefault(file.parent.name, {})[file.stem] = value.clone() if isinstance(value, Tensor) else value
    return expected


def pack(root: Path) -> None:
    """Add what is expected, and write the archive."""
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for name in CASES:
            if name != "zero2":
                torch.save(expected_of(root / name), root / name / "expected.pt")
            for file in sorted((root / name).rglob("*")):
                if file.suffix == ".pt" or file.name == "latest":
                    archive.add(file, f"{name}/{file.relative_to(root / name)}")


def main() -> None:
    """Train all cases in this process and those that Lightning starts; rank 0 writes the archive."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir(), "written_by_deepspeed")
    for name, (options, precision) in CASES.items():
        train(root / name, options, precision)
    if torch.distributed.get_rank() == 0:
        pack(root)


if __name__ == "__main__":
    main()
