"""Running statistics follow rank 0 where they are evaluated or saved, as DDP's do; broadcast_buffers=False leaves them."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings

KINDS = ("optim_grads_params", "no_shard")


class Normed(Classifier):
    """Notes the statistics it had when each of its hooks and steps ran, before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.seen: dict[str, list[Tensor]] = {}

    def note(self, where: str) -> None:
        self.seen.setdefault(where, []).append(self.norm.running_mean.clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("trained")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("sanity check" if self.trainer.sanity_checking else "validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("test")
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note("prediction")
        return super().predict_step(batch, batch_idx)


def data(rank: int, world: int) -> Any:
    return loader(4, 16, rank, world)


def runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    strategies: dict[str, Any] = {sharding: MFSDPStrategy(sharding=sharding) for sharding in KINDS}
    strategies["left"] = MFSDPStrategy(broadcast_buffers=False)
    strategies["ddp"] = "ddp"
    for name, strategy in strategies.items():
        model = seeded(Normed)
        model.norm.running_mean.fill_(float(rank))
        trainer = make_trainer(folder, world, strategy=strategy, num_sanity_val_steps=1, max_epochs=2)
        trainer.fit(model, data(rank, world), data(rank, world))
        results = [trainer.callback_metrics["val_loss"]]
        trainer.test(model, data(rank, world), verbose=False)
        trainer.predict(model, data(rank, world))
        found[name] = {**model.seen, "losses": torch.stack(results)}
        if name == "ddp":
            continue
        with torch.no_grad():
            model.norm.running_mean.fill_(10.0 + rank)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        found[name]["after saving"] = [model.norm.running_mean.clone()]
        with torch.no_grad():
            model.norm.running_mean.fill_(20.0 + rank)
        state = trainer.strategy.lightning_module_state_dict()
        found[name]["state dict"] = [state["norm.running_mean"].clone()]
        again = Normed()
        trainer.validate(again, data(rank, world), ckpt_path=f"{folder}/{name}.ckpt", verbose=False)
        found[name]["loaded"] = [again.seen["validation"][0]]
    found["synchronized"] = synchronized(rank, world)
    return found


def synchronized(rank: int, world: int) -> list[Tensor]:
    """Equal data on all ranks, as SyncBatchNorm has it in effect: statistics after each step and each validation."""
    model = seeded(Normed)
    trainer = make_trainer(tempfile.gettempdir(), world, max_epochs=1)
    calls: list[Tensor] = []
    model.on_validation_end = lambda: calls.append(model.norm.running_mean.clone())  # type: ignore[method-assign]
    model.on_train_batch_end = lambda *_: calls.append(model.norm.running_mean.clone())  # type: ignore[method-assign]
    trainer.fit(model, loader(4, 16), data(rank, world))
    return calls


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_distributed(runs, 2, str(tmp_path_factory.mktemp("buffers")))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("where", ["sanity check", "validation", "test", "prediction"])
def test_all_ranks_evaluate_with_the_statistics_of_rank_0_as_under_ddp(found: Any, name: str, where: str) -> None:
    first, second = (ranks[name] for ranks in found)
    assert not torch.equal(first["trained"][1], second["trained"][1]), "ranks saw different data"
    for one, other, ddp in zip(first[where], second[where], found[0]["ddp"][where], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, ddp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["losses"], found[0]["ddp"]["losses"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_go_on_with_the_buffers_that_are_saved(found: Any, name: str) -> None:
    for rank in found:
        assert rank[name]["after saving"][0].tolist() == [10.0] * 3
        assert rank[name]["state dict"][0].tolist() == [20.0] * 3
        assert rank[name]["loaded"][0].tolist() == [10.0] * 3


def test_without_the_option_each_rank_keeps_its_own(found: Any) -> None:
    for rank, one in enumerate(found):
        assert one["left"]["after saving"][0].tolist() == [10.0 + rank] * 3
        assert one["left"]["state dict"][0].tolist() == [20.0 + rank] * 3
        # Loading gives all the file's.
        assert one["left"]["loaded"][0].tolist() == [10.0] * 3
    assert not torch.equal(found[0]["left"]["validation"][0], found[1]["left"]["validation"][0])


def test_what_is_equal_on_all_ranks_stays_as_it_is(found: Any) -> None:
    first, second = (ranks["synchronized"] for ranks in found)
    assert len(first) == 5
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(first[-1], first[-2])


def go_on(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """Saved in the middle, gone on and resumed; the forward reads what the last one left."""
    strict_warnings()
    warnings.filterwarnings("ignore", message="The dirpath has changed from")

    class Reads(Normed):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.norm.running_var.add_(x.var())
            return super().forward(x + self.norm.running_var.mean())

    states = []
    for path in (None, str(Path(folder, "0", "epoch=0.ckpt"))):
        model = seeded(Reads)
        saves = ModelCheckpoint(f"{folder}/{len(states)}", "{epoch}", save_top_k=-1)
        trainer = make_trainer(folder, world, max_epochs=2, enable_checkpointing=True, callbacks=[saves])
        trainer.fit(model, data(rank, world), ckpt_path=path)
        states.append({**full_state(model), "mean": model.norm.running_mean.clone(), "var": model.norm.running_var})
    return states


def test_a_run_that_saved_goes_on_as_one_that_is_resumed(tmp_path: Path) -> None:
    for straight, resumed in run_distributed(go_on, 2, str(tmp_path)):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name
