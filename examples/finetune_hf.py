"""Fine-tune a Hugging Face model with `MFSDPStrategy`, all of it or LoRA adapters.

Without arguments: two processes on the CPU, under a minute on two cores, nothing downloaded. A small Llama is built on
the meta device in `configure_model`, so that it never exists whole in one process, and learns to predict the bytes of
the Python standard library:

    python examples/finetune_hf.py
    python examples/finetune_hf.py --lora
    python examples/finetune_hf.py --context 2
    python examples/finetune_hf.py --devices 4 --context 2 --tensor 2
    python examples/finetune_hf.py --pretrained some/folder --lora --accelerator gpu --devices 4 --precision bf16-mixed

With `--context 2` every two processes divide each window between them, and with `--tensor 2` the weights of each layer;
`training_step` stays as it is.

`--pretrained` takes a folder that `save_pretrained` or `export_model` wrote. Each process reads its own rows of the weights. With
`--lora` every process first builds the whole base model, since peft computes the adapters' initial values from it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from examples.lightning_decoder import TextDataModule
from examples.reporting import hide_spurious_warnings
from examples.text import BYTES, unigram_bits_per_byte
from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import export_model, load_safetensors


class CausalLM(LightningModule):
    """Any causal language model of transformers, with token ids that are bytes.

    Args:
        pretrained: A folder with a model; `None` builds a small one from a configuration.
        lora: Train adapters only. Checkpoints then hold nothing else.
        learning_rate: Of AdamW.
    """

    def __init__(self, pretrained: Path | None = None, lora: bool = False, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.pretrained, self.lora, self.learning_rate = pretrained, lora, learning_rate
        self.strict_loading = not lora
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model. Lightning calls this once per fit, validate, test and predict."""
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.pretrained) if self.pretrained is not None else small_llama()
        if not self.lora:
            with torch.device("meta"):  # without memory; `on_fit_start` loads the weights
                self.model = AutoModelForCausalLM.from_config(config)
            return
        from peft import LoraConfig, get_peft_model

        if self.pretrained is not None:
            base = AutoModelForCausalLM.from_pretrained(self.pretrained).train()  # it is returned in eval mode
        else:
            base = AutoModelForCausalLM.from_config(config)
        self.model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))

    def on_fit_start(self) -> None:
        """Load pretrained weights into the shards, unless a checkpoint to resume from follows."""
        if self.pretrained is not None and not self.lora and self.trainer.ckpt_path is None:
            load_safetensors(self.model, self.pretrained)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean loss in nats per byte of windows `[B, S + 1]`."""
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Loss of the microbatch."""
        loss = self.loss(batch)
        self.log("bits_per_byte", loss.detach() / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """Log the held-out loss in bits per byte."""
        loss = self.loss(batch) / math.log(2)
        self.log("val_bits_per_byte", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what is trained."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen weights out: they are those that training began with."""
        if self.lora:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}


def small_llama() -> LlamaConfig:
    """Half a million parameters, a token for each byte."""
    return LlamaConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def export(module: CausalLM, folder: Path, *, is_rank_zero: bool) -> None:
    """Write a folder that `from_pretrained` reads without this package. All ranks call it; rank 0 writes."""
    if not module.lora:
        export_model(module.model, folder)
        return
    adapters = {name: value for name, value in module.model.state_dict().items() if "lora_" in name}
    state = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in adapters.items()}
    if is_rank_zero:
        module.model.save_pretrained(folder, state_dict=state)


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Finetune a Hugging Face model, sharded by lightning-mfsdp.")
    parser.add_argument("--pretrained", type=Path, help="folder of a model; default: a small Llama with random weights")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters only (needs peft)")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto (default: cpu)")
    parser.add_argument("--devices", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--context", type=int, default=1, help="processes that divide each window (default: 1)")
    parser.add_argument("--tensor", type=int, default=1, help="processes that divide each layer (default: 1)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--seq", type=int, default=64, help="bytes in a window (default: 64)")
    parser.add_argument("--micro-batch", type=int, default=8, help="windows in a microbatch of a process (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=Path("mfsdp-runs/finetune_hf"))
    return parser.parse_args()


def main() -> None:
    """Train, save a sharded checkpoint, export for transformers or peft, and report."""
    args = parse_args()
    hide_spurious_warnings()
    seed_everything(0, verbose=False)
    processes = args.devices // (args.context * args.tensor)  # those that read different windows
    data = TextDataModule(args.seq, args.micro_batch, held_out_windows=8 * args.micro_batch * processes)
    module = CausalLM(args.pretrained, args.lora, args.learning_rate)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        # A batch is one tensor of windows.
        strategy=MFSDPStrategy(context=args.context, context_dims={"0": 1}, tensor=args.tensor),
        precision=args.precision,
        max_epochs=1,
        limit_train_batches=args.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(args.output, filename="last", enable_version_counter=False),
            TQDMProgressBar(refresh_rate=5),
        ],
    )
    trainer.fit(module, data)
    export(module, args.output / "exported", is_rank_zero=trainer.is_global_zero)
    if trainer.is_global_zero:
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in module.parameters())
        held_out = float(trainer.callback_metrics["val_bits_per_byte"])
        print(f"\ntrained             {trained:,} of {total:,} parameters")
        print(f"checkpoint          {trainer.checkpoint_callback.best_model_path}")
        print(f"exported            {args.output / 'exported'}")
        print(f"unigram baseline    {unigram_bits_per_byte(data.held_out()):.3f} bits per byte")
        print(f"held-out text       {held_out:.3f} bits per byte")


if __name__ == "__main__":
    main()
