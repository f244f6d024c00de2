"""A tensor axis under the Trainer: models of transformers train as on one rank, alone and beside a context axis."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.callbacks import NaNGradientReporter, ShardedEMA
from lightning_mfsdp.context_parallel import shift_labels, tokens_in_batch
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.nights import rest_at_night
from tests.helpers.pairwise import pairwise
from tests.lightning.test_context import VOCABULARY, Finetuned, OwnLoss, Texts, Trained, assert_equal, fit, transformers

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {"num_key_value_heads": 4, "use_cache": False, "attn_implementation": "sdpa"}


class Wide(OwnLoss):
    """As many KV heads as four ranks need, and a loss in float64."""

    def __init__(self) -> None:
        super().__init__(heads=4, kv_heads=4)


class Own(Finetuned):
    """The model's own loss, of logits that stay divided."""

    def __init__(self) -> None:
        super().__init__(heads=4, kv_heads=4)


class OfTheFamily(Own):
    """Another model."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**LLAMA, **options)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)


class Qwen3(OfTheFamily):
    """Norms of the queries and keys of each head."""

    def __init__(self) -> None:
        super().__init__("Qwen3", head_dim=8)


class Tied(OfTheFamily):
    """One weight for the embedding and the head, and biases."""

    def __init__(self) -> None:
        super().__init__("Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)


class OnMeta(Wide):
    """Built on the meta device, and initialized unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.config = self.model.config
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(5)
            with torch.device("meta"):
                self.model = transformers.LlamaForCausalLM(self.config)


MODELS: dict[str, type[Trained]] = {"own loss": Wide, "Llama": Own, "Qwen3": Qwen3, "tied": Tied, "meta": OnMeta}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 4": (4, {"tensor": 4}),
    "data 2, tensor 2": (4, {"tensor": 2}),
    "outer 2, tensor 2": (4, {"outer": 2, "tensor": 2, "outer_sharding": "optim"}),
    "context 2, tensor 2": (4, {"context": 2, "tensor": 2}),
    "sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "context 2, sequence parallel": (
        4,
        {"context": 2, "tensor": 2, "sequence_parallel": True, "recompute": {"method": "uniform"}},
    ),
    "Lightning's words": (4, {"data_parallel_size": 2, "tensor_parallel_size": 2}),
}


