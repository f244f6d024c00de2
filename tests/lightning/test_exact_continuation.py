"""A run that is resumed in new processes ends like the one that went on: losses and weights to the bit, wherever it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy
from lightning_mfsdp.callbacks import NaNGradientReporter, ShardedEMA
from lightning_mfsdp.trainer.continuation import is_inside_a_step
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    dataset,
    full_state,
    loader,
    make_trainer,
    strict_warnings,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

WORLD, BATCHES, EPOCHS, ACCUMULATE = 2, 8, 2, 3
# Batches after which to save: inside an epoch and inside a step, at the end of a step, inside a step of the second epoch.
SAVES = {"inside a step": 4, "after a step": 6, "in the second epoch, inside a step": 12}

CASES = [(kind, name) for kind in ("sharded", "full") for name in SAVES] + [("scaled sharded", "after a step")]


class Loader:
    """Shuffles each epoch by the global random state, and knows where it is."""

    def __init__(self, rank: int) -> None:
        x, y = dataset(BATCHES * 4 * WORLD).tensors
        self.x, self.y = x[rank::WORLD], y[rank::WORLD]
        self.order: list[int] = []
        self.position = 0
        self.resumed = False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[Tensor]]:
        if not self.resumed:
            self.order, self.position = torch.randperm(len(self.x)).tolist(), 0
        self.resumed = False
        while self.position < BATCHES:
            rows = self.order[4 * self.position : 4 * self.position + 4]
            self.position += 1
            yield [self.x[rows], self.y[rows]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]
        self.resumed = 0 < self.position < BATCHES


class Noisy(Classifier):
    """Dropout, noise from numpy, a schedule by step, and a weight that is left whole, whose gradient it reduces itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        noise = float(np.random.rand()) * 0.01
        return F.cross_entropy(self(self.dropout(batch[0]) + noise).float(), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert type(self.scale) is nn.Parameter
        dist.all_reduce(self.scale.grad)
        self.scale.grad /= dist.get_world_size()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(Callback):
    """Saves after so many batches in all."""

    def __init__(self, batches: int, path: str) -> None:
        self.left, self.path = batches, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)


class Moved(Callback):
    """The checkpoint is elsewhere while a run that was resumed from it trains: what it holds was read before, gradients too."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self._move(self.path, self.path.with_suffix(".moved"))

    def on_train_end(self, trainer: Any, model: Any) -> None:
        self._move(self.path.with_suffix(".moved"), self.path)

    def _move(self, before: Path, after: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            before.rename(after)
        dist.barrier()


def trainer_of(world: int, kind: str, callbacks: list[Callback], accelerator: str = "cpu") -> Any:
    """`kind` is a `state_dict_type`, with loss scaling if it begins with "scaled "."""
    scaled = kind.startswith("scaled ")
    whole = {"ignored_parameters": ["scale"], "state_dict_type": kind.removeprefix("scaled ")}
    strategy = MFSDPStrategy(units=["Block"], **whole)  # type: ignore[arg-type]
    growing = torch.amp.GradScaler(accelerator, init_scale=8.0, growth_interval=2)
    precision = MFSDPPrecision("16-mixed", scaler=growing) if scaled else MFSDPPrecision("32-true")
    return make_trainer(
        "",
        world,
        accelerator=accelerator,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        callbacks=[ShardedEMA(0.8), NaNGradientReporter(action="warn" if scaled else "raise"), *callbacks],
        plugins=[precision],
    )


def outcome(trainer: Any, model: Any) -> dict[str, Any]:
    average = next(callback for callback in trainer.callbacks if isinstance(callback, ShardedEMA))
    return {
        "losses": torch.stack(model.losses).cpu(),
        "weights": full_state(model),
        "average": {name: value.cpu() for name, value in average.parameter_state.rows().items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": trainer.global_step,
        "scaler": trainer.precision_plugin.state_dict(),
    }


def seeded(rank: int) -> Noisy:
    torch.manual_seed(11)
    model = Noisy()
    torch.manual_seed(100 + rank)
    np.random.seed(rank)
    return model


def straight(rank: int, world: int, folder: str, accelerator: str = "cpu") -> dict[str, Any]:
    """Saves on its way and goes on."""
    strict_warnings()
    found = {}
    for kind, name in CASES:
        model = seeded(rank)
        trainer = trainer_of(world, kind, [SaveAt(SAVES[name], f"{folder}/{kind}-{SAVES[name]}.ckpt")], accelerator)
        trainer.fit(model, Loader(rank))
        found[f"{kind}, {name}"] = outcome(trainer, model)
    model = seeded(rank)
    trainer = trainer_of(world, "sharded", [], accelerator)
    trainer.fit(model, Loader(rank))
    return {**found, "without a save": outcome(trainer, model)}


def resumed(rank: int, world: int, folder: str, accelerator: str = "cpu") -> dict[str, Any]:
    strict_warnings()
    found = {}
    for kind, name in CASES:
        torch.manual_seed(5)
        model = Noisy()
        path = f"{folder}/{kind}-{SAVES[name]}.ckpt"
        trainer = trainer_of(world, kind, [Moved(path)], accelerator)
        trainer.fit(model, Loader(rank), ckpt_path=path)
        found[f"{kind}, {name}"] = outcome(trainer, model)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("exact")
    return run_distributed(straight, WORLD, str(folder)), run_distributed(resumed, WORLD, str(folder)), folder


def assert_continued(resumed: dict[str, Any], went_on: dict[str, Any], batches: int) -> None:
    """The run that was resumed after so many batches came to what the other came to, bit for bit."""
    assert torch.equal(resumed["losses"], went_on["losses"][batches:])
    for part in ("weights", "average"):
        assert resumed[part].keys() == went_on[part].keys()
        for key, value in went_on[part].items():
            assert torch.equal(resumed[part][key], value), f"{part} {key}"
    assert resumed["lr"] == went_on["lr"]
    assert resumed["scaler"] == went_on["scaler"]
    assert resumed["steps"] == went_on["steps"] == EPOCHS * -(-BATCHES // ACCUMULATE)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_resumed_run_ends_like_the_one_that_went_on(runs: Any, kind: str, name: str) -> None:
    for before, after in zip(*runs[:2], strict=True):
        assert_continued(after[f"{kind}, {name}"], before[f"{kind}, {name}"], SAVES[name])
        assert bool(before[f"{kind}, {name}"]["scaler"]) is kind.startswith("scaled ")


def test_randomness_matters_in_these_runs(runs: Any) -> None:
    """Ranks and epochs draw numbers of their own, so that equal losses say something."""
    first, second = (found["sharded, after a step"]["losses"] for found in runs[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first[:BATCHES], first[BATCHES:])


def test_a_save_inside_a_step_changes_nothing_but_the_order_of_a_sum(runs: Any) -> None:
    for found in runs[0]:
        saved, other = found["sharded, inside a step"], found["without a save"]
        torch.testing.assert_close(saved["losses"], other["losses"], rtol=1e-3, atol=1e-4)
        assert torch.equal(found["sharded, after a step"]["losses"], other["losses"])


def test_only_a_save_inside_a_step_holds_gradients(runs: Any) -> None:
    for batches, expected in ((4, True), (6, False), (12, True)):
        saved = torch.load(runs[2] / f"full-{batches}.ckpt", weights_only=True)
        assert ("gradients" in saved["parameter_states"]) is expected, batches
        whole = [list(state["gradients"]) for state in saved["rank_states"]]
        assert whole == [["scale"] if expected else []] * WORLD


def elsewhere(rank: int, world: int, folder: str) -> dict[str, Any]:
    """On another number of ranks: gradients are there, random numbers are others."""
    strict_warnings()
    model = seeded(rank)
    trainer = trainer_of(world, "sharded", [])
    trainer.fit(model, Loader(rank), ckpt_path=f"{folder}/sharded-4.ckpt")
    return outcome(trainer, model)


def test_another_number_of_ranks_goes_on_from_inside_a_step(runs: Any) -> None:
    (found,) = run_distributed(elsewhere, 1, str(runs[2]))
    assert found["steps"] == runs[0][0]["sharded, inside a step"]["steps"]
    assert torch.isfinite(found["losses"]).all()


class Idle(Classifier):
    """A block takes no part in the loss. On one rank it has no gradient, so that weight decay and momentum leave it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


