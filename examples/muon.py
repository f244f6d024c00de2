"""Muon for the matrices of the blocks and AdamW for the rest, in one optimizer, through the Trainer.

python examples/muon.py
python examples/muon.py --accelerator gpu --devices 4 --precision bf16-mixed --steps 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch import Trainer, seed_everything

import lightning_mfsdp  # noqa: F401 - registers the strategy "mfsdp"
from examples.lightning_decoder import LightningDecoder, TextDataModule
from examples.reporting import hide_spurious_warnings
from lightning_mfsdp.optim import Muon


class MuonDecoder(LightningDecoder):
    """The example decoder with another optimizer."""

    def configure_optimizers(self) -> Muon:
        """Hidden matrices by Muon at a rate of its own; embedding, head and norms by AdamW."""
        hidden = [parameter for parameter in self.decoder.blocks.parameters() if parameter.dim() == 2]
        known = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return Muon(
            [{"params": hidden, "lr": 0.02}, {"params": rest, "use_muon": False, "lr": 1e-3, "betas": (0.9, 0.95)}]
        )


def main() -> None:
    """Train; the Trainer runs this script again in each process."""
    parser = argparse.ArgumentParser(description="Train the tiny decoder with Muon.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    hide_spurious_warnings()
    seed_everything(0, verbose=False)
    module = MuonDecoder()
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        strategy="mfsdp",
        max_epochs=1,
        limit_train_batches=args.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, TextDataModule(batch_size=4, held_out_windows=64))
    if trainer.is_global_zero:
        held_out = float(trainer.callback_metrics["val_bits_per_byte"])
        print(
            f"{trainer.world_size} processes, {trainer.global_step} steps, held-out text {held_out:.3f} bits per byte"
        )


if __name__ == "__main__":
    main()