def train(rank: int, world: int, model: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    with (
        in_double()
    ):  # transformers computes norms and losses in float32, and Adam divides differences of rounding by each other
        return fit(rank, world, MODELS[model], Texts(kind), **options)


@pytest.fixture(scope="module")
def of_one_rank() -> Any:
    done: dict[tuple[str, str], Any] = {}

    def of(model: str, kind: str) -> Any:
        if (model, kind) not in done:
            (done[model, kind],) = run_distributed(train, 1, model, kind, {})
        return done[model, kind]

    return of


ROWS = pairwise(
    list(MODELS), list(MESHES), ["whole", "padded"], ["optim_grads_params", "optim_grads", "optim"], together=1
)


# Each of the models; axes that are left to the night have tests of their own on a push, in tests/tensor_parallel and below.
LATER = ("tensor 4", "data 2, tensor 2", "outer 2, tensor 2", "context 2, tensor 2")


@pytest.mark.parametrize(
    ("model", "mesh", "kind", "sharding"), rest_at_night(ROWS, lambda model, mesh, *_: mesh not in LATER)
)
def test_trains_as_one_rank(of_one_rank: Any, model: str, mesh: str, kind: str, sharding: str) -> None:
    world, axes = MESHES[mesh]
    expected = of_one_rank(model, kind)
    options = dict(axes)
    if world > 2 and "context" not in axes and axes.get("tensor") != 4:
        # Two data ranks have unequal numbers of targets; one count over all of them is that of one rank.
        options["loss_count"] = "tokens"
        expected = {**expected, "logged": {"train": expected["logged"]["train"]}}
    for found in run_distributed(train, world, model, kind, {**options, "sharding": sharding}):
        assert_equal(found, expected, 1e-12)


class Measured(Wide):
    """Sums, counts and matrices of torchmetrics and of self.log."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mean = SumMetric(), MeanMetric()
        self.matrix = MulticlassConfusionMatrix(num_classes=VOCABULARY, ignore_index=-100)
        self.seen: dict[str, Tensor] = {}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        assert logits.size(-1) == VOCABULARY
        targets = shift_labels(batch["labels"])
        self.matrix.update(logits.argmax(-1).flatten(), targets.flatten())
        self.tokens.update((targets >= 0).sum())
        self.mean.update(targets.masked_fill(targets < 0, 0).double())
        self.log("tokens", self.tokens)
        self.log("mean", self.mean)
        self.log("rows", float(len(targets)), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen = {"matrix": self.matrix.compute(), "tokens": self.tokens.compute(), "mean": self.mean.compute()}
        self.matrix.reset()


def measure(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    kept: list[LightningModule] = []

    def made() -> Any:
        kept.append(Measured())
        return kept[0]

    found = fit(rank, world, made, Texts("whole"), **options)  # type: ignore[arg-type]
    return {**found, "seen": {name: value.clone() for name, value in kept[0].seen.items()}}  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {"tensor": 2}), pytest.param(4, {"tensor": 2, "loss_count": "tokens"}, marks=pytest.mark.nightly)],
)
def test_metrics_count_a_tensor_group_once(world: int, options: dict[str, Any]) -> None:
    (expected,) = run_distributed(measure, 1, {})
    for found in run_distributed(measure, world, options):
        torch.testing.assert_close(found["seen"]["mean"], expected["seen"]["mean"])
        for name in ("matrix", "tokens"):
            assert torch.equal(found["seen"][name], expected["seen"][name]), name
        assert found["logged"]["rows"] == expected["logged"]["rows"]


def with_features(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    callbacks = [ShardedEMA(decay=0.5), NaNGradientReporter("raise")]
    recompute = {"method": "uniform"}
    return fit(
        rank,
        world,
        Wide,
        Texts("whole"),
        callbacks=callbacks,
        recompute=recompute,
        accumulate_grad_batches=2,
        **options,
    )


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {"tensor": 2}), pytest.param(4, {"tensor": 2, "context": 2}, marks=pytest.mark.nightly)],
)
def test_accumulation_recomputation_averages_and_nan_reports_work(world: int, options: dict[str, Any]) -> None:
    (expected,) = run_distributed(with_features, 1, {})
    for found in run_distributed(with_features, world, options):
        assert_equal(found, expected, 1e-12)


class OtherBatches(Wide):
    """Ranks of one tensor group read different data."""

    def on_train_start(self) -> None:
        self.trainer.train_dataloader.dataset.tokens.add_(torch.distributed.get_rank())  # type: ignore[union-attr]


class Parallelized(Trained):
    """Layers of its own, divided by PyTorch's parallelize_module in configure_model as under ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def plan(self) -> dict[str, Any]:
        return {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "tokens": RowwiseParallel(input_layouts=Replicate()),
        }

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and "tensor_parallel" in (mesh.mesh_dim_names or ()):
            parallelize_module(self, mesh["tensor_parallel"], self.plan())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"])
        x = x + self.down(F.silu(self.up(self.norm(x))))
        targets = shift_labels(batch["labels"])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum") / tokens_in_batch(
            targets
        )


class ParallelizedSequence(Parallelized):
    """The same with sequences divided in the norm: the gradients of its weights are terms of sums."""

    def plan(self) -> dict[str, Any]:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"])
        x = x + self.down(F.silu(self.up(self.norm(x))))
        targets = shift_labels(batch["labels"])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum") / tokens_in_batch(
            targets
        )


def train_parallelized(rank: int, world: int, kind: type[Trained], options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world, kind, Texts("whole"), **options)


