"""FP8 with a tensor axis, on the CPU with a small engine in the library's place: parts of layers compute as the whole ones do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import MFSDPStrategy, ShardingError
from lightning_mfsdp.tensor_parallel import apply_plan, part_of
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import full_state, make_trainer, seeded, strict_warnings
from tests.lightning.test_context import ROWS as TEXTS
from tests.lightning.test_context import Texts
from tests.lightning.test_tensor import Wide
from tests.te import fake_engine
from tests.te.test_training import Net, fp8, kinds, scales

DIM, WIDE = 32, 64
STEPS, ROWS = 4, 32
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class MLP(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, wide), nn.Linear(wide, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(Net):
    """Biases on both sides of what is divided."""

    def __init__(self, recompute: bool = False, wide: int = WIDE) -> None:
        super().__init__(recompute)
        self.blocks = nn.ModuleList(MLP(wide) for _ in range(2))


class Built(Stack):
    """Of the library's layers from the start."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = fake_engine.Linear(DIM, WIDE, device="cpu")
            block.down = fake_engine.Linear(WIDE, DIM, device="cpu")


class Narrow(Stack):
    """Half of a layer is too narrow for FP8."""

    def __init__(self) -> None:
        super().__init__(wide=16)


# Recipe, other options, options of the strategy, tolerance: with delayed scaling all ranks share scales, which are then those of the
# whole weights; otherwise a part has a scale of its own.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "delayed": ("delayed", {}, {}, 2e-3),
    "delayed, recomputed": ("delayed", {}, {"recompute": {"method": "uniform"}}, 2e-3),
    "current": ("current", {}, {}, 2e-2),
    "block": ("block", {"keep_quantized": True}, {}, 2e-2),
    "FP8 weights": ("current", {"fp8_weights": True}, {}, 2e-2),
    "fused": ("current", {"fuse_weight_gradients": True}, {}, 2e-2),
    "built": ("current", {"replace_layers": False}, {}, 2e-2),
}


# Beside a data axis the recipes that agree with more than a tensor group.
BESIDE_DATA = tuple(CASES) if NIGHT else ("delayed",)


def cases_of(world: int) -> tuple[str, ...]:
    return BESIDE_DATA if world == 4 else tuple(CASES)


