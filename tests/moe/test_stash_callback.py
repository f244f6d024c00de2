"""PagedStash under a Trainer: the same weights as without, whatever happens to the pages, and what it says about itself."""

from __future__ import annotations

import builtins
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_mfsdp import MFSDPPrecision
from lightning_mfsdp.callbacks import PagedStash
from lightning_mfsdp.moe import OrdinarySaver, TopKRouter
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings
from tests.moe.toy_experts import ToyModel, batch

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

STEPS = 5
CROWDED = 2  # the step in which one rank has far more live rows than were recorded


class ToyModule(LightningModule):
    """Experts, dropout and a count in a buffer; in one step, on the last rank, more tokens go to experts."""

    def __init__(self, *, crowded: int | None = None, slack: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = ToyModel(layers=5, slack=slack)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.crowded = crowded
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        is_crowded = self.trainer.global_step == self.crowded and self.global_rank == self.trainer.world_size - 1
        for experts in self.model.experts:
            experts.threshold.fill_(-9.0 if is_crowded else 1.0)
        self.seen.add_(1)
        self.replaced = self.replaced + 1
        loss = self.model.loss(self.dropout(tokens))
        self.losses.append(float(loss.detach()))
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():  # somebody looks at gradients of inputs, say
            self.model.loss(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder, world: int = 1, *, module: ToyModule | None = None, stash: PagedStash | None = None, **options: Any):
    """Train; different batches on ranks. Returns the module and the trainer."""
    module = module or ToyModule()
    accumulate = options.get("accumulate_grad_batches", 1)
    settings = {"max_steps": STEPS, "val_check_interval": 2, "limit_val_batches": 1, "log_every_n_steps": 1, **options}
    trainer = make_trainer(folder, world, callbacks=[] if stash is None else [stash], **settings)
    torch.manual_seed(3)
    rank = trainer.global_rank
    train = [batch(world * index + rank, tokens=32) for index in range(STEPS * accumulate)]
    trainer.fit(module, DataLoader(train, batch_size=None), DataLoader([batch(77)], batch_size=None))
    return module, trainer


def weights(module: ToyModule) -> list[Tensor]:
    return [*full_state(module).values(), module.seen, module.replaced]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.fixture
def told(monkeypatch):
    """What goes to rank 0's log."""
    lines: list[str] = []
    monkeypatch.setattr(
        "lightning_mfsdp.callbacks.paged_stash.report.rank_zero_info", lambda text, **_: lines.append(text)
    )
    return lines


def test_training_is_to_the_bit_what_it_is_without_and_everything_is_logged(tmp_path, told):
    plain, _ = fit(tmp_path / "plain", accumulate_grad_batches=2)
    stash = PagedStash(page_rows=4, overflow="skip", device_factor=1.5, picture=tmp_path / "drawn" / "pages.png")
    logger = CSVLogger(tmp_path, name="logs", version=0)
    module, _ = fit(tmp_path, stash=stash, accumulate_grad_batches=2, logger=logger)
    assert_same(weights(module), weights(plain))
    assert module.losses == plain.losses
    assert stash.stash is None
    assert all(isinstance(experts.saver, OrdinarySaver) for experts in module.model.experts)

    assert "5 layers save their rows in pages" in told[0]
    assert all(f"model.experts.{layer}  ToyExperts" in told[0] for layer in range(5))
    assert "PagedStash saves" in told[1]
    assert (tmp_path / "drawn" / "pages.png").read_bytes()[:4] == b"\x89PNG"

    logged = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    statistics = stash.statistics
    assert statistics.saves == 2 * 2 * 4, "the last of 5 layers stays where it is"
    assert statistics.capacity_rows == 2 * 2 * 4 * 32 * 3
    assert 0 < statistics.live_rows < statistics.capacity_rows / 6
    assert 0 < statistics.fill <= 1
    assert statistics.ordinary_bytes == 5 * 32 * 3 * (8 + 16) * 4
    for name in ("live_rows", "capacity_rows", "fill", "spilled", "overflowed", "saved_bytes", "moved_bytes"):
        assert f"paged_stash/{name}" in logged
    assert f"{float(statistics.moved_bytes)}" in logged


def overflow_on_one_rank(rank, world, folder):
    """Weights and counts for each answer to too few pages, and what training without a stash gives."""
    strict_warnings()
    results = {}
    for name, overflow, accumulate in (
        ("plain", None, 1),
        ("keep", "keep", 1),
        ("rerun", "rerun", 1),
        ("skip", "skip", 1),
        ("plain of two", None, 2),
        ("rerun of two", "rerun", 2),
    ):
        stash = None if overflow is None else PagedStash(page_rows=4, overflow=overflow)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=".*found no pages.*")
            module, trainer = fit(
                folder,
                world,
                module=ToyModule(crowded=CROWDED),
                stash=stash,
                accumulate_grad_batches=accumulate,
            )
        results[name] = {
            "weights": weights(module),
            "losses": module.losses,
            "logged": float(trainer.callback_metrics["loss_epoch"]),
            "warnings": [str(one.message) for one in caught if "found no pages" in str(one.message)],
            "counts": None if stash is None else (stash.skipped, stash.reruns),
            "random": torch.get_rng_state(),
        }
    return results


