"""What works with a context axis and what is refused, a test for each cell of the table in docs/parallelism.md."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import transformers
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.callbacks import ShardedThroughputMonitor
from lightning_mfsdp.checkpoint import load_checkpoint
from lightning_mfsdp.context_parallel import shift_labels
from lightning_mfsdp.mtp import MultiTokenPredictor
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import rest_at_night
from tests.lightning.models import full_state, make_trainer, strict_warnings
from tests.lightning.test_context import (
    ROWS,
    STEPS,
    VOCABULARY,
    Finetuned,
    OwnLoss,
    Texts,
    Trained,
    assert_equal,
    fit,
    ignore_what_gpus_say,
)

# Options of strategy and Trainer with which a fit comes to that of one rank.
WORKS: dict[str, dict[str, Any]] = {
    "compile": {"compile": {"backend": "aot_eager"}},
    "recompute": {"recompute": {"method": "uniform"}},
    "tiled MLP": {"recompute": {"method": "uniform", "tiled_modules": ["*.mlp"], "tiles": 2}},
    "offload": {"offload": "optimizer"},
    "accumulation": {"accumulate_grad_batches": 2, "accumulation": "sharded"},
    "reshard_after_forward": {"reshard_after_forward": False},
}
# Those of a step rather than of a feature: the reference has them, too.
OF_THE_STEP = ("accumulate_grad_batches", "gradient_clip_val", "max_epochs")


class ByHand(Trained):
    """Two backwards in a step, whose gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch) / 2
            self.manual_backward(loss)
        self.log("train", 2 * loss, sync_dist=True)
        self.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()


class Manual(ByHand, OwnLoss):
    """With a loss of its own."""


KINDS: dict[str, tuple[type[Trained], dict[str, Any]]] = {"manual optimization": (Manual, {"gradient_clip_val": None})}


def train(rank: int, world: int, kind: type[Trained], options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world, kind, Texts("padded"), **options)


@cache
def of_one_rank(kind: type[Trained], options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The same training with whole sequences and without the feature, which several rows have in common."""
    found: dict[str, Any] = run_distributed(train, 1, kind, dict(options))[0]
    return found


# With a tensor axis others are on a push, test_tensor_features.py.
@pytest.mark.parametrize(
    "name", rest_at_night((*WORKS, *KINDS), lambda name: name in ("recompute", "accumulation", "manual optimization"))
)
def test_a_feature_works_with_divided_sequences(name: str) -> None:
    kind, options = KINDS.get(name) or (OwnLoss, WORKS[name])
    expected = of_one_rank(kind, tuple((key, value) for key, value in options.items() if key in OF_THE_STEP))
    for found in run_distributed(train, 2, kind, {"context": 2, **options}):
        assert_equal(found, expected, 1e-12)


class Measured(Finetuned):
    """Metrics of tokens: each rank has some, and all of them belong to one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=VOCABULARY, ignore_index=-100)
        self.mean = torchmetrics.MeanMetric()
        self.computed: dict[str, Tensor] = {}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        real = batch["labels"] != -100
        self.total.update(real.sum())
        self.confusion.update(batch["input_ids"], batch["labels"])
        self.mean.update(batch["input_ids"].double()[real])
        self.log("count", real.sum().double(), sync_dist=True, reduce_fx="sum", batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.computed = {name: getattr(self, name).compute() for name in ("total", "confusion", "mean")}


def measure(rank: int, world: int, kind: type[Measured], options: dict[str, Any], **trainers: Any) -> dict[str, Any]:
    strict_warnings()
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
    warnings.filterwarnings("ignore", message=".*sums and counts are right")
    with tempfile.TemporaryDirectory() as folder:
        trainers = {"precision": "64-true", **trainers}
        trainer = make_trainer(
            folder, world, strategy=MFSDPStrategy(**options), use_distributed_sampler=True, **trainers
        )
        model = kind()
        rows = ROWS * options.get("context", 1) * options.get("tensor", 1) // world
        trainer.validate(model, DataLoader(Texts("whole"), batch_size=rows), verbose=False)
    computed = {**model.computed, "logged": trainer.callback_metrics["count"]}
    return {name: value.cpu() for name, value in computed.items()}


@pytest.mark.parametrize(("world", "context"), [pytest.param(2, 2, marks=pytest.mark.nightly), (4, 2)])
def test_metrics_of_tokens_are_those_of_one_rank(world: int, context: int) -> None:
    (expected,) = run_distributed(measure, 1, Measured, {})
    for found in run_distributed(measure, world, Measured, {"context": context}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)


class LogsItsOwn(Finetuned):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"]).logits
        self.log(
            "val",
            F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten()),
            sync_dist=True,
            batch_size=1,
        )


