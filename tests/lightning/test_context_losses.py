"""Losses people write, with divided sequences: they are those of one rank, or are refused with what to use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_mfsdp.context_parallel import shift_labels, tokens_in_batch
from tests.helpers.distributed import run_distributed
from tests.lightning.test_context import LENGTH, VOCABULARY, Finetuned, OwnLoss, Texts, Trained, assert_equal, fit

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}


class Full(Texts):
    """Every token has a target, so that counts of labels are equal; further entries by name."""

    def __init__(self, *keys: str, length: int = LENGTH, kind: str = "whole") -> None:
        super().__init__(kind, length)
        self.keys = ("input_ids", *keys)
        self.entries = {
            "input_ids": self.tokens,
            "labels": self.tokens,
            "loss_mask": (self.tokens % 3 > 0).double(),
            "attention_mask": self.mask,
            "position_ids": self.positions,
            "kind": self.tokens[:, 0] % 2,
        }

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {key: self.entries[key][row] for key in self.keys}


class Sliced(Finetuned):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class ShiftedMean(Finetuned):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten())


class SmoothedBesides(Finetuned):
    """The model's own loss, which is counted, is not the one that is returned."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        return F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten(), label_smoothing=0.1)


class Weighted(Finetuned):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        each = F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten(), reduction="none")
        return (each * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()


class Masked(Trained):
    """Its head has a loss of its own, which ignores num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class CountGiven(Finetuned):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss


class Classified(Trained):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**SIZES, pad_token_id=0, num_labels=2, use_cache=False)
        self.model = transformers.LlamaForSequenceClassification(config)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).logits, batch["kind"])


class Pooled(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.BertModel(transformers.BertConfig(**BERT))
        self.head = nn.Linear(32, 2)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.model(batch["input_ids"]).pooler_output), batch["kind"])


class LastToken(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, use_cache=False))
        self.head = nn.Linear(32, 2)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.model(batch["input_ids"]).last_hidden_state[:, -1]), batch["kind"])


class OneByOne(Finetuned):
    """Passes neither a mask nor positions."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"], labels=batch["labels"]).loss


REFUSED: dict[str, tuple[type[Trained], Callable[[], Texts], dict[str, Any], str]] = {
    "slices": (
        Sliced,
        lambda: Full("labels"),
        {},
        "cross_entropy got 28 targets, and this rank has 32 tokens. Use .*shift_labels",
    ),
    "a mean": (ShiftedMean, lambda: Full("labels"), {}, "between 28 and 32 targets.*tokens_in_batch"),
    "a mean beside the model's": (SmoothedBesides, lambda: Texts("whole"), {}, r"between \d+ and \d+ targets"),
    "weights": (
        Weighted,
        lambda: Full("labels", "loss_mask"),
        {"context_dims": {"loss_mask": 1}},
        "losses of single tokens or their sum, and not how many targets all ranks have.*tokens_in_batch",
    ),
    "a head with a loss of its own": (Masked, lambda: Texts("whole"), {}, r"between \d+ and \d+ targets"),
    "a count of the part": (CountGiven, lambda: Texts("whole"), {}, "num_items_in_batch, which the strategy counts"),
    "classes of sequences": (Classified, lambda: Full("kind"), {}, "its result is one of a whole sequence"),
    "a pooler": (Pooled, lambda: Full("kind"), {}, "pooler .BertPooler. reads one token of a sequence"),
    "the last token": (LastToken, lambda: Full("kind"), {}, "cross_entropy got 4 targets, and this rank has 32 tokens"),
    "targets at padding": (
        Finetuned,
        lambda: Full("labels", "attention_mask", kind="padded"),
        {},
        "labels of padding tokens are not -100",
    ),
    "a mask that is not passed": (
        OneByOne,
        lambda: Texts("padded"),
        {},
        "called without attention_mask, and the batch has one",
    ),
    "positions that are not passed": (
        OneByOne,
        lambda: Texts("packed"),
        {},
        "called without position_ids, and the batch has one",
    ),
}


def refuse(rank: int, world: int, case: str) -> str:
    kind, texts, options, _ = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, kind, texts(), context=2, **options)
    return str(info.value)


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_would_be_another_is_refused(case: str) -> None:
    for message in run_distributed(refuse, 2, case):
        assert re.search(REFUSED[case][3], message), message


class LabelsAreInputs(Finetuned):
    """Made in the step, where the batch has been padded."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"], labels=batch["input_ids"]).loss


class WithoutHead(OwnLoss):
    """The model is called without its head, which computes a loss of one's own."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.model(batch["input_ids"]).last_hidden_state
        targets = shift_labels(batch["labels"])
        loss = F.cross_entropy(self.model.lm_head(states).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / tokens_in_batch(targets)


class EqualMean(OwnLoss):
    """Means over equally many targets on each rank need no count."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Gpt2(Finetuned):
    """It names no type of its loss."""

    def __init__(self) -> None:
        super().__init__()
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
        torch.manual_seed(0)
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, use_cache=False))


EQUAL: dict[str, tuple[type[Trained], Callable[[], Texts], float]] = {
    "labels are inputs": (LabelsAreInputs, lambda: Full(length=LENGTH - 3), 2e-6),
    "without a head": (WithoutHead, lambda: Full("labels"), 1e-12),
    "equal means": (EqualMean, lambda: Full("labels"), 1e-12),
    "GPT-2": (Gpt2, lambda: Texts("whole"), 2e-6),
}


def equal(rank: int, world: int, case: str) -> dict[str, Any]:
    kind, texts, _ = EQUAL[case]
    return fit(rank, world, kind, texts(), context=world)


@pytest.mark.parametrize("case", EQUAL)
def test_a_loss_is_that_of_one_rank(case: str) -> None:
    (expected,) = run_distributed(equal, 1, case)
    for found in run_distributed(equal, 2, case):
        assert_equal(found, expected, EQUAL[case][2])