def test_one_rank_runs_out_of_pages_and_all_ranks_act_alike(tmp_path):
    ranks = run_distributed(overflow_on_one_rank, 2, str(tmp_path))
    for name in ranks[0]:
        assert_same(ranks[0][name]["weights"], ranks[1][name]["weights"])
        assert ranks[0][name]["counts"] == ranks[1][name]["counts"]
    first, second = ranks
    for name, plain in (("keep", "plain"), ("rerun", "plain"), ("rerun of two", "plain of two")):
        for rank in ranks:
            assert_same(rank[name]["weights"], rank[plain]["weights"])
            assert torch.equal(rank[name]["random"], rank[plain]["random"]), "nothing is drawn twice"
            assert rank[name]["logged"] == rank[plain]["logged"], "nothing is logged twice"
    assert [rank["keep"]["counts"] for rank in ranks] == [(0, 0)] * 2
    assert [len(rank["keep"]["warnings"]) for rank in ranks] == [0, 1]
    assert first["rerun"]["counts"] == first["rerun of two"]["counts"] == (0, 1)
    assert first["skip"]["counts"] == (1, 0)
    assert "all ranks do this step again with what suffices" in first["rerun"]["warnings"][0]
    assert "step 2 on some rank, so all ranks leave this optimizer step out" in first["skip"]["warnings"][0]
    # Up to the step left out nothing differs, after it everything does.
    assert second["skip"]["losses"][: CROWDED + 1] == second["plain"]["losses"][: CROWDED + 1]
    assert second["skip"]["losses"][CROWDED + 1] != second["plain"]["losses"][CROWDED + 1]


def test_it_says_when_it_does_not_pay(tmp_path):
    class Dense(ToyModule):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            return self.model.loss(tokens * 0 + 5)

    module = Dense(slack=1)
    for experts in module.model.experts:
        experts.threshold.fill_(-1e9)
    with pytest.warns(UserWarning, match="PagedStash does not pay here: 100 % of the rows are live; pages take"):
        fit(tmp_path, module=module, stash=PagedStash(page_rows=4), max_steps=2)


def test_it_says_when_nothing_was_saved_and_when_rows_are_beyond_capacity(tmp_path):
    class Idle(ToyModule):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            return sum(dense(tokens).square().mean() for dense in self.model.dense)

    with pytest.warns(UserWarning, match="nothing needed pages in the recorded steps"):
        fit(tmp_path, module=Idle(), stash=PagedStash(), max_steps=2)

    class Beyond(ToyModule):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            ctx, saver = SimpleNamespace(), self.model.experts[0].saver
            saver.load(ctx, saver.save(ctx, [torch.ones(4, 8)], torch.tensor(5)))
            return super().training_step(tokens, batch_idx)

    with pytest.warns(
        UserWarning, match="1 tensors had a negative number of live rows, or more than their buffer has room"
    ):
        fit(tmp_path, module=Beyond(), stash=PagedStash(page_rows=4), max_steps=3)


