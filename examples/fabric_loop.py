"""The plain loop under Lightning Fabric, which starts the processes, moves the data and saves the checkpoint.

python examples/fabric_loop.py
python examples/fabric_loop.py --accelerator gpu --devices 4 --precision bf16-mixed --steps 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import lightning_mfsdp.fabric  # noqa: F401  registers the strategy
from examples.decoder import PRESETS, Decoder, next_token_loss
from examples.text import ByteText

ACCUMULATE = 2
BATCH = 4


def train(fabric: Fabric, steps: int, folder: Path) -> list[float]:
    """Train the tiny preset, save it, and return the loss of every step, averaged over ranks and microbatches, in nats."""
    fabric.seed_everything(0, verbose=False)  # the same initial weights on every rank
    config = PRESETS["tiny"]
    model = Decoder(config)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)))
    text = ByteText("train", config.seq)
    loader = fabric.setup_dataloaders(DataLoader(text, BATCH, shuffle=True, drop_last=True))
    batches = iter(loader)
    history = []
    for step in range(steps):
        total = torch.zeros((), device=fabric.device)
        for microbatch in range(ACCUMULATE):
            tokens = next(batches)
            # Gradients stay on this rank until the last microbatch reduces them all at once.
            with fabric.no_backward_sync(model, enabled=microbatch < ACCUMULATE - 1):
                loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / ACCUMULATE
                fabric.backward(loss)
            total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(fabric.all_reduce(total)))
        if step % 5 == 0 or step == steps - 1:
            fabric.print(f"step {step:4d}  loss {history[-1]:.4f}  gradient norm {float(norm):.3f}", flush=True)
    fabric.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer, "step": steps})
    return history


def main() -> None:
    """Start the processes; Fabric runs this script again in each of them."""
    parser = argparse.ArgumentParser(description="Train the tiny decoder under Lightning Fabric.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--output", type=Path, default=Path("mfsdp-runs/fabric"), help="folder of the checkpoint")
    args = parser.parse_args()
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, precision=args.precision, strategy="mfsdp")
    fabric.launch()
    history = train(fabric, args.steps, args.output)
    fabric.print(f"{fabric.world_size} processes, loss {history[0]:.3f} -> {history[-1]:.3f}, saved in {args.output}")


if __name__ == "__main__":
    main()
