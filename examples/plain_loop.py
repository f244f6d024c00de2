"""The sharding engine without Lightning: a training loop in plain PyTorch.

Started plainly it makes processes of its own; under torchrun it uses those it is given. It takes GPUs where there are
enough of them, and the CPU elsewhere:

    python examples/plain_loop.py
    torchrun --nproc_per_node=4 examples/plain_loop.py --steps 200
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler

from examples.decoder import PRESETS, Decoder, next_token_loss
from examples.text import ByteText
from lightning_mfsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer, no_sync

ACCUMULATE = 2
BATCH = 4


def train(steps: int, device: torch.device) -> list[float]:
    """Train the tiny preset and return the loss of every step, averaged over ranks and microbatches, in nats."""
    torch.manual_seed(0)  # the same initial weights on every rank
    config = PRESETS["tiny"]
    model = Decoder(config).to(device)

    # Nested units first, the root last: what no unit owns (here one norm) belongs to the root.
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else None)
    for unit in (model.embedding, *model.blocks, model.head):
        fully_shard(unit, policy=policy)
    fully_shard(model, policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)))

    text = ByteText("train", config.seq)
    loader = DataLoader(text, BATCH, sampler=DistributedSampler(text, seed=0), drop_last=True)
    batches = iter(loader)
    history = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for microbatch in range(ACCUMULATE):
            tokens = next(batches).to(device)
            last = microbatch == ACCUMULATE - 1
            if last:
                loss = backward(model, tokens)
            else:
                # Gradients stay on this rank until the last microbatch reduces them all at once.
                with no_sync(model):
                    loss = backward(model, tokens)
            total += loss
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        history.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {history[-1]:.4f}  gradient norm {norm.item():.3f}", flush=True)
    return history


def backward(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """One microbatch; returns its share of the step's mean loss, detached."""
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / ACCUMULATE
    loss.backward()
    return loss.detach()


def run(local_rank: int, steps: int) -> None:
    """Join the process group named in the environment, train, and leave."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
        dist.init_process_group("gloo")
    try:
        train(steps, device)
    finally:
        dist.destroy_process_group()


def spawned(rank: int, world_size: int, port: int, steps: int) -> None:
    """What each process made by `main` runs: the environment that torchrun would have set, then `run`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    run(rank, steps)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Use torchrun's processes, or make some."""
    parser = argparse.ArgumentParser(description="Train the tiny decoder with the sharding engine alone.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    parser.add_argument("--processes", type=int, default=2, help="processes to make when not under torchrun")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run(int(os.environ["LOCAL_RANK"]), args.steps)
    else:
        mp.spawn(spawned, args=(args.processes, free_port(), args.steps), nprocs=args.processes)


if __name__ == "__main__":
    main()
