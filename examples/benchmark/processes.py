"""Where a script that measures by itself runs: under torchrun on each rank's GPU, or alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["print_table", "process_group"]


@contextmanager
def process_group(kind: str) -> Iterator[torch.device]:
    """The ranks that torchrun started, or a group of this process alone; this rank's device.

    Args:
        kind: "cuda" or "cpu".
    """
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        meeting = Path(tempfile.mkdtemp(), "meet").as_uri()
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def print_table(head: list[str], texts: int, rows: Iterable[list[str]]) -> None:
    """In Markdown, on rank 0, each row as soon as it is there. The first `texts` columns are words, the others numbers."""
    for row in (head, ["---" if index < texts else "--:" for index in range(len(head))]):
        _print(row)
    for row in rows:
        _print(row)


def _print(row: list[str]) -> None:
    if dist.get_rank() == 0:
        print(f"| {' | '.join(row)} |", flush=True)