def test_an_exception_leaves_layers_as_they_were_and_the_next_fit_trains(tmp_path):
    class Failing(ToyModule):
        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(tokens, batch_idx)
            if batch_idx == 2 and self.crowded is None:
                raise RuntimeError("the disk is on fire")
            return loss

    module, stash = Failing(), PagedStash(page_rows=4)
    with pytest.raises(RuntimeError, match="on fire"):
        fit(tmp_path, module=module, stash=stash)
    assert stash.stash is None
    assert all(isinstance(experts.saver, OrdinarySaver) for experts in module.model.experts)
    module.crowded = -1
    fit(tmp_path, module=module, stash=stash)
    assert stash.statistics.overflowed == 0


class Manual(ToyModule):
    """Two optimizer steps in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for half in tokens.chunk(2):
            optimizer.zero_grad()
            self.manual_backward(self.model.loss(half))
            optimizer.step()


def test_manual_optimization(tmp_path):
    plain, _ = fit(tmp_path, module=Manual())
    for overflow in ("keep", "skip"):
        stash = PagedStash(page_rows=4, overflow=overflow, device_factor=2.5)
        module, _ = fit(tmp_path, module=Manual(), stash=stash)
        assert_same(weights(module), weights(plain))
        assert stash.statistics.saves == 2 * 2 * 4
        assert stash.skipped == 0


class Leaving(ToyModule):
    """Gives up the first epoch in the middle of an accumulation, and takes its batches out of a dictionary."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def training_step(self, tokens: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(tokens.pop("tokens"), batch_idx)


def test_a_step_is_done_again_without_microbatches_that_never_were_part_of_it(tmp_path):
    found = []
    for stash in (None, PagedStash(page_rows=4, overflow="rerun", device_factor=0.5)):
        module = Leaving(crowded=CROWDED)
        trainer = make_trainer(
            tmp_path,
            1,
            callbacks=[] if stash is None else [stash],
            max_epochs=3,
            accumulate_grad_batches=2,
        )
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found no pages.*")
            trainer.fit(
                module,
                DataLoader(
                    [{"tokens": batch(index, tokens=32), "others": torch.zeros(32)} for index in range(6)],
                    batch_size=None,
                ),
            )
        found.append(weights(module))
    assert stash.reruns > 0
    assert_same(found[1], found[0])