PARALLELIZED = {2: {"tensor_parallel_size": 2}, 4: {"data_parallel_size": "auto", "tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        (ParallelizedSequence, 2),
        pytest.param(Parallelized, 2, marks=pytest.mark.nightly),
        pytest.param(Parallelized, 4, marks=pytest.mark.nightly),
        pytest.param(ParallelizedSequence, 4, marks=pytest.mark.nightly),
    ],
)
def test_layers_given_to_parallelize_module_train_as_on_one_rank(kind: type[Trained], world: int) -> None:
    (expected,) = run_distributed(train_parallelized, 1, kind, {})
    for found in run_distributed(train_parallelized, world, kind, {**PARALLELIZED[world], "units": ["Linear"]}):
        assert_equal(found, expected, 1e-12)


class TwoHeads(OwnLoss):
    """One head for each tensor rank, which context ranks cannot divide any further."""

    def __init__(self) -> None:
        super().__init__(heads=2, kv_heads=2)


def train_two_heads(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    with in_double():
        return fit(rank, world, TwoHeads, Texts("whole"), **options)


def test_the_method_of_a_context_axis_is_one_that_heads_allow_beside_a_tensor_axis() -> None:
    (expected,) = run_distributed(train_two_heads, 1, {})
    for found in run_distributed(train_two_heads, 4, {"context": 2, "tensor": 2}):
        assert_equal(found, expected, 1e-11)


class Experts(OwnLoss):
    """A layer that is no pair of divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=2))


class Dropping(Wide):
    """Dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.layers[0].dropout = nn.Dropout(0.1)


class Odd(Wide):
    """Sequences of 15 tokens."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss({name: value[:, 1:] for name, value in batch.items()})


class NoPlan(Trained):
    """Layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class FewHeads(OwnLoss):
    """Fewer KV heads than ranks."""

    def __init__(self) -> None:
        super().__init__(heads=4, kv_heads=1)


REFUSED: dict[str, tuple[type[Trained], dict[str, Any], str]] = {
    "batches": (
        OtherBatches,
        {},
        "batch 0 of the training loader differs between ranks of one context or tensor group",
    ),
    "no plan": (NoPlan, {}, "NoPlan has no tensor parallel plan: give one"),
    "heads": (FewHeads, {}, "1 KV heads cannot be divided over 2 tensor ranks|1 heads of 8 numbers cannot be divided"),
    "rules": (Wide, {"tensor_plan": {"model.nothing": "colwise"}}, "rules that match nothing.*model.nothing"),
    "ignored": (
        Wide,
        {"ignored_parameters": ["model.model.layers.0.mlp.up_proj.weight"]},
        "up_proj.weight .* is among ignored_parameters and a part of a larger one",
    ),
    "sequences of experts": (
        Experts,
        {"sequence_parallel": True},
        "sequence_parallel=True: .* leave sequence_parallel out",
    ),
    "dropped tokens": (Dropping, {"sequence_parallel": True}, "layers.0.dropout drops out 0.1 of the numbers"),
    "odd sequences": (
        Odd,
        {"sequence_parallel": True},
        r"of shape \(4, 15, 32\), expected .* S divisible by the 2 tensor ranks",
    ),
    "no axis": (Wide, {"tensor": 1, "sequence_parallel": True}, "sequence_parallel=True divides .* and there is none"),
    "product": (Wide, {"tensor": 3}, "outer x data x context x tensor = 1 x 1 x 1 x 3 = 3, but there are 2 ranks"),
}


def refuse(rank: int, world: int, case: str) -> str:
    kind, options, _ = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, kind, Texts("whole"), **{"tensor": 2, **options})
    return str(info.value)


@pytest.mark.parametrize("plan", ["colwise", {"up": 1}])
def test_a_plan_is_a_mapping_of_names(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"tensor_plan=.* expected a mapping from names"):
        MFSDPStrategy(tensor=2, tensor_plan=plan)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str) -> None:
    for message in run_distributed(refuse, 2, case):
        assert re.search(REFUSED[case][2], message), message
