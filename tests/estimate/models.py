"""A small Llama as a LightningModule, and as a config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_mfsdp.base.containers import map_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 1003,  # rows that two ranks do not divide evenly
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = "input_ids=int64[2,96] labels=int64[2,96]"


def write_config(folder: Path, **changes: Any) -> Path:
    """A config.json of transformers."""
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    return file


class Causal(LightningModule):
    """Trains it on its own loss."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            config = LlamaConfig(**SIZES, use_cache=False)
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), foreach=True)


class ReadsValues(Causal):
    """Computes with the tokens that are no padding, as many as there are."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        return self.model(input_ids=tokens[tokens != 0].unsqueeze(0)).logits.mean()


class OnlyItsHead(Causal):
    """Trains its last layer, so that the results of all units before have no gradient."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.requires_grad_(False)
        self.model.lm_head.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.lm_head.parameters(), foreach=True)


class Adapted(Causal):
    """LoRA, as a program has it that loads its base model."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().configure_model()
            self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules="all-linear"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], foreach=True)


class SavesItself(Causal):
    """Reads its weights when it is built."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.lm_head.weight.cpu()


class AsksItsTrainer(Causal):
    """As many a module does."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss / self.trainer.accumulate_grad_batches


class Same(IterableDataset[Any]):
    """One batch over and over."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield map_tensors(torch.clone, self.batch)


def batches(batch: Any, count: int) -> DataLoader[Any]:
    """Of a loader that adds no dim of its own."""
    return DataLoader(Same(batch, count), batch_size=None)
