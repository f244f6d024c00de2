"""A language model of Hugging Face's that writes text where people let it: after validation, after training, after the fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.clients.base import Client, State, changed

VOCABULARY, LENGTH, NEW = 24, 8, 4


class Writer(Client):
    """`generate` calls the model's own forward many times, outside any step of the Trainer."""

    recomputes = True
    validates = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, use_cache=True, **sizes, **special)
        self.model = LlamaForCausalLM(config)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
        return (start + 5 * torch.arange(LENGTH)) % VOCABULARY

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.saw(self.model(input_ids=batch, labels=batch, use_cache=False).loss)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("val_loss", loss, sync_dist=True)

    def write(self, when: str) -> None:
        prompt = torch.tensor([[1, 6, 11], [2, 7, 12]], device=self.device)
        written = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
        self.notes.setdefault(when, []).append(written.tolist())

    def on_validation_epoch_end(self) -> None:
        self.write("after validation")

    def on_train_end(self) -> None:
        self.write("at the end of training")

    def after_fit(self) -> None:
        self.write("after the fit")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-4)

    def check(self, before: State, after: State) -> None:
        assert all(changed(before, after)), "not everything learned"
        for when in ("after validation", "at the end of training", "after the fit"):
            assert self.notes[when], f"nothing was written {when}"
            assert all(len(line) == 3 + NEW for text in self.notes[when] for line in text), when
        assert self.notes["at the end of training"] == self.notes["after the fit"]
