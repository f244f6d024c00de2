"""What works with a tensor axis and with an expert axis, a test for each cell of the tables in the docs."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import load_checkpoint
from lightning_mfsdp.optim import Muon
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.pairwise import pairwise
from tests.lightning.models import full_state, make_trainer, strict_warnings
from tests.lightning.test_context import LENGTH, ROWS, Texts, Trained, assert_equal, fit
from tests.lightning.test_context_features import (
    OF_THE_STEP,
    WORKS,
    ByHand,
    Predicting,
    predict,
    save_in_the_background,
)
from tests.lightning.test_expert import Mixtral
from tests.lightning.test_tensor import Tied, Wide


class Manual(ByHand, Wide):
    """Two backwards in a step, whose gradients are added."""


class Frozen(Tied):
    """The first layer and the shared embedding are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.layers[0].requires_grad_(False)
        self.model.model.embed_tokens.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


class Adapted(Wide):
    """LoRA around divided layers, with dropout before it, and a head that is trained as a whole."""

    def __init__(self) -> None:
        super().__init__()
        peft = pytest.importorskip("peft")
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")  # peft asks transformers for it
        torch.manual_seed(1)
        options = peft.LoraConfig(
            r=4,
            lora_dropout=0.2,
            init_lora_weights=False,
            target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"],
            modules_to_save=["lm_head"],
        )
        self.model = peft.get_peft_model(self.model, options, autocast_adapter_dtype=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


class Generates(Wide):
    """Continues prompts inside a step."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        wanted = {"output_logits": True, "return_dict_in_generate": True}
        made = self.model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0, **wanted)
        self.log("generated", made.sequences[:, LENGTH:].double().sum(), sync_dist=True, batch_size=1)
        self.log("first", made.logits[0].amax(-1).double().mean(), sync_dist=True, batch_size=1)


AXES: dict[str, tuple[int, dict[str, Any], type[Trained]]] = {
    "tensor": (2, {"tensor": 2}, Wide),
    "expert": (2, {"expert": 2}, Mixtral),
    "expert and tensor": (4, {"expert": 2, "tensor": 2}, Mixtral),
}
KINDS: dict[str, tuple[type[Trained], dict[str, Any]]] = {
    "manual optimization": (Manual, {"gradient_clip_val": None}),
    "frozen layers": (Frozen, {}),
    "LoRA": (Adapted, {}),
    "LoRA of sharded weights, recomputed": (Adapted, {"recompute": {"method": "uniform"}}),
    "generate": (Generates, {}),
    "free_gradients": (Wide, {"free_gradients": True}),
    "count of tokens": (Wide, {"loss_count": "tokens"}),
}
WITH_TENSOR_ALONE = ("compile", "tiled MLP", *KINDS)


def axes_of(name: str) -> list[str]:
    """Those that a feature is tried with."""
    return ["tensor"] if name in WITH_TENSOR_ALONE else list(AXES)


# Of 40 s; and what another one comes to as well, here or in test_context_features.py.
LATER = ("compile", "LoRA", "recompute", "accumulation", "manual optimization")
CELLS = [
    pytest.param(axes, name, marks=[pytest.mark.nightly] if name in LATER else [])
    for name, axes in pairwise((*WORKS, *KINDS), AXES, possible=lambda name, axes: axes in axes_of(name), together=1)
]


def train(rank: int, world: int, kind: type[Trained], options: dict[str, Any], double: bool) -> dict[str, Any]:
    with in_double() if double else nullcontext():
        return fit(rank, world, kind, Texts("whole"), **options)


@cache
def of_one_rank(kind: type[Trained], options: tuple[tuple[str, Any], ...], double: bool) -> dict[str, Any]:
    """The same training without axes and without the feature, which several cells have in common."""
    found: dict[str, Any] = run_distributed(train, 1, kind, dict(options), double)[0]
    return found


@pytest.mark.parametrize(("axes", "name"), CELLS)
def test_a_feature_works(axes: str, name: str) -> None:
    world, sizes, kind = AXES[axes]
    kind, options = KINDS.get(name) or (kind, WORKS[name])
    double = name != "compile"
    of_the_step = tuple((key, value) for key, value in options.items() if key in OF_THE_STEP)
    expected = dict(of_one_rank(kind, of_the_step, double))
    if "expert" in axes:
        expected["logged"] = {"train": expected["logged"]["train"]}
    for found in run_distributed(train, world, kind, {**sizes, **options}, double):
        assert_equal(found, expected, 2e-5 if name == "compile" and "expert" in axes else 1e-11)


class Predicts(Predicting, Wide):
    """With heads for each rank."""


@pytest.mark.parametrize(
    "options", [{"tensor": 2}, pytest.param({"tensor": 2, "context": 2}, marks=pytest.mark.nightly)], ids=str
)
def test_ranks_of_a_tensor_group_predict_the_same_samples(options: dict[str, Any]) -> None:
    (expected,) = run_distributed(predict, 1, Predicts, {})
    ranks = run_distributed(predict, 4, Predicts, options)
    for first, second in (ranks[:2], ranks[2:]):
        assert first.keys() == second.keys()
    assert sorted(index for found in ranks[::2] for index in found) == sorted(expected)
    for found in ranks:
        for index, row in found.items():
            torch.testing.assert_close(row, expected[index], rtol=1e-6, atol=1e-7, msg=str(index))


def test_a_save_in_the_background_has_whole_weights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_distributed(save_in_the_background, 2, folder, Wide, {"tensor": 2})[0]
        saved = load_checkpoint(f"{folder}/saved", weights_only=False)["state_dict"]
    for name, value in found.items():
        assert torch.equal(saved[name], value), name


class Saves(Wide):
    """After the second step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved")


def resume(
    rank: int, world: int, folder: str, steps: int, options: dict[str, Any], path: str | None, **trainers: Any
) -> dict[str, Any]:
    """Norms of the steps from the checkpoint on, if there is one, and the weights after them."""
    strict_warnings()
    model = Saves()
    trainer = make_trainer(
        folder,
        world,
        strategy=MFSDPStrategy(**options),
        max_steps=steps,
        limit_val_batches=0,
        use_distributed_sampler=True,
        **{"precision": "64-true", **trainers},
    )
    tensor = options.get("tensor", 1)
    loader = DataLoader(Texts("whole"), batch_size=ROWS * tensor * options.get("context", 1) // world)
    trainer.fit(model, loader, ckpt_path=path)
    return {"norms": model.norms, "state": full_state(model)}


@pytest.mark.parametrize("kind", ["sharded", pytest.param("full", marks=pytest.mark.nightly)])
def test_a_run_goes_on_from_a_checkpoint_of_another_mesh(kind: str) -> None:
    """Two steps with one rank, the third with a tensor axis, and the same the other way round."""
    with tempfile.TemporaryDirectory() as folder:
        (expected,) = run_distributed(resume, 1, f"{folder}/whole", 3, {}, None)
        divided = {"tensor": 2, "state_dict_type": kind}
        for first, second in (((1, {"state_dict_type": kind}), (2, divided)), ((2, divided), (1, {}))):
            place = f"{folder}/{first[0]}"
            run_distributed(resume, first[0], place, 2, first[1], None)
            for found in run_distributed(resume, second[0], place, 3, second[1], f"{place}/saved"):
                assert found["norms"] == pytest.approx(expected["norms"][2:], rel=1e-12)
                for name, value in expected["state"].items():
                    torch.testing.assert_close(found["state"][name], value, rtol=1e-12, atol=1e-12, msg=name)


class TakesBatches(Wide):
    """The first rank of each tensor group has the right data, the other has others."""

    def on_train_start(self) -> None:
        if torch.distributed.get_rank() % 2:
            self.trainer.train_dataloader.dataset.tokens.zero_()  # type: ignore[union-attr]


def take(rank: int, world: int) -> dict[str, Any]:
    options = {"tensor": 2, "shared_batches": "broadcast", "loss_count": "tokens"} if world > 1 else {}
    return fit(rank, world, Wide if world == 1 else TakesBatches, Texts("whole"), **options)


def test_batches_of_the_first_rank_are_taken_where_that_is_requested() -> None:
    (expected,) = run_distributed(take, 1)
    for found in run_distributed(take, 4):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)


class Drops(Wide):
    """Dropout of whole activations: equal on the ranks of a tensor group, which share random states."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)
        self.kept: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.kept.append(self.drop(torch.ones(64, device=self.device)).sum().item())
        return super().loss(batch)


def drop(rank: int, world: int, **trainers: Any) -> list[float]:
    torch.manual_seed(100 + rank)  # as without seed_everything
    strict_warnings()
    with tempfile.TemporaryDirectory() as folder:
        trainers = {"precision": "64-true", **trainers}
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(tensor=2), limit_val_batches=0, **trainers)
        model = Drops()
        torch.manual_seed(100 + rank)
        trainer.fit(model, DataLoader(Texts("whole"), batch_size=2))
    return model.kept


def test_ranks_of_a_tensor_group_draw_equal_random_numbers_and_others_do_not() -> None:
    ranks = run_distributed(drop, 4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0] != ranks[2]


class WithMuon(Wide):
    def configure_optimizers(self) -> Any:
        matrices = [one for name, one in self.named_parameters() if one.dim() == 2 and "proj" in name]
        return Muon(matrices, lr=1e-2)


def refuse_muon(rank: int, world: int) -> str:
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, WithMuon, Texts("whole"), tensor=2)
    return str(info.value)


def test_muon_refuses_parts_of_matrices() -> None:
    for message in run_distributed(refuse_muon, 2):
        assert "Muon" in message


def refuse_adapters(rank: int, world: int) -> str:
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, Adapted, Texts("whole"), tensor=2, sequence_parallel=True)
    return str(info.value)


def test_adapters_are_refused_where_sequences_are_divided() -> None:
    for message in run_distributed(refuse_adapters, 2):
        assert "lm_head.original_module is inside an adapter" in message or "base_layer is inside an adapter" in message