def train(rank: int, world: int, tensor: int) -> dict[str, Any]:
    found = {}
    strict_warnings()
    place, ranks = rank // tensor, world // tensor
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 16, generator=draw).view(STEPS, ranks, ROWS // ranks, 16)
    own = x[:, place].flatten(0, 1)
    batches = DataLoader(TensorDataset(own, (own.sum(1) * 2).round().long() % 16), ROWS // ranks)
    for case in cases_of(world):
        recipe, options, more, _ = CASES[case]
        with fake_engine.installed():
            strategy = MFSDPStrategy(units=["MLP"], tensor=tensor, tensor_plan=PLAN if tensor > 1 else None, **more)
            model = seeded(Built if case == "built" else Stack)
            trainer = make_trainer(
                "unused", world, strategy=strategy, plugins=[fp8(recipe, **options)], max_steps=STEPS, max_epochs=-1
            )
            trainer.fit(model, batches)
            found[case] = {
                "losses": trainer.strategy.reduce(torch.stack(model.losses), reduce_op="mean"),
                "state": full_state(model),
                "scales": scales(model),
                "kinds": set(kinds()),
            }
    return found


@pytest.fixture(scope="module")
def expected() -> Any:
    (found,) = run_distributed(train, 1, 1)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_layers_train_as_whole_ones(expected: Any, world: int) -> None:
    for ranks in run_distributed(train, world, 2):
        for case in cases_of(world):
            recipe, _, _, tolerance = CASES[case]
            found, want = ranks[case], expected[case]
            assert found["kinds"] == want["kinds"] == {recipe}
            torch.testing.assert_close(found["losses"], want["losses"], rtol=tolerance, atol=0, msg=case)
            assert {name: value.shape for name, value in found["state"].items()} == {
                name: value.shape for name, value in want["state"].items()
            }
            assert found["scales"].keys() == want["scales"].keys()
            for name, value in want["scales"].items():
                if world == 4 and "scaling_bwd" in name:
                    continue  # gradients of the mean over half of the rows are larger
                torch.testing.assert_close(found["scales"][name], value, rtol=5e-2, atol=1e-4, msg=f"{case} {name}")


AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "context": (2, {"context": 2}),
    "tensor": (2, {"tensor": 2}),
    "context and tensor": (4, {"context": 2, "tensor": 2}),
    "sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
}


def finetune(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """A model of transformers, whose MLP is too narrow for FP8."""
    strict_warnings()
    with fake_engine.installed():
        trainer = make_trainer(
            "unused",
            world,
            strategy=MFSDPStrategy(**options),
            plugins=[fp8("delayed", keep_high_precision=["*.mlp.*"])],
            max_steps=-1,
            max_epochs=1,
            limit_val_batches=0,
            log_every_n_steps=1,
            logger=False,
        )
        model = Wide()
        trainer.fit(model, DataLoader(Texts("whole"), batch_size=TEXTS))
        return {"norms": model.norms, "loss": trainer.callback_metrics["train"].item(), "kinds": set(kinds())}


@cache
def finetuned_on_one_rank() -> dict[str, Any]:
    found: dict[str, Any] = run_distributed(finetune, 1, {})[0]
    return found


@pytest.mark.parametrize(
    "axes", [pytest.param(axes, marks=[pytest.mark.nightly] if " and " in axes else []) for axes in AXES]
)
def test_a_model_of_transformers_trains_in_fp8_as_on_one_rank(axes: str) -> None:
    world, options = AXES[axes]
    expected = finetuned_on_one_rank()
    for found in run_distributed(finetune, world, options):
        assert found["kinds"] == expected["kinds"] == {"delayed"}
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-2)
        assert found["loss"] == pytest.approx(expected["loss"], rel=5e-3)


def fit_narrow(world: int) -> None:
    strategy = MFSDPStrategy(tensor=2, tensor_plan=PLAN)
    trainer = make_trainer("unused", world, strategy=strategy, plugins=[fp8()], max_steps=1)
    x = torch.randn(ROWS, 16)
    trainer.fit(seeded(Narrow), DataLoader(TensorDataset(x, x.sum(1).long() % 16), ROWS))


def refuse(rank: int, world: int) -> str:
    with fake_engine.installed(), pytest.raises(ShardingError) as info:
        fit_narrow(world)
    return str(info.value)


def test_parts_that_are_too_small_for_the_recipe_are_refused() -> None:
    for message in run_distributed(refuse, 2):
        assert "blocks.0.up.weight: dim 0 of its shape [16, 32] leaves 8 for each of 2 tensor ranks" in message
        assert "sizes that are multiples of 16" in message
        assert "keep_high_precision=['blocks.0.up']" in message


class LayerNormMLP(fake_engine.TransformerEngineBaseModule):
    """Of the library: gate and up in one weight, divided each."""

    tp_size, set_parallel_mode, activation = 2, True, "swiglu"

    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight, self.fc2_weight = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(4, 4))
        self.fc1_bias, self.fc2_bias = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(4))
        for parameter, dim in ((self.fc1_weight, 0), (self.fc1_bias, 0), (self.fc2_weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def layers_of_the_library(rank: int, world: int) -> dict[str, Any]:
    LayerNormMLP.__module__ = fake_engine.Linear.__module__
    layers: dict[str, nn.Module] = {
        "whole": fake_engine.Linear(32, 32, device="cpu"),
        "column": fake_engine.Linear(32, 32, device="cpu", tp_size=world, parallel_mode="column"),
        "row": fake_engine.Linear(32, 32, device="cpu", tp_size=world, parallel_mode="row"),
        "mlp": LayerNormMLP(),
    }
    apply_plan(nn.ModuleDict(layers), None, dist.group.WORLD)
    found: dict[str, Any] = {
        f"{name}.{key}": part_of(parameter)
        for name, layer in layers.items()
        for key, parameter in layer.named_parameters()
    }
    late = fake_engine.Linear(32, 32, device="meta", tp_size=world, parallel_mode="column")
    with pytest.raises(ShardingError) as info:
        apply_plan(nn.ModuleDict({"late": late}), None, dist.group.WORLD)
    return found | {"refused": str(info.value)}


def test_layers_that_divide_their_weights_are_known_and_whole_ones_are_not_taken_for_parts() -> None:
    for rank, found in enumerate(run_distributed(layers_of_the_library, 2)):
        assert "late.weight (Linear) is on the meta device" in found.pop("refused")
        parts = {name: (part.dim, part.sections, part.rank) for name, part in found.items() if part is not None}
        assert parts == {
            "column.weight": (0, (32,), rank),
            "row.weight": (1, (32,), rank),
            "mlp.fc1_weight": (0, (8, 8), rank),
            "mlp.fc1_bias": (0, (8, 8), rank),
            "mlp.fc2_weight": (1, (8,), rank),
        }
