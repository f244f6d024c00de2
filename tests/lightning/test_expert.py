"""An expert axis from one option: experts of transformers' models and GroupedExperts, alone and beside context and tensor axes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.callbacks import NaNGradientReporter, NonFiniteGradientError
from lightning_mfsdp.context_parallel import shift_labels, tokens_in_batch
from lightning_mfsdp.moe import GroupedExperts, TopKRouter
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.nights import rest_at_night
from tests.helpers.pairwise import pairwise
from tests.lightning.models import make_trainer
from tests.lightning.test_context import VOCABULARY, OwnLoss, Texts, Trained, assert_equal, fit, transformers

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 4,
    "use_cache": False,
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",
}


class Mixtral(OwnLoss):
    """Experts of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.settings = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        self.model = transformers.MixtralForCausalLM(self.settings)


class OnMeta(Mixtral):
    """Built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(5)
            with torch.device("meta"):
                self.model = transformers.MixtralForCausalLM(self.settings)


class Block(nn.Module):
    """Experts of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size=32, num_experts=4, top_k=2)
        self.experts = GroupedExperts(num_experts=4, hidden_size=32, intermediate_size=16, init_std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        return x + self.experts(tokens, routes.expert_index, routes.probabilities).view_as(x)


class Grouped(Trained):
    """Layers that see each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.blocks(self.tokens(batch["input_ids"]))
        targets = shift_labels(batch["labels"])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum") / tokens_in_batch(
            targets
        )


MODELS: dict[str, type[Trained]] = {"Mixtral": Mixtral, "meta": OnMeta, "GroupedExperts": Grouped}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2}),
    "expert 2 of data 4": (4, {"expert": 2}),
    "expert 4, context 2": (4, {"expert": 4, "context": 2}),
    "expert 2, tensor 2": (4, {"expert": 2, "tensor": 2}),
    "expert 2, outer 2": (4, {"expert": 2, "outer": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "experts sharded otherwise": (2, {"sharding": {"*.experts": "optim", "*": "optim_grads_params"}}),
    "divided experts sharded otherwise": (4, {"expert": 2, "sharding": {"*.experts": "optim_grads"}}),
}


def train(rank: int, world: int, model: str, options: dict[str, Any]) -> dict[str, Any]:
    with in_double():
        return fit(rank, world, MODELS[model], Texts("whole"), **options)


@pytest.fixture(scope="module")
def of_one_rank() -> Any:
    done: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in done:
            (done[model],) = run_distributed(train, 1, model, {})
        return done[model]

    return of


def possible(model: str, mesh: str, dispatcher: str) -> bool:
    """Without attention, a context axis is refused."""
    return "context" not in mesh or model != "GroupedExperts"


ROWS = pairwise(list(MODELS), list(MESHES), ["all_gather", "all_to_all"], possible=possible, together=1)


# Four data ranks are in "outer 2", and a tensor axis is beside experts in test_tensor_features.py.
LATER = ("expert 2 of data 4", "expert 2, tensor 2")


@pytest.mark.parametrize(
    ("model", "mesh", "dispatcher"), rest_at_night(ROWS, lambda model, mesh, dispatcher: mesh not in LATER)
)
def test_trains_as_one_rank(of_one_rank: Any, model: str, mesh: str, dispatcher: str) -> None:
    world, axes = MESHES[mesh]
    expected = of_one_rank(model)
    expected = {**expected, "logged": {"train": expected["logged"]["train"]}}
    for found in run_distributed(train, world, model, {**axes, "expert_dispatcher": dispatcher}):
        assert_equal(found, expected, 1e-11)


REFUSED: dict[str, tuple[type[Trained], dict[str, Any], str]] = {
    "no experts": (OwnLoss, {"expert": 2}, "expert=2, but OwnLoss has no experts to divide"),
    "too many": (Mixtral, {"expert": 4}, "expert=4 does not divide data x context = 2 x 1"),
}


def refuse(rank: int, world: int, case: str) -> str:
    kind, options, _ = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, kind, Texts("whole"), **options)
    return str(info.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str) -> None:
    for message in run_distributed(refuse, 2, case):
        assert re.search(REFUSED[case][2], message), message


class NaNOnRank1(Grouped):
    """Its loss is NaN on one rank, in one step."""

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return loss * float("nan") if batch_index == 1 and dist.get_rank() == 1 else loss


def report(rank: int, world: int, folder: str) -> str:
    warnings.simplefilter("ignore")  # Lightning's advice
    strategy = MFSDPStrategy(expert=2)
    trainer = make_trainer(folder, world, strategy=strategy, callbacks=[NaNGradientReporter()], max_steps=2)
    with pytest.raises(NonFiniteGradientError) as caught:
        trainer.fit(NaNOnRank1(), DataLoader(Texts("whole"), batch_size=2))
    return str(caught.value)


def test_a_nan_that_reaches_the_experts_of_other_ranks_is_reported_with_the_rank_that_had_it(tmp_path: Path) -> None:
    first, of_loss, *lines = run_distributed(report, 2, str(tmp_path))[0].splitlines()
    assert "loss" in of_loss
    assert re.search(r"9 parameters, on rank 1; first unit in backward order: blocks\.1\.experts$", first), first
    of_experts = [line for line in lines if line.endswith("whose experts compute for tokens of other ranks too")]
    assert len(of_experts) == 4
    assert all(": NaN on rank 1" in line for line in lines[:-1] if line not in of_experts)
