"""Time LoRA on a base model in 4 bits, NF4 of bitsandbytes, through Lightning's Trainer: memory and tokens per second.

    torchrun --standalone --nproc_per_node=1 examples/benchmark/qlora.py mfsdp
    torchrun --standalone --nproc_per_node=2 examples/benchmark/qlora.py mfsdp --checkpoint
    torchrun --standalone --nproc_per_node=1 examples/benchmark/qlora.py mfsdp --base bf16 --rows 2 --accumulation 16 --compile
    python examples/benchmark/qlora.py mfsdp --tiny

Needs transformers and peft, and bitsandbytes for a base in 4 bits. The model has the shapes of Llama 3 8B and random weights, which are
drawn and packed one layer at a time, on the device. Adapters of rank 16 are at all projections. Strategies: mfsdp, mfsdp-no-shard, ddp,
single (for one process). `--base bf16` leaves the base model as it is, `--compile` compiles each decoder layer. `--tiny` is a small model
that a CPU trains in seconds. Rank 0 prints one JSON line that starts with RESULT.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from examples.benchmark.flops import H100_BF16_TFLOPS, adapted_flops
from lightning_mfsdp import MFSDPStrategy

STRATEGIES = ("mfsdp", "mfsdp-no-shard", "ddp", "single")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STD = 0.02

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
)
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def packed(layer: nn.Linear, device: torch.device) -> nn.Linear:
    """A layer in its place, with random weights in NF4 whose scales are quantized, too."""
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = torch.randn(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=device) * STD
    made.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=made
    )
    return made.to(device)


@torch.no_grad()
def base_model(config: LlamaConfig, device: torch.device, *, in_4_bits: bool) -> Any:
    """The model on a device, of which at no time more than one layer is in 16 bits, if it is to be in 4."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and in_4_bits and name != "lm_head":
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, packed(module, device))
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.ones if parameter.dim() == 1 else torch.randn
                filled = value(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[key] = nn.Parameter(filled * (1.0 if parameter.dim() == 1 else STD))
    with device:  # its frequencies are no parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.is_loaded_in_4bit = in_4_bits  # as from_pretrained leaves it
    return model.train()


class Adapted(LightningModule):
    """LoRA on the base model."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.model: Any = None

    def configure_model(self) -> None:
        """Build it on the device of this rank. Lightning calls this again for validate, test and predict."""
        if self.model is not None:
            return
        config = TINY if self.options.tiny else LLAMA_8B
        base = base_model(config, device_of(self.options), in_4_bits=self.options.base == "nf4")
        if self.options.checkpoint:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
        self.model = get_peft_model(base, adapters)
        if self.options.compile:
            for layer in base.model.layers:
                layer.compile()

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Mean loss of the microbatch."""
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the adapters."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4)


def linears_of(config: LlamaConfig) -> list[nn.Linear]:
    """All linear layers of a model, without memory."""
    with torch.device("meta"):
        return [layer for layer in AutoModelForCausalLM.from_config(config).modules() if isinstance(layer, nn.Linear)]


class Timed(Callback):
    """When each step began; losses stay on the device."""

    def __init__(self, warmup: int, accumulation: int) -> None:
        self.warmup, self.accumulation = warmup, accumulation
        self.starts: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int) -> None:
        """Wait for the device at the start of a step, and note the time; memory counts from the first timed one."""
        if batch_index % self.accumulation:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.starts) == self.warmup:
                torch.cuda.reset_peak_memory_stats()
        self.starts.append(time.perf_counter())

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Keep the loss, as it was before Lightning divided it by the number of microbatches."""
        self.losses.append(loss.detach() * self.accumulation)


def device_of(options: argparse.Namespace) -> torch.device:
    """Of this rank."""
    return torch.device("cpu") if options.tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def strategy_of(name: str, device: torch.device) -> Strategy | str:
    """The strategy as a user would set it up."""
    if name == "single":
        return SingleDeviceStrategy(device)
    if name == "ddp":
        return "ddp"
    return MFSDPStrategy(sharding="no_shard" if name == "mfsdp-no-shard" else "optim_grads_params")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """One fit; times in milliseconds, memory in GiB."""
    device, world = device_of(options), int(os.environ.get("WORLD_SIZE", 1))
    config, steps = (TINY if options.tiny else LLAMA_8B), options.warmup + options.steps + 1
    seq = 32 if options.tiny else options.seq
    torch.manual_seed(0)
    microbatches = steps * options.accumulation
    rows = torch.randint(config.vocab_size, (microbatches * options.rows * world, seq))
    timed, module = Timed(options.warmup, options.accumulation), Adapted(options)
    trainer = Trainer(
        accelerator="cpu" if options.tiny else "gpu",
        devices=world,
        strategy=strategy_of(options.strategy, device),
        precision="bf16-mixed",
        max_steps=steps,
        accumulate_grad_batches=options.accumulation,
        callbacks=[timed],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=options.rows))
    times = [after - before for before, after in pairwise(timed.starts[options.warmup :])]
    losses = torch.stack(timed.losses)
    if dist.is_initialized() and world > 1:
        dist.all_reduce(losses)
        losses /= world
    on_gpu = device.type == "cuda"
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    tokens = options.rows * seq * options.accumulation * len(times) / sum(times)
    multiplied = sum(layer.weight.numel() for layer in linears_of(config))
    flops = adapted_flops(multiplied, trained, config.num_hidden_layers, config.hidden_size, seq)
    tflops = tokens * flops / 1e12
    return {
        "engine": f"trainer:{options.strategy}",
        "size": "tiny" if options.tiny else "llama-8b",
        "base": options.base,
        "world": world,
        "checkpoint": options.checkpoint,
        "trained": trained,
        "compiled": options.compile,
        "accumulation": options.accumulation,
        "step_ms": round(sum(times) / len(times) * 1e3, 2),
        "median_ms": round(median(times) * 1e3, 2),
        "tokens_per_s_gpu": round(tokens),
        "tflops_gpu": round(tflops, 1),
        "mfu": round(tflops / H100_BF16_TFLOPS, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else None,
        "losses": [round(value, 4) for value in losses.tolist()[:: max(1, len(losses) // 6)]],
    }


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--base", choices=["nf4", "bf16"], default="nf4", help="how the base model is stored")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each decoder layer in backward")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches a step")
    parser.add_argument("--compile", action="store_true", help="torch.compile each decoder layer")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    result = measure(parse_args())
    if int(os.environ.get("RANK", 0)) == 0:
        print("RESULT " + json.dumps(result), flush=True)
