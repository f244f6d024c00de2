"""FP8 with a tensor axis: Transformer Engine itself on two GPUs, beside one GPU with whole layers."""

from __future__ import annotations

import tempfile
import traceback
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.te import library
from tests.gpu.test_te import needs_engine
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import full_state, make_trainer, seeded
from tests.lightning.test_context import ROWS as TEXTS
from tests.lightning.test_context import Texts, Trained
from tests.lightning.test_tensor import Wide
from tests.lightning.test_tensor_features import Adapted
from tests.te.test_training import Net, fp8

DIM, WIDE = 256, 512
STEPS, ROWS = 12, 64
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
pytestmark = [pytest.mark.gpus2, needs_gpus(2), needs_engine()]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(Net):
    def __init__(self) -> None:
        super().__init__(dim=DIM)
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.scales: dict[str, Tensor] = {}

    def on_train_end(self) -> None:
        for name, module in self.named_modules():
            found = getattr(module, "fp8_meta", {}).get("scaling_fwd")
            if hasattr(found, "scale"):
                self.scales[name] = found.scale.clone().cpu()


# Recipe, options of FP8, options of the strategy.
CASES: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (None, {}, {}),
    "delayed": ("delayed", {}, {}),
    "delayed, recomputed": ("delayed", {}, {"recompute": {"method": "uniform"}}),
    "current": ("current", {}, {}),
    "block": ("block", {}, {}),
    "FP8 weights": ("current", {"fp8_weights": True}, {}),
    "FP8 weights of blocks": ("block", {"fp8_weights": True, "keep_high_precision": ["inputs", "head"]}, {}),
    "FP8 weights, delayed": ("delayed", {"fp8_weights": True}, {}),
    "fused": ("current", {"fuse_weight_gradients": True}, {}),
}


def data() -> DataLoader[Any]:
    x = torch.randn(ROWS * STEPS, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.argmax(1)), ROWS)


def fit(model: LightningModule, world: int, case: str, plan: dict[str, str] | None, steps: int = STEPS) -> None:
    recipe, options, more = CASES[case]
    precision: dict[str, Any] = {"precision": "bf16-mixed"} if recipe is None else {"plugins": [fp8(recipe, **options)]}
    strategy = MFSDPStrategy(tensor=world, tensor_plan=plan if world > 1 else None, units=["MLP"], **more)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder, world, accelerator="cuda", strategy=strategy, max_steps=steps, max_epochs=-1, **precision
        )
        trainer.fit(model, data())


def train(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            model = seeded(Stack)
            fit(model, world, case, PLAN)
            found[case] = torch.stack(model.losses).float().cpu(), full_state(model), model.scales
        except Exception:  # the test of this case raises it
            found[case] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (one,) = run_distributed(train, 1, backend="nccl")
    return one, run_distributed(train, 2, backend="nccl")


@pytest.mark.parametrize("case", CASES)
def test_parts_of_layers_train_as_whole_ones(trained: Any, case: str) -> None:
    one, two = trained
    assert isinstance(one[case], tuple), one[case]
    losses, state, scales = one[case]
    for ranks in two:
        assert isinstance(ranks[case], tuple), ranks[case]
        found, found_state, found_scales = ranks[case]
        torch.testing.assert_close(found[:4], losses[:4], rtol=5e-2, atol=0)
        torch.testing.assert_close(found, losses, rtol=0.25, atol=0)
        assert losses[-3:].mean() < 0.9 * losses[:3].mean()
        assert {name: value.shape for name, value in found_state.items()} == {
            name: value.shape for name, value in state.items()
        }
        assert found_scales.keys() == scales.keys()
    first, second = two[0][case][2], two[1][case][2]
    if case.startswith("delayed"):
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(name.endswith("up") for name in first)


# Model, options of the strategy. MLPs of these models and factors of LoRA are too narrow for FP8.
AXES: dict[str, tuple[type[Trained], dict[str, Any]]] = {
    "context": (Wide, {"context": 2}),
    "tensor": (Wide, {"tensor": 2}),
    "sequence parallel": (Wide, {"tensor": 2, "sequence_parallel": True}),
    "LoRA": (Adapted, {"tensor": 2}),
}


def finetune(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, options) in AXES.items():
        if kind is Adapted and find_spec("peft") is None:
            continue
        try:
            model = kind()
            precision = fp8("current", keep_high_precision=["*.mlp.*", *(["*.lora_*"] if kind is Adapted else [])])
            strategy = MFSDPStrategy(**(options if world > 1 else {}))
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(
                    folder,
                    world,
                    accelerator="cuda",
                    strategy=strategy,
                    plugins=[precision],
                    max_steps=-1,
                    max_epochs=1,
                )
                trainer.fit(model, DataLoader(Texts("whole"), batch_size=TEXTS))
            found[name] = {"norms": model.norms, "loss": trainer.callback_metrics["train"].item()}
        except Exception:  # the test of this case raises it
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def finetuned() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (one,) = run_distributed(finetune, 1, backend="nccl")
    return one, run_distributed(finetune, 2, backend="nccl")


@pytest.mark.parametrize("name", AXES)
def test_a_model_of_transformers_trains_in_fp8_as_on_one_gpu(finetuned: Any, name: str) -> None:
    one, two = finetuned
    if name not in one:
        pytest.skip("needs peft")
    assert isinstance(one[name], dict), one[name]
    for found in two:
        assert isinstance(found[name], dict), found[name]
        assert found[name]["norms"] == pytest.approx(one[name]["norms"], rel=0.2)
        assert found[name]["loss"] == pytest.approx(one[name]["loss"], rel=3e-2)


class OfTheLibrary(Stack):
    """Layers that divide their weights by themselves, or whole ones."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.divides = divides

    def configure_model(self) -> None:
        te = library.load("pytorch")
        group = self.trainer.strategy.device_mesh.get_group("tensor") if self.divides else None
        size = 2 if self.divides else 1
        for block in self.blocks:
            options = {"tp_group": group, "tp_size": size, "params_dtype": torch.float32}
            block.up = te.Linear(DIM, WIDE, parallel_mode="column" if self.divides else None, **options)
            block.down = te.Linear(WIDE, DIM, parallel_mode="row" if self.divides else None, **options)


def divided_by_themselves(rank: int, world: int) -> dict[str, Any]:
    model = seeded(OfTheLibrary, divides=True)
    fit(model, world, "bfloat16", None)
    x = next(iter(data()))[0].cuda()
    with torch.no_grad():
        return {"state": full_state(model), "output": model(x).float().cpu()}


def whole(rank: int, world: int, state: dict[str, Tensor]) -> dict[str, Any]:
    model = seeded(OfTheLibrary, divides=False)
    fit(model, world, "bfloat16", None, steps=0)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all(name.endswith("._extra_state") for name in missing), missing
    x = next(iter(data()))[0].cuda()
    with torch.no_grad():
        return {"state": full_state(model), "output": model(x).float().cpu()}


def test_layers_of_the_library_that_divide_their_weights_have_whole_checkpoints() -> None:
    ranks = run_distributed(divided_by_themselves, 2, backend="nccl")
    state = ranks[0]["state"]
    assert state["blocks.0.up.weight"].shape == (WIDE, DIM)
    assert state["blocks.0.down.weight"].shape == (DIM, WIDE)
    assert state["blocks.0.up.bias"].shape == (WIDE,)
    (one,) = run_distributed(whole, 1, state, backend="nccl")
    for name, value in state.items():
        assert torch.equal(one["state"][name], value), name
    for found in ranks:
        torch.testing.assert_close(found["output"], one["output"], rtol=5e-2, atol=5e-2)
