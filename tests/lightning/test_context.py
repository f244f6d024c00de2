"""A context axis under the Trainer: models of transformers, and those with attention of their own, train as with whole sequences."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_mfsdp import MFSDPStrategy, grad_norm
from lightning_mfsdp.callbacks import NaNGradientReporter, ShardedEMA
from lightning_mfsdp.context_parallel import context_attention, context_positions, shift_labels, tokens_in_batch
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import pairwise
from tests.lightning.models import full_state, make_trainer, strict_warnings

transformers = pytest.importorskip("transformers", minversion="5.0")

STEPS = 3
ROWS = 4  # of a step, over all data ranks
LENGTH = 16
VOCABULARY = 32

# Options of `fit` that are the Trainer's; the others are the strategy's.
OF_THE_TRAINER = (
    "accelerator",
    "precision",
    "max_epochs",
    "accumulate_grad_batches",
    "callbacks",
    "gradient_clip_val",
    "limit_val_batches",
)
# What is only said on GPUs: of steps that are logged again without a logger, and of layers too narrow for a kernel.
SAID_ON_GPUS = ("You called `self.log", ".*grouped products")


class Texts(Dataset[Any]):
    """Sequences whose targets are not equally many in each: some have none in their second half."""

    def __init__(self, kind: str, length: int = LENGTH) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(1, VOCABULARY, (ROWS * STEPS, length), generator=draw)
        self.labels = self.tokens.masked_fill(torch.rand(self.tokens.shape, generator=draw) < 0.3, -100)
        self.labels[::3, length // 2 :] = -100
        self.kind = kind
        self.mask = torch.ones_like(self.tokens)
        if kind == "padded":
            for row in range(len(self.tokens)):
                self.mask[row, length - row % 5 :] = 0
        self.positions = torch.arange(length).repeat(len(self.tokens), 1)
        if kind == "packed":
            self.positions = self.positions % (length // 2 - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        item = {"input_ids": self.tokens[row], "labels": self.labels[row].masked_fill(self.mask[row] == 0, -100)}
        if self.kind == "padded":
            item["attention_mask"] = self.mask[row]
        if self.kind == "packed":
            item["position_ids"] = self.positions[row]
        return item


class Trained(LightningModule):
    """What is logged, and gradient norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(grad_norm(self).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Finetuned(Trained):
    """As people write it."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=8,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = transformers.LlamaForCausalLM(config)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class Unpacked(Finetuned):
    """The same with arguments one by one: no positions, and labels from the inputs' own."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"], attention_mask=batch.get("attention_mask"), labels=batch["labels"]).loss


class OwnLoss(Finetuned):
    """A loss of its own, in float64."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        targets = shift_labels(batch["labels"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens_in_batch(targets)


class OwnModel(Trained):
    """Attention, positions and loss by public functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(2 * LENGTH, 32)
        self.mixed = nn.Linear(32, 96, bias=False)  # a key's bias has no gradient but rounding
        self.head = nn.Linear(32, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"]
        x = self.tokens(tokens) + self.places(context_positions(tokens.size(1), tokens.device))
        query, key, value = self.mixed(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + context_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        targets = shift_labels(batch["labels"])
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / tokens_in_batch(targets)


def ignore_what_gpus_say(trainers: dict[str, Any]) -> None:
    """If the options of a Trainer choose GPUs."""
    if trainers.get("accelerator") == "cuda":
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of what torch.compile imports
        for message in SAID_ON_GPUS:
            warnings.filterwarnings("ignore", message=message)


def fit(rank: int, world: int, kind: type[Trained], texts: Dataset[Any], **options: Any) -> dict[str, Any]:
    strict_warnings()
    warnings.filterwarnings("ignore", message="You are using the `dataloader_iter` step flavor")
    # Tracing a layer looks at the `.grad` of its input, which is no leaf in a chain of layers.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    sizes = {name: options.pop(name) for name in OF_THE_TRAINER if name in options}
    ignore_what_gpus_say(sizes)
    strategy = MFSDPStrategy(**options)
    model = kind()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            strategy=strategy,
            max_steps=-1,
            use_distributed_sampler=True,
            log_every_n_steps=1,
            **{"precision": "64-true", "gradient_clip_val": 0.3, "limit_val_batches": 1, **sizes},
        )
        tensor = options.get("tensor", options.get("tensor_parallel_size", 1))
        rows = ROWS * options.get("context", 1) * tensor // world
        trainer.fit(model, *(DataLoader(texts, batch_size=rows, shuffle=False) for _ in range(2)))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"norms": model.norms, "logged": logged, "state": full_state(model)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert len(found["norms"]) > 1
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert found["logged"].keys() >= expected["logged"].keys() >= {"train"}
    for name, value in expected["logged"].items():
        assert found["logged"][name] == pytest.approx(value, rel=max(tolerance, 1e-6)), name
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=tolerance, atol=tolerance, msg=name)


MODELS: dict[str, type[Trained]] = {
    "arguments of the batch": Finetuned,
    "arguments one by one": Unpacked,
    "a loss of its own": OwnLoss,
    "attention of its own": OwnModel,
}
TOLERANCE = {"a loss of its own": 1e-12, "attention of its own": 1e-12}  # transformers computes losses in float32
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "context 2": (2, {"context": 2}),
    "context 4": (4, {"context": 4}),
    "data 2, context 2": (4, {"context": 2}),
    "HFSDP": (4, {"outer": 2, "context": 2, "outer_sharding": "optim"}),
}
KINDS = ("whole", "padded", "packed", "not divisible")


