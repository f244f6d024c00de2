"""A context axis on GPUs: NCCL, bfloat16, and kernels that no CPU has."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, grad_norm
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, make_trainer, strict_warnings
from tests.lightning.test_context import ROWS, Finetuned, OwnModel, Texts, Trained
from tests.lightning.test_gpu import two_gpus

pytestmark = two_gpus

KINDS: dict[str, type[Trained]] = {"transformers": Finetuned, "own attention": OwnModel}


def fit(rank: int, world: int, kind: str, text: str, precision: str, options: dict[str, Any]) -> dict[str, Any]:
    strict_warnings()
    model = KINDS[kind]()
    norms: list[float] = []
    model.on_before_optimizer_step = lambda optimizer: norms.append(grad_norm(model).item())  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            accelerator="cuda",
            strategy=MFSDPStrategy(**options),
            precision=precision,
            gradient_clip_val=0.3,
            log_every_n_steps=1,
            use_distributed_sampler=True,
            limit_val_batches=1,
        )
        rows = ROWS * options.get("context", 1) // world
        trainer.fit(model, *(DataLoader(Texts(text), batch_size=rows) for _ in range(2)))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"norms": norms, "logged": logged, "state": full_state(model)}


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "padding": ("transformers", "padded", "32-true", {}),
    "documents": ("transformers", "packed", "32-true", {}),
    "own attention": ("own attention", "whole", "32-true", {}),
    # Attention is called again in backward.
    "bfloat16": ("transformers", "padded", "bf16-mixed", {"recompute": {"method": "uniform"}}),
}
METHODS = ("ulysses", "gather")


def train(rank: int, world: int) -> dict[str, Any]:
    """All cases in one process a rank: on whole sequences, or by each method."""
    options: dict[str, dict[str, Any]] = {"whole": {}}
    if world > 1:
        options = {method: {"context": world, "context_method": method} for method in METHODS}
    return {
        f"{case}, {name}": fit(rank, world, kind, text, precision, {**more, **axes})
        for case, (kind, text, precision, more) in CASES.items()
        for name, axes in options.items()
    }


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (one,) = run_distributed(train, 1, backend="nccl")
    return one, run_distributed(train, 2, backend="nccl")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_train_as_one_with_whole_sequences(trained: Any, case: str, method: str) -> None:
    one, two = trained
    expected = one[f"{case}, whole"]
    low = CASES[case][2] == "bf16-mixed"
    for ranks in two:
        found = ranks[f"{case}, {method}"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2 if low else 2e-4)
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-2 if low else 2e-4)
        if low:
            continue
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=2e-3, atol=2e-4, msg=name)
