"""LightningModules as people write them, with a tensor axis: what they read, draw and count is that of one rank, or is refused."""

from __future__ import annotations

import random
import re
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, Subset
from torchmetrics import SumMetric

from lightning_mfsdp import MFSDPStrategy, ShardingError
from lightning_mfsdp.context_parallel import shift_labels
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.mesh import MeshSizes
from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.double import in_double
from tests.helpers.nights import NIGHT
from tests.lightning.models import make_trainer, strict_warnings
from tests.lightning.test_context import ROWS, VOCABULARY, Texts, Trained, assert_equal, fit
from tests.lightning.test_tensor import Own, Parallelized, Wide


def train(rank: int, world: int, kind: type[Trained], options: dict[str, Any]) -> dict[str, Any]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank + 3)
    with in_double():
        return fit(rank, world, kind, Texts("whole"), **options)


class ReadsLogits(Own):
    """An accuracy, and a second loss, from what the model returns beside its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        targets = shift_labels(batch["labels"])
        assert output.logits.shape[-1] == VOCABULARY
        assert output["logits"] is output.logits
        hit = output.logits.argmax(-1) == targets
        self.log("accuracy", hit[targets >= 0].double().mean(), sync_dist=True)
        self.log("train", output.loss, sync_dist=True)
        return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()


class ReadsTuples(ReadsLogits):
    """The same with a tuple."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, logits = self.model(**batch, return_dict=False)[:2]
        with torch.no_grad():
            self.log("largest", logits.max(), sync_dist=True)
        self.log("train", loss, sync_dist=True)
        return loss + 1e-2 * logits.float().square().mean()