class Hooked(ToyModule):
    """Its hooks write what its steps read: a temperature, its routers' biases, random numbers, and its batch; validation counts."""

    def __init__(self, *, crowded: int | None = None) -> None:
        super().__init__(crowded=crowded)
        self.router = TopKRouter(hidden_size=8, num_experts=4, top_k=1, balancing="bias", bias_step=0.1, init_std=0.5)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("validations", torch.zeros(()))
        self.found: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature.fill_(1 / (1 + batch_idx))
        self.noise = torch.rand(())
        self.router.balance()
        batch.add_(0.01)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.found.append((float(self.temperature), float(self.validations), float(self.router.bias.sum())))
        routed = self.router(tokens)
        drawn = torch.rand(()) + self.noise * (self.trainer.accumulate_grad_batches == 1)
        loss = super().training_step(tokens, batch_idx) * self.temperature * drawn
        return loss + routed.loss + routed.probabilities.square().mean() * (1 + self.validations)

    def on_validation_epoch_end(self) -> None:
        self.validations.add_(1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_done_again_from_what_hooks_and_validation_have_written_and_they_keep_it(tmp_path, accumulate):
    """A validation lies between two microbatches."""
    outcomes = {}
    for overflow in ("keep", "rerun"):
        stash = PagedStash(page_rows=4, overflow=overflow)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found no pages.*")
            module, _ = fit(
                tmp_path,
                module=Hooked(crowded=CROWDED),
                stash=stash,
                accumulate_grad_batches=accumulate,
                val_check_interval=3 if accumulate == 2 else 2,
            )
        assert (stash.reruns > 0) == (overflow == "rerun")
        outcomes[overflow] = module
    keep, rerun = outcomes["keep"], outcomes["rerun"]
    assert_same([*weights(rerun), *rerun.buffers()], [*weights(keep), *keep.buffers()])
    assert len({temperature for temperature, _, _ in keep.found}) == len(keep.found) == STEPS * accumulate
    assert len(rerun.found) == len(keep.found) + accumulate * stash.reruns
    assert list(dict.fromkeys(rerun.found)) == keep.found, "steps that are done again find what they found"


class Writing(ToyModule):
    """Changes its batch."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(tokens.mul_(2), batch_idx)


class Half(OrdinarySaver):
    load = None


def test_a_saver_without_the_protocol_is_named_and_left_alone(tmp_path, told):
    module = ToyModule()
    module.folder = nn.Linear(2, 2)
    module.folder.saver = "runs/7"
    fit(tmp_path, module=module, stash=PagedStash(page_rows=4), max_steps=1)
    assert "5 layers save their rows in pages" in told[0]
    assert "  folder: left alone, because its saver (str) has no method save and no load" in told[0]
    for experts in module.model.experts:
        experts.saver = Half()
    with pytest.raises(
        ValueError, match=r"model\.experts\.0 \(ToyExperts, because its saver \(Half\) has no method load\)"
    ):
        fit(tmp_path, module=module, stash=PagedStash())


def test_two_stashes_take_layers_of_their_own_or_are_refused(tmp_path):
    def both(first: str, second: str) -> list[PagedStash]:
        stashes = [
            PagedStash(page_rows=4, overflow="skip", device_factor=2.0, modules=[names]) for names in (first, second)
        ]
        trainer = make_trainer(tmp_path, 1, callbacks=stashes, max_steps=3)
        trainer.fit(module, DataLoader([batch(index) for index in range(3)], batch_size=None))
        return stashes

    module = ToyModule()
    assert [stash.statistics.saves for stash in both("*.experts.[0-2]", "*.experts.[34]")] == [4, 2]
    with pytest.raises(ValueError, match=r"model\.experts\.2 saves its rows in another stash already"):
        both("*.experts.[0-2]", "*.experts.[2-4]")
    assert all(isinstance(experts.saver, OrdinarySaver) for experts in module.model.experts)


class Counting(ToyModule):
    """Updates a metric in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(tokens, batch_idx)
        self.mean.update(loss.detach())
        return loss


def test_what_cannot_work_is_refused_with_advice(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="paged stash: page_rows=0, expected a whole number"):
        PagedStash(page_rows=0)
    with pytest.raises(ValueError, match=r"PagedStash\(modules='experts'\): expected patterns"):
        PagedStash(modules="experts")
    with pytest.raises(TypeError, match='PagedStash works with strategy="mfsdp", got SingleDeviceStrategy'):
        fit(tmp_path, stash=PagedStash(), strategy="auto")
    with pytest.raises(ValueError, match=r"names no layer that saves .*it fits no module at all"):
        fit(tmp_path, stash=PagedStash(modules=["*.experts.*", "encoder.*"]))
    with pytest.raises(ValueError, match=r"it fits model\.dense\.0 \(Linear\), .* which do not"):
        fit(tmp_path, stash=PagedStash(modules=["*.dense.*"]))
    with pytest.raises(ValueError, match=r"overflow=\"rerun\"\) with manual optimization"):
        fit(tmp_path, module=Manual(), stash=PagedStash(overflow="rerun"))
    with pytest.raises(ValueError, match="loss scaling has checked the"):
        fit(tmp_path, stash=PagedStash(overflow="skip"), plugins=[MFSDPPrecision("16-mixed")])
    with pytest.raises(RuntimeError, match="training_step updates the metric mean, which would count a repeated step"):
        fit(tmp_path, module=Counting(), stash=PagedStash(overflow="rerun"))
    with pytest.raises(RuntimeError, match="training_step writes into its batch in place"):
        fit(tmp_path, module=Writing(), stash=PagedStash(overflow="rerun"))

    def no_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real_import(name, *arguments, **options)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r"picture='pages\.png'\) draws with matplotlib, which cannot be imported"):
        PagedStash(picture="pages.png")
