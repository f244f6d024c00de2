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


@pytest.mark.parametrize("method", ["ulysses", "gather"])
@pytest.mark.parametrize(
    ("kind", "text"), [("transformers", "padded"), ("transformers", "packed"), ("own attention", "whole")]
)
def test_two_gpus_train_as_one_with_whole_sequences(kind: str, text: str, method: str) -> None:
    (expected,) = run_distributed(fit, 1, kind, text, "32-true", {}, backend="nccl")
    options = {"context": 2, "context_method": method}
    for found in run_distributed(fit, 2, kind, text, "32-true", options, backend="nccl"):
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-4)
        assert found["logged"] == pytest.approx(expected["logged"], rel=2e-4)
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_in_bfloat16_losses_are_near_those_of_one_gpu(method: str) -> None:
    """With activation checkpointing: attention is called again in backward."""
    recompute = {"recompute": {"method": "uniform"}}
    (expected,) = run_distributed(fit, 1, "transformers", "padded", "bf16-mixed", recompute, backend="nccl")
    options = {"context": 2, "context_method": method, **recompute}
    for found in run_distributed(fit, 2, "transformers", "padded", "bf16-mixed", options, backend="nccl"):
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2)
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-2)