def warn(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(context=2), precision="64-true")
        trainer.validate(LogsItsOwn(), DataLoader(Texts("whole"), batch_size=ROWS), verbose=False)
    return [str(one.message) for one in caught if "targets" in str(one.message)]


def test_an_evaluation_warns_once_of_means_of_unequal_parts() -> None:
    for messages in run_distributed(warn, 2):
        assert len(messages) == 1
        assert re.search(
            r"batch 0 of validation loader 0: .* between \d+ and \d+ targets.*tokens_in_batch", messages[0]
        )


class Predicting(Trained):
    """The logits of whole sequences."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.cpu()


class Predicts(Predicting, Finetuned):
    """Those of a model of transformers."""


class Keeps(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.rows: dict[int, Tensor] = {}

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Tensor, batch_indices: Any, *_: Any) -> None:
        self.rows.update(zip(batch_indices, prediction, strict=True))


def predict(rank: int, world: int, kind: type[Trained], options: dict[str, Any], **trainers: Any) -> dict[int, Tensor]:
    """The logits of each sample that this rank predicted."""
    strict_warnings()
    writer = Keeps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            strategy=MFSDPStrategy(**options),
            callbacks=[writer],
            use_distributed_sampler=True,
            **{"precision": "64-true", **trainers},
        )
        trainer.predict(kind(), DataLoader(Texts("whole"), batch_size=3), return_predictions=False)
    return writer.rows


@pytest.mark.parametrize("shared_batches", ["compare", "broadcast"])
def test_predictions_are_of_whole_sequences_and_of_each_sample_once(shared_batches: str) -> None:
    (expected,) = run_distributed(predict, 1, Predicts, {})
    ranks = run_distributed(predict, 2, Predicts, {"context": 2, "shared_batches": shared_batches})
    assert sorted(index for found in ranks for index in found) == list(range(STEPS * ROWS))
    for found in ranks:
        for index, row in found.items():
            torch.testing.assert_close(row, expected[index], rtol=1e-6, atol=1e-7, msg=str(index))


def save_in_the_background(
    rank: int, world: int, folder: str, kind: type[Trained], options: dict[str, Any], **trainers: Any
) -> dict[str, Tensor]:
    """The weights that were saved."""
    strict_warnings()
    ignore_what_gpus_say(trainers)
    strategy = MFSDPStrategy(async_save=True, **options)
    trainer = make_trainer(folder, world, strategy=strategy, max_steps=2, **{"precision": "64-true", **trainers})
    model = kind()
    trainer.fit(model, DataLoader(Texts("whole"), batch_size=ROWS))
    trainer.save_checkpoint(f"{folder}/saved")
    trainer.strategy.finish_saving()
    return full_state(model)


def test_a_save_in_the_background_has_the_weights_that_were_trained() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trained = run_distributed(save_in_the_background, 2, folder, Finetuned, {"context": 2})[0]
        saved = load_checkpoint(f"{folder}/saved", weights_only=False)["state_dict"]
    for name, value in trained.items():
        assert torch.equal(saved[name], value), name


class WithRouter(Finetuned):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
            output_router_logits=True,
        )
        self.model = transformers.MixtralForCausalLM(config)


class Iterates(OwnLoss):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("it is refused before")


class PredictsAhead(OwnLoss):
    def __init__(self) -> None:
        super().__init__()
        self.ahead = MultiTokenPredictor(8, lambda: nn.Linear(8, 8), depth=1)


class Counted(Finetuned):
    def __init__(self) -> None:
        super().__init__()
        self.model.config.use_cache = True


REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any], str]] = {
    "a router's loss": (WithRouter, "whole", {}, "MixtralForCausalLM adds a loss of its router"),
    "dataloader_iter": (Iterates, "whole", {}, r"training_step\(dataloader_iter\) fetches its own batches"),
    "tokens further ahead": (
        PredictsAhead,
        "whole",
        {},
        r"ahead \(MultiTokenPredictor\) predicts tokens further ahead",
    ),
    "packed documents with a cache": (
        Counted,
        "packed",
        {},
        "position_ids of the batch begin again.*use_cache = False",
    ),
}


def refuse(rank: int, world: int, name: str) -> str:
    kind, texts, options, _ = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, kind, Texts(texts), context=2, **options)  # type: ignore[arg-type]
    return str(info.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_part_of_a_sequence_cannot_give_is_refused(name: str) -> None:
    for message in run_distributed(refuse, 2, name):
        assert re.search(REFUSED[name][3], message), message


def test_options_that_exclude_a_context_axis_say_so() -> None:
    with pytest.raises(ValueError, match="cuda_graph=True with a context axis"):
        MFSDPStrategy(context=2, cuda_graph=True)
    with pytest.raises(TypeError, match="context_dims='tokens': expected a mapping"):
        MFSDPStrategy(context=2, context_dims="tokens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context=0: expected a positive number of ranks"):
        MFSDPStrategy(context=0)
    with pytest.raises(ValueError, match="context_method='ring': expected one of 'auto', 'ulysses', 'gather'"):
        MFSDPStrategy(context=2, context_method="ring")  # type: ignore[arg-type]


class WithHparams(OwnLoss):
    """A configuration of the model among the hyperparameters."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        if config is not None:
            self.model = transformers.LlamaForCausalLM(config)
            self.save_hyperparameters()