def without_gradients(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    strict_warnings()
    found = []
    for offload, path in ((None, None), ("optimizer", f"{folder}/idle.ckpt")):
        torch.manual_seed(3)
        model = Idle()
        strategy = MFSDPStrategy(units=["Block", "Linear"], offload=offload)
        options: dict[str, Any] = {"accumulate_grad_batches": ACCUMULATE, "strategy": strategy}
        trainer = make_trainer(
            folder, world, callbacks=[SaveAt(4, f"{folder}/idle.ckpt")] if not path else [], **options
        )
        trainer.fit(model, Loader(rank), ckpt_path=path)
        found.append({**full_state(model), "states": torch.tensor(len(trainer.optimizers[0].state))})
    return found


def test_what_had_no_gradient_inside_a_step_has_none_when_it_is_resumed(tmp_path: Path) -> None:
    ((straight, resumed),) = run_distributed(without_gradients, 1, str(tmp_path))
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


class Inside(Callback):
    """What is said of being inside a step, at each moment at which a checkpoint may be saved."""

    def __init__(self) -> None:
        self.seen: dict[str, list[bool]] = {"start": [], "end": [], "validation": [], "epoch": []}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen["start"].append(is_inside_a_step(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen["end"].append(is_inside_a_step(trainer))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.seen["validation"].append(is_inside_a_step(trainer))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.seen["epoch"].append(is_inside_a_step(trainer))


def moments(rank: int, world: int) -> dict[str, list[bool]]:
    """Ten batches, four in a step, a validation after six, and one before training."""
    strict_warnings()
    watch = Inside()
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 6, "num_sanity_val_steps": 1}
    trainer = make_trainer("", world, strategy=MFSDPStrategy(units=["Block"]), callbacks=[watch], **options)
    trainer.fit(Classifier(), loader(4, 40), loader(4, 8))
    watch.seen["after"] = [is_inside_a_step(trainer)]
    return watch.seen


def test_a_step_is_known_to_be_incomplete_wherever_a_checkpoint_may_be_saved() -> None:
    (seen,) = run_distributed(moments, 1)
    assert seen["end"] == [batch % 4 != 0 and batch != 10 for batch in range(1, 11)], "the last batch steps, too"
    assert seen["start"] == [batch % 4 != 0 for batch in range(10)], "this batch has added nothing yet"
    assert seen["validation"] == [False, True]
    assert seen["epoch"] == seen["after"] == [False]
