"""What one row of moe.py is, and the process that measures it: `moe.py` starts it, once for each rank.

A row measures in processes of its own, so that what fails, runs out of memory or hangs costs no other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

__all__ = ["MEETING", "SIZES", "Row", "Sizes", "measure"]

# The environment variable with the file in which ranks meet.
MEETING = "MOE_BENCHMARK_MEETING"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a decoder with mixtures of experts, and of each rank's batch."""

    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    width: int
    vocab: int
    seq: int
    batch: int

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return self.seq * self.batch

    @property
    def parameters(self) -> int:
        """Of all experts and everything else, without norms."""
        around = 4 * self.dim**2 + self.experts * self.dim
        return self.layers * (around + 3 * self.experts * self.dim * self.width) + 2 * self.vocab * self.dim

    @property
    def active(self) -> int:
        """Parameters that a token meets."""
        return self.parameters - 3 * self.layers * (self.experts - self.top_k) * self.dim * self.width


# layer: of Qwen3-30B-A3B. 8b: 7.7 billion parameters, 1.3 of them active, for 2 GPUs or more. 2b: 1.9 and 0.4, for one.
SIZES = {
    "tiny": Sizes(dim=32, layers=4, heads=2, experts=8, top_k=2, width=16, vocab=64, seq=16, batch=2),
    "layer": Sizes(dim=2048, layers=1, heads=32, experts=128, top_k=8, width=768, vocab=1, seq=16_384, batch=1),
    "2b": Sizes(dim=1024, layers=18, heads=16, experts=64, top_k=8, width=512, vocab=32_000, seq=4096, batch=4),
    "8b": Sizes(dim=2048, layers=18, heads=16, experts=64, top_k=8, width=1024, vocab=32_000, seq=4096, batch=2),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is measured.

    Attributes:
        kind: "layer": one layer of experts on one device. "experts": training with experts divided among all ranks, and buffers
            `capacity` times as long as what lives in them. "sharded": training with everything sharded over all ranks.
        name: Of an implementation, a way to save activations, or an engine.
        size: In `SIZES`.
        capacity: See `kind`.
        graph: Whether the whole step is recorded too, after it was measured as it is.
        device: "cuda" or "cpu".
        warmup: Steps before those that are timed; the first four are recorded by a stash.
        steps: Steps that are timed.
        device_factor: Pages of a stash on the device, relative to what the recorded steps needed.
        trace: A JSON file for the pages in use over a step, or empty.
    """

    kind: Literal["layer", "experts", "sharded"]
    name: str
    size: str
    capacity: float = 0.0
    graph: bool = False
    device: str = "cuda"
    warmup: int = 6
    steps: int = 10
    device_factor: float = 1.05
    trace: str = ""

    @property
    def sizes(self) -> Sizes:
        """Of the model."""
        return SIZES[self.size]

    def __str__(self) -> str:
        return " ".join([self.kind, *([f"x{self.capacity:g}"] if self.capacity else []), self.name])


def measure(row: Row, device: torch.device) -> Iterator[dict[str, Any]]:
    """Results of a row, each as soon as it is there. On all ranks; they count on rank 0."""
    if row.kind == "layer":
        from examples.benchmark import moe_layer

        yield from moe_layer.measure(row, device)
        return
    from examples.benchmark import moe_step

    if row.kind == "sharded":
        yield moe_step.measure_sharded(row, device)
    else:
        yield from moe_step.measure_experts(row, device)


def main() -> None:
    """Be one rank of a row, whose JSON is the only argument; rank 0 prints its results."""
    row = Row(**json.loads(sys.argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = row.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{os.environ[MEETING]}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
        device_id=device if on_gpu else None,
    )
    for result in measure(row, device):
        if rank == 0:
            print("RESULT " + json.dumps({**asdict(row), "world": world, **result}), flush=True)
    dist.barrier()
    os._exit(0)  # everything is said; taking down communicators that graphs refer to only costs time


if __name__ == "__main__":
    main()
