"""All axes together on four GPUs: they train as one, and go on from each other's checkpoints."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, grad_norm
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import full_state, make_trainer, strict_warnings
from tests.lightning.test_context import ROWS, Texts, Trained
from tests.lightning.test_expert import Mixtral
from tests.lightning.test_tensor import Own

# Some gather through symmetric memory, which two hosts of two GPUs do not have, and a case that fails takes the processes of all with it.
pytestmark = [pytest.mark.gpus4, needs_gpus(4, apart=True)]

KINDS: dict[str, type[Trained]] = {"Llama": Own, "Mixtral": Mixtral}
# Model, precision, options on four ranks. Every data rank counts targets over all, so that unequal numbers do not matter.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "data, tensor": ("Llama", "32-true", {"tensor": 2}),
    "outer, tensor": ("Llama", "32-true", {"tensor": 2, "outer": 2, "outer_sharding": "optim"}),
    "context, tensor": ("Llama", "32-true", {"tensor": 2, "context": 2}),
    "symmetric memory": ("Llama", "32-true", {"tensor": 2, "symmetric_memory": True}),
    "context, symmetric memory": ("Llama", "32-true", {"context": 2, "symmetric_memory": True}),
    "sequence parallel": ("Llama", "32-true", {"tensor": 2, "sequence_parallel": True}),
    "data, expert": ("Mixtral", "32-true", {"expert": 2, "expert_dispatcher": "all_to_all"}),
    "context, expert": ("Mixtral", "32-true", {"expert": 4, "context": 2}),
    "expert, tensor": ("Mixtral", "32-true", {"expert": 2, "tensor": 2}),
    "bfloat16": ("Mixtral", "bf16-mixed", {"expert": 2, "tensor": 2, "recompute": {"method": "uniform"}}),
}


def fit(rank: int, world: int, case: str, folder: str, path: str | None = None) -> dict[str, Any]:
    kind, precision, options = CASES[case]
    strict_warnings()
    warnings.filterwarnings("ignore", message=".*grouped products")
    torch.manual_seed(0)
    model = KINDS[kind]()
    norms: list[float] = []
    model.on_before_optimizer_step = lambda optimizer: norms.append(grad_norm(model).item())  # type: ignore[method-assign]
    options = {"loss_count": "tokens", **options} if world > 1 else {}
    trainer = make_trainer(
        folder,
        world,
        accelerator="cuda",
        strategy=MFSDPStrategy(**options),
        precision=precision,
        gradient_clip_val=0.3,
        log_every_n_steps=1,
        use_distributed_sampler=True,
        limit_val_batches=0,
    )
    rows = ROWS * options.get("context", 1) * options.get("tensor", 1) // world
    trainer.fit(model, DataLoader(Texts("whole"), batch_size=rows), ckpt_path=path)
    trainer.save_checkpoint(f"{folder}/{case} {world}")
    logged = trainer.callback_metrics.get("train", torch.tensor(float("nan"), device="cpu"))
    return {"norms": norms, "logged": logged.item(), "state": full_state(model)}


def train(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All cases in one process a rank; what failed is told by its case."""
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            found[case] = fit(rank, world, case, folder)
        except Exception:  # the test of this case raises it
            found[case] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def trained() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (one,) = run_distributed(train, 1, folder, backend="nccl")
        yield one, run_distributed(train, 4, folder, backend="nccl"), folder


@pytest.mark.parametrize("case", CASES)
def test_four_gpus_train_as_one(trained: Any, case: str) -> None:
    one, four, _ = trained
    expected = one[case]
    assert isinstance(expected, dict), expected
    low = CASES[case][1] == "bf16-mixed"
    for ranks in four:
        found = ranks[case]
        assert isinstance(found, dict), found
        assert found["norms"] == pytest.approx(expected["norms"], rel=0.2 if low else 1e-3)
        assert found["logged"] == pytest.approx(expected["logged"], rel=3e-2 if low else 1e-3)
        for name, value in expected["state"].items() if not low else ():
            torch.testing.assert_close(found["state"][name], value, rtol=5e-3, atol=2e-3, msg=name)


def go_on(rank: int, world: int, folder: str) -> dict[str, Any]:
    """From the checkpoint of four ranks, with no batch left to train on: the weights are those that were saved."""
    return {
        case: fit(rank, world, case, folder, f"{folder}/{case} 4") for case in ("context, tensor", "expert, tensor")
    }


def test_one_gpu_reads_what_four_have_saved(trained: Any) -> None:
    _, four, folder = trained
    (found,) = run_distributed(go_on, 1, folder, backend="nccl")
    for case, read in found.items():
        for name, value in four[0][case]["state"].items():
            assert torch.equal(read["state"][name], value), (case, name)