def texts_of(kind: str) -> Texts:
    return Texts("whole", LENGTH - 3) if kind == "not divisible" else Texts(kind)


def train(rank: int, world: int, model: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world, MODELS[model], texts_of(kind), **options)


@pytest.fixture(scope="module")
def of_one_rank() -> Any:
    done: dict[tuple[str, str], Any] = {}

    def of(model: str, kind: str, **options: Any) -> Any:
        key = model, kind, str(options)
        if key not in done:
            (done[key],) = run_distributed(train, 1, model, kind, options)
        return done[key]

    return of


def reads_it(model: str, mesh: str, kind: str, method: str, sharding: str) -> bool:
    """One with attention of its own sees no padding and no documents in one process."""
    return model != "attention of its own" or kind in ("whole", "not divisible")


ROWS_OF_THE_TABLE = pairwise(
    [model for model in MODELS if model != "arguments one by one"],
    list(MESHES),
    list(KINDS),
    ["ulysses", "gather"],
    ["optim_grads_params", "optim_grads", "optim", "no_shard"],
    possible=reads_it,
    together=1,
)


@pytest.mark.parametrize(("model", "mesh", "kind", "method", "sharding"), ROWS_OF_THE_TABLE)
def test_trains_as_one_rank_with_whole_sequences(
    of_one_rank: Any, model: str, mesh: str, kind: str, method: str, sharding: str
) -> None:
    world, axes = MESHES[mesh]
    if sharding == "no_shard" and "outer_sharding" in axes:
        sharding = "optim"
    expected = of_one_rank(model, kind)
    if world > axes["context"]:  # in evaluations, each data rank's mean is that of its own tokens
        expected = {**expected, "logged": {"train": expected["logged"]["train"]}}
    for found in run_distributed(train, world, model, kind, {**axes, "context_method": method, "sharding": sharding}):
        assert_equal(found, expected, TOLERANCE.get(model, 2e-6))


def test_a_step_may_pass_arguments_one_by_one_and_no_positions(of_one_rank: Any) -> None:
    expected = of_one_rank("arguments one by one", "padded")
    for found in run_distributed(train, 2, "arguments one by one", "padded", {"context": 2}):
        assert_equal(found, expected, 2e-6)


def accumulate(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit(rank, world, OwnLoss, Texts("whole"), accumulate_grad_batches=2, **options)


def test_microbatches_of_unequal_counts_are_those_of_one_rank() -> None:
    (expected,) = run_distributed(accumulate, 1, {})
    for found in run_distributed(accumulate, 2, {"context": 2}):
        assert_equal(found, expected, 1e-12)


class OtherBatches(OwnLoss):
    """Ranks of one context group read different data."""

    def on_train_start(self) -> None:
        self.trainer.train_dataloader.dataset.tokens.add_(torch.distributed.get_rank())  # type: ignore[union-attr]


class EachItsOwn(Finetuned):
    """A mean over the rank's own targets."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), shift_labels(batch["labels"]).flatten())


class OwnAttention(OwnModel):
    """Attention to this rank's part alone."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.tokens(batch["input_ids"]).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x).sum()


class NoAttention(OwnModel):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.tokens(batch["input_ids"])).sum()