def save_hparams(rank: int, world: int, folder: str, async_save: bool) -> str:
    strict_warnings()
    model = WithHparams(OwnLoss().model.config)
    trainer = make_trainer(
        folder, world, strategy=MFSDPStrategy(context=2, async_save=async_save), precision="64-true", max_steps=1
    )
    trainer.fit(model, DataLoader(Texts("whole"), batch_size=ROWS))
    trainer.save_checkpoint(f"{folder}/saved")
    trainer.strategy.finish_saving()
    return str(model.model.config._attn_implementation)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_configuration_is_saved_as_it_is_outside_of_the_run(async_save: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_distributed(save_hparams, 2, folder, async_save) == ["sdpa", "sdpa"]
        saved = load_checkpoint(f"{folder}/saved", weights_only=False)
    assert saved["hyper_parameters"]["config"]._attn_implementation == "sdpa"


def count_in_eval_mode(rank: int, world: int, loss_count: str) -> list[float]:
    """As of a model from `from_pretrained`, which Lightning leaves in eval mode."""
    model = Finetuned()
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        strategy = MFSDPStrategy(loss_count=loss_count)  # type: ignore[arg-type]
        trainer = make_trainer(folder, world, strategy=strategy, precision="64-true", use_distributed_sampler=True)
        trainer.fit(model, DataLoader(Texts("whole"), batch_size=ROWS // world))
    return model.norms


def test_tokens_of_all_ranks_are_counted_without_a_context_axis_where_that_is_requested() -> None:
    (expected,) = run_distributed(count_in_eval_mode, 1, "auto")
    for found in run_distributed(count_in_eval_mode, 2, "tokens"):
        assert found == pytest.approx(expected, rel=2e-6)
    for found in run_distributed(count_in_eval_mode, 2, "auto"):
        assert found != pytest.approx(expected, rel=1e-4)


def unequal_loaders(rank: int, world: int) -> str:
    strict_warnings()
    texts = torch.utils.data.Subset(Texts("whole"), range(4 * (2 + rank)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(context=2), precision="64-true")
        with pytest.raises(ValueError) as info:  # noqa: PT011  what it says is compared
            trainer.fit(OwnLoss(), DataLoader(texts, batch_size=4))
    return str(info.value)


def test_loaders_of_other_lengths_in_a_context_group_are_refused() -> None:
    for message in run_distributed(unequal_loaders, 2):
        assert "between 2 and 3 batches" in message


def throughput_of(rank: int, world: int) -> list[float]:
    monitor = ShardedThroughputMonitor(batch_size_fn=lambda batch: len(batch["input_ids"]), window_size=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            strategy=MFSDPStrategy(context=2),
            precision="64-true",
            callbacks=[monitor],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
        )
        trainer.fit(OwnLoss(), DataLoader(Texts("whole"), batch_size=ROWS))
        return sorted({one.world_size for one in monitor._throughputs.values()})


def test_throughput_counts_a_batch_once_for_the_ranks_that_divide_it() -> None:
    assert run_distributed(throughput_of, 4) == [[2]] * 4
