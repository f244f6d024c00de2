"""A program of one process needs no launcher and no process group of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from lightning_mfsdp import clip_grad_norm_, full_state_dict, fully_shard, fully_shard_optimizer

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
model = copy.deepcopy(plain)
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.1), fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))]
for step in range(3):
    x = torch.randn(4, 5, device=next(plain.parameters()).device)
    for one, clip, optimizer in zip((plain, model), (nn.utils.clip_grad_norm_, clip_grad_norm_), optimizers):
        one(x).square().mean().backward()
        clip(one if one is model else one.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
for name, value in full_state_dict(model).items():
    torch.testing.assert_close(value.to(x.device), plain.state_dict()[name], rtol=1e-5, atol=1e-6)
assert dist.get_world_size() == 1
print("trained")
"""


def train_alone(**variables: str) -> None:
    """Run the program with these environment variables; it says one thing and no more."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stdout) == (0, "trained\n"), found.stderr
    (line,) = found.stderr.splitlines()
    assert "made for this process alone" in line
    assert "torchrun" in line


def test_a_plain_program_trains_after_one_message_and_ends_without_another():
    train_alone(CUDA_VISIBLE_DEVICES="")