class Generates(Finetuned):
    """Continues prompts of whole sequences in a hook; in a step they would be parts."""

    def on_validation_batch_start(self, batch: dict[str, Tensor], *_: Any) -> None:
        whole = batch["input_ids"]
        assert whole.size(1) == LENGTH
        with torch.no_grad():
            made = self.model.generate(whole, max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert torch.equal(made[:, :LENGTH], whole)


class GeneratesInside(Finetuned):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.model.generate(batch["input_ids"][:, :3], max_new_tokens=2, pad_token_id=0)


REFUSED: dict[str, tuple[type[Trained], str]] = {
    "batches": (OtherBatches, "batch 0 of the training loader differs between ranks of one context or tensor group"),
    "means": (EachItsOwn, r"batch 0 of the training loader: .* between \d+ and \d+ targets.*tokens_in_batch"),
    "attention": (
        OwnAttention,
        "calls scaled_dot_product_attention with tensors of shapes.*Use lightning_mfsdp.context_parallel",
    ),
    "no attention": (NoAttention, "the step ended without attention of whole sequences"),
    "generate": (
        GeneratesInside,
        "was called with sequences of 3 tokens, in a step whose batch has 16 divided among 2 ranks",
    ),
}


def refuse(rank: int, world: int, case: str) -> str:
    kind, _ = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError)) as info:
        fit(rank, world, kind, Texts("whole"), context=2)
    return str(info.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(case: str) -> None:
    for message in run_distributed(refuse, 2, case):
        assert re.search(REFUSED[case][1], message), message


def generate(rank: int, world: int) -> None:
    fit(rank, world, Generates, Texts("whole"), context=2)


def test_hooks_see_whole_sequences_and_may_generate() -> None:
    run_distributed(generate, 2)


def with_features(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    callbacks = [ShardedEMA(decay=0.5), NaNGradientReporter("raise")]
    recompute = {"method": "uniform"}
    return fit(rank, world, OwnLoss, Texts("padded"), callbacks=callbacks, recompute=recompute, **options)


def test_activation_checkpointing_averages_and_nan_reports_work_with_divided_sequences() -> None:
    (expected,) = run_distributed(with_features, 1, {})
    for method in ("ulysses", "gather") if NIGHT else ("gather",):
        for found in run_distributed(with_features, 2, {"context": 2, "context_method": method}):
            assert_equal(found, expected, 1e-12)


class Read(Finetuned):
    """Which samples a rank reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[int]] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.read.append(batch["input_ids"][:, 0].tolist())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 1:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved")


def read_and_resume(rank: int, world: int, folder: str, steps: int, options: dict[str, Any]) -> list[list[int]]:
    """A shuffled epoch, from a checkpoint of its first step if there is one."""
    strict_warnings()
    torch.manual_seed(1)
    texts = Texts("whole")
    texts.tokens[:, 0] = torch.arange(len(texts.tokens))
    model = Read()
    trainer = make_trainer(
        folder,
        world,
        strategy=MFSDPStrategy(**options),
        precision="64-true",
        max_epochs=1,
        max_steps=steps,
        use_distributed_sampler=True,
        limit_val_batches=0,
    )
    rows = 4 * options.get("context", 1) // world
    path = f"{folder}/saved"
    trainer.fit(
        model, DataLoader(texts, batch_size=rows, shuffle=True), ckpt_path=path if os.path.exists(path) else None
    )
    return model.read


@pytest.mark.parametrize(
    "meshes",
    [(4, 2), *(pytest.param(meshes, marks=pytest.mark.nightly) for meshes in ((1, 2), (2, 1), (2, 4)))],
    ids=str,
)
def test_a_run_resumed_on_another_mesh_goes_on_with_the_samples_that_were_not_read(meshes: tuple[int, int]) -> None:
    """Of 4 ranks: so many divide a sequence."""
    with tempfile.TemporaryDirectory() as folder:
        read: list[int] = []
        for context, steps in zip(meshes, (1, 3), strict=True):
            ranks = run_distributed(read_and_resume, 4, folder, steps, {"context": context})
            for group in range(0, 4, context):
                assert all(own == ranks[group] for own in ranks[group : group + context]), "of one context group"
            read += [sample for own in ranks[::context] for batch in own for sample in batch]
    assert sorted(read) == list(range(12))


class TakesBatches(OwnLoss):
    """The first rank of each context group has the right data, the others have others."""

    def on_train_start(self) -> None:
        if torch.distributed.get_rank() % 2:
            self.trainer.train_dataloader.dataset.tokens.zero_()  # type: ignore[union-attr]


def take(rank: int, world: int, kind: str) -> dict[str, Any]:
    options = {"context": 2, "shared_batches": "broadcast"} if world > 1 else {}
    return fit(rank, world, OwnLoss if world == 1 else TakesBatches, Texts(kind), **options)


@pytest.mark.nightly  # on a push with a tensor axis, test_tensor_features.py
def test_batches_of_the_first_rank_are_taken_where_that_is_requested() -> None:
    (expected,) = run_distributed(take, 1, "padded")
    for found in run_distributed(take, 4, "padded"):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