class Draws(Own):
    """Numbers of Python and NumPy in a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (random.random() + np.random.beta(1, 1))
        self.log("train", loss, sync_dist=True)
        return loss


@pytest.mark.parametrize("kind", [ReadsLogits, ReadsTuples, Draws])
def test_trains_as_one_rank(kind: type[Trained]) -> None:
    (expected,) = run_distributed(train, 1, kind, {})
    for found in run_distributed(train, 2, kind, {"tensor": 2}):
        assert_equal(found, expected, 1e-11)


class Late(Wide):
    """Metrics that are made after the model was set up, and in a list."""

    def on_fit_start(self) -> None:
        self.rows = SumMetric()

    def on_train_start(self) -> None:
        self.others = [SumMetric()]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.rows.update(float(len(batch["labels"])))
        self.others[0].update(float(len(batch["labels"])))
        self.log("rows", self.rows, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


class Counts(Callback):
    """With a metric of its own."""

    def __init__(self) -> None:
        self.metric = SumMetric()
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.metric.update(float(len(batch["labels"])))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen += [self.metric.compute().item(), module.others[0].compute().item()]  # type: ignore[union-attr, operator, index]


def count(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    counts = Counts()
    found = fit(rank, world, Late, Texts("whole"), callbacks=[counts], **options)
    assert counts.metric.process_group is None
    return [found["logged"]["rows"], *counts.seen]


def test_metrics_made_late_or_kept_elsewhere_count_a_tensor_group_once() -> None:
    for world, options in ((1, {}), (2, {"tensor": 2}), *([(4, {"tensor": 2})] if NIGHT else [])):
        for found in run_distributed(count, world, options):
            assert found == [len(Texts("whole"))] * 3


class Dropping(Trained):
    """Dropout between the two layers of an MLP, where a rank has a part of the features, or behind them."""

    def __init__(self, inside: float = 0.0, behind: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, VOCABULARY)
        self.inside, self.behind = nn.Dropout(inside), nn.Dropout(behind)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"])
        logits = self.behind(self.down(self.inside(F.silu(self.up(x)))))
        return F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten())


class DropsInside(Dropping):
    def __init__(self) -> None:
        super().__init__(inside=0.5)


class DropsBehind(Dropping):
    def __init__(self) -> None:
        super().__init__(behind=0.5)


PLAN = {"up": "colwise", "down": "rowwise"}


def refuse(rank: int, world: int, kind: type[Trained]) -> str:
    with pytest.raises(ShardingError) as info:
        fit(rank, world, kind, Texts("whole"), tensor=2, tensor_plan=PLAN)
    return str(info.value)


def test_dropout_of_parts_needs_a_rule_and_is_that_of_one_rank_then() -> None:
    for message in run_distributed(refuse, 2, DropsInside):
        assert "inside (Dropout): its input is a part of a tensor" in message
        assert 'Add the rule "inside": "dropout_of_parts" to the plan' in message
    for kind, more in ((DropsBehind, {}), (DropsInside, {"inside": "dropout_of_parts"})):
        (expected,) = run_distributed(train, 1, kind, {})
        for found in run_distributed(train, 2, kind, {"tensor": 2, "tensor_plan": PLAN | more}):
            assert_equal(found, expected, 1e-12)


def train_twice(rank: int, world: int, first: dict[str, Any], second: dict[str, Any]) -> str:
    strict_warnings()
    model = Wide()
    loader = DataLoader(Texts("whole"), batch_size=ROWS)
    with tempfile.TemporaryDirectory() as folder:
        for options in (first, second):
            trainer = make_trainer(folder, world, strategy=MFSDPStrategy(**options), precision="64-true")
            try:
                trainer.fit(model, loader)
            except ValueError as error:
                assert options is second
                return str(error)
    return ""


def test_a_model_keeps_its_tensor_ranks() -> None:
    assert run_distributed(train_twice, 2, {"tensor": 2}, {"tensor": 2}) == ["", ""]
    for message in run_distributed(train_twice, 2, {"tensor": 2}, {}):
        assert "this run has 1 tensor ranks, and Wide is sharded already with 2" in message
    for message in run_distributed(train_twice, 2, {}, {"tensor": 2}):
        assert "this run has 2 tensor ranks, and Wide is sharded already with 1" in message


def mesh_by_lightning(rank: int, world: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    sizes = MeshSizes(mesh=mesh)
    connected = sizes.connect("cpu", world)
    ranks = [torch.distributed.get_process_group_ranks(group) for group in (connected.tensor, connected.different_data)]
    return sizes.of_world(world)["tensor"], sizes.data_place(world, rank), *ranks


def test_a_mesh_given_with_lightnings_names_has_a_tensor_axis() -> None:
    found = run_distributed(mesh_by_lightning, 4)
    assert found[0] == (2, (2, 0), [0, 1], [0, 2])
    assert found[3] == (2, (2, 1), [2, 3], [1, 3])


class ParallelizedTied(Parallelized):
    """One parameter for the embedding and the head."""

    ties_again = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def plan(self) -> dict[str, Any]:
        return {**super().plan(), "head": ColwiseParallel(output_layouts=Replicate())}

    def configure_model(self) -> None:
        super().configure_model()
        if self.ties_again:
            self.head.weight = self.tokens.weight


class ParallelizedApart(ParallelizedTied):
    """The same, and parallelize_module has made two of it."""

    ties_again = False


def test_a_tie_that_parallelize_module_has_cut_is_named() -> None:
    (expected,) = run_distributed(train, 1, ParallelizedTied, {})
    for found in run_distributed(train, 2, ParallelizedTied, {"tensor_parallel_size": 2}):
        assert_equal(found, expected, 1e-11)
    with pytest.raises(RankError, match=r"tokens\.weight and head\.weight have equal numbers and are two parameters"):
        run_distributed(train, 2, ParallelizedApart, {"tensor_parallel_size": 2})


class PredictsLoss(Wide):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def evaluate(rank: int, world: int, entry: str, case: str) -> str:
    strict_warnings()
    texts = Texts("whole")
    rows = range(8 - 4 * rank) if case == "numbers" else range(rank, len(texts), world)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(tensor=2), precision="64-true")
        with pytest.raises(ValueError, match="batch") as info:
            getattr(trainer, entry)(PredictsLoss(), DataLoader(Subset(texts, rows), batch_size=4))
    return str(info.value)


@pytest.mark.parametrize("entry", ["validate", "predict"])
def test_other_batches_of_an_evaluation_are_refused(entry: str) -> None:
    for message in run_distributed(evaluate, 2, entry, "numbers"):
        assert "between 1 and 2 batches" in message
    for message in run_distributed(evaluate, 2, entry, "contents"):
        assert re.search(f"batch 0 of {entry[:4]}.* loader 0 differs between ranks", message)


def reduce_by_fabric(rank: int, world: int) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=world, strategy=MFSDPFabricStrategy(tensor=2))
    fabric.launch()
    value = torch.tensor(float(1 + rank // 2))  # of a data rank
    reduced = [fabric.all_reduce(value.clone(), reduce_op=kind) for kind in ("sum", "mean")]
    return [one.item() for one in reduced]  # type: ignore[union-attr]


def test_a_sum_of_fabric_counts_a_tensor_group_once() -> None:
    assert run_distributed(reduce_by_fabric, 4) == [[3.0, 1.5]] * 4
