"""Calls of one settled step of the Trainer: `python tests/figures/trainer_calls.py [CHECKOUT] [--accelerator cuda] [--strategies ...]`.

A model of 24 blocks of nine parameters, an embedding, a norm and a head; two ranks, "bf16-mixed", gradients clipped by their norm, AdamW as
it comes. After `SETTLED` steps every function that rank 0 calls from one `on_train_batch_start` to the next is counted, in Python and in C
(`sys.setprofile`; a call that C makes of C is not seen), and attributed to a concern:

- `torch.optim`: the optimizer's own code
- a room of the package, or its file in the engine: what it calls itself, and what others call on its behalf
- `lightning`: the loop
- `model`: modules and functions of the model, hooks apart

The same number comes every time with one Python, one torch and one Lightning. Times are not measured here: with small blocks the host's
time goes with the number of calls.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.multiprocessing
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.figures.subjects import Package

HERE = Path(__file__).resolve().parents[2]
BLOCKS, WIDTH, TOKENS, LENGTH, HEADS = 24, 64, 64, 16, 4
SETTLED = 10  # steps; the order of gathers is known from eight on
STRATEGIES = ("mfsdp", "no_shard", "ddp")


class Block(nn.Module):
    """A transformer block of nine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counts(Callback):
    """Counts the calls of one step by concern.

    Args:
        package: Folder of the package.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SETTLED:
            # Backwards run in threads of their own on devices.
            getattr(threading, "setprofile_all_threads", threading.setprofile)(self._see)
            sys.setprofile(self._see)
        elif trainer.global_step == SETTLED + 1:
            getattr(threading, "setprofile_all_threads", threading.setprofile)(None)
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            self.calls[self._concern(frame)] += 1

    def _concern(self, frame: FrameType) -> str:
        place: FrameType | None = frame
        while place is not None:
            file = place.f_code.co_filename
            if file.startswith(self._package):
                parts = Path(file.removeprefix(self._package)).with_suffix("").parts
                return "/".join(parts if parts[0] == "engine" else parts[:1])
            if "/torch/optim/" in file:
                return "torch.optim"
            if file == __file__:
                return "model"
            if "/lightning/" in file:
                return "lightning"
            place = place.f_back
        return "backward"


def strategy(name: str, package: Package, accelerator: str) -> Any:
    """By its name here."""
    backend = "gloo" if accelerator == "cpu" else "nccl"
    if name == "ddp":
        return DDPStrategy(process_group_backend=backend)
    if name == "fsdp":
        return FSDPStrategy(process_group_backend=backend, auto_wrap_policy={Block})
    package.activate()
    options = {} if name == "mfsdp" else {"sharding": name}
    return package.module.MFSDPStrategy(**options)


def run(rank: int, name: str, checkout: Path, accelerator: str, port: int, folder: str) -> None:
    """One rank trains; rank 0 counts."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    calls = train(rank, strategy(name, Package(checkout), accelerator), checkout, accelerator)
    if rank == 0:
        Path(folder, "counts").write_text(json.dumps(calls))


def train(rank: int, strategy: Any, checkout: Path = HERE, accelerator: str = "cpu") -> Counter[str]:
    """One of two ranks; calls by concern of rank 0."""
    warnings.simplefilter("ignore")
    counts = Counts(checkout.resolve() / "lightning_mfsdp")
    trainer = Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=strategy,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=SETTLED + 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counts] if rank == 0 else [],
    )
    torch.manual_seed(0)
    batches = DataLoader(torch.randint(TOKENS, (4 * (SETTLED + 2), LENGTH + 1)), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(Model(), batches)
    return counts.calls


def count(name: str, checkout: Path = HERE, accelerator: str = "cpu") -> Counter[str]:
    """Calls by concern, under one strategy."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (name, checkout, accelerator, port, folder), 2)
        return Counter(json.loads(Path(folder, "counts").read_text()))


def table(found: dict[str, Counter[str]]) -> str:
    """Markdown: a column for each strategy."""
    names = list(found)
    concerns = sorted({one for counts in found.values() for one in counts}, key=lambda one: -found[names[0]][one])
    lines = [f"| calls | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    lines.append(f"| all | {' | '.join(f'{sum(found[name].values()):,}' for name in names)} |")
    lines += [f"| {one} | {' | '.join(f'{found[name][one]:,}' for name in names)} |" for one in concerns]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=HERE, help="the repository's root (this one)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help=f"of {STRATEGIES} and, on GPUs, fsdp")
    given = parser.parse_args()
    print(table({name: count(name, given.checkout, given.accelerator) for name in given.strategies}))


if __name__ == "__main__":
    main()
