"""NormMonitor logs the norms of one process with plain PyTorch, whatever holds the rows."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, fully_shard_optimizer
from lightning_mfsdp.callbacks import NormMonitor
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import rest_at_night
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded, strict_warnings

STEPS = 4
BATCH = 8
STRATEGIES = {
    "all sharded": {},
    "optimizer state": {"sharding": "optim"},
    "nothing": {"sharding": "no_shard"},
    "two axes": {"outer_size": 2},
    "rows in param_groups": {"sharding": "optim_grads"},
}

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Metrics(Logger):
    """Keeps what it is given, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, dict[str, float]] = defaultdict(dict)

    name = property(lambda self: "metrics")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None are kept."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        assert not metrics.keys() & self.by_step[step].keys(), "each once"
        self.by_step[step].update(metrics)


class TwoGroups(Classifier):
    """Biases in a group with a name; a parameter that is frozen, and one without a gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inputs.bias.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(3, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        others = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others, "name": "others"}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


class RowsHeld(TwoGroups):
    """Its optimizer holds the rows of this rank, not what the module shows."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fully_shard_optimizer(super().configure_optimizers(), elementwise=True)


def train(
    world_size: int,
    folder: str,
    options: dict[str, Any],
    accumulate: int,
    monitor: NormMonitor,
    holds_rows: bool = False,
) -> Metrics:
    metrics = Metrics()
    model = seeded(RowsHeld if holds_rows else TwoGroups)
    trainer = make_trainer(
        folder,
        world_size,
        strategy=MFSDPStrategy(**options),
        logger=metrics,
        log_every_n_steps=2,
        callbacks=[monitor],
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
    )
    size = BATCH * STEPS * accumulate
    rank = trainer.global_rank
    trainer.fit(model, loader(BATCH // world_size, size=size, rank=rank, world_size=world_size))
    return metrics


def train_rank(
    rank: int, world_size: int, folder: str, options: dict[str, Any], accumulate: int
) -> dict[int, dict[str, float]]:
    strict_warnings()
    holds_rows = options == STRATEGIES["rows in param_groups"]
    return dict(train(world_size, folder, options, accumulate, NormMonitor(), holds_rows).by_step)


def expected(accumulate: int) -> dict[int, dict[str, float]]:
    """In steps 1 and 3: Lightning logs every second one."""
    model = seeded(TwoGroups)
    optimizer = model.configure_optimizers()
    batches = iter(loader(BATCH, size=BATCH * STEPS * accumulate))
    parameters = dict(model.named_parameters())
    found: dict[int, dict[str, float]] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (model.loss(next(batches)) / accumulate).backward()
        metrics = summed("grad", {name: p.grad for name, p in parameters.items() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        optimizer.step()
        after = {name: p.detach() for name, p in parameters.items()}
        metrics |= summed("weight", after) | summed("update", {name: after[name] - before[name] for name in after})
        if step % 2:
            found[step] = metrics
    return found


def summed(kind: str, tensors: dict[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    for name, tensor in tensors.items():
        layer = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.rpartition(".")[0] or name
        group = "1" if name.endswith("bias") else "others"
        keys = f"{kind}_norm/{name}", f"{kind}_norm_layer/{layer}", f"{kind}_norm_group/{group}", f"{kind}_norm_total"
        for key in keys:
            squares[key] += float(tensor.double().square().sum())
    return {key: math.sqrt(value) for key, value in squares.items()}


@pytest.mark.parametrize(
    ("world_size", "accumulate", "kind"),
    rest_at_night(
        [
            (2, 1, "all sharded"),
            (4, 2, "two axes"),
            (2, 2, "optimizer state"),
            (2, 1, "nothing"),
            (1, 1, "all sharded"),
            (2, 1, "rows in param_groups"),
        ],
        lambda world_size, accumulate, kind: kind not in ("all sharded", "nothing"),
    ),
)
def test_norms_are_those_of_one_process(world_size: int, accumulate: int, kind: str, tmp_path: Path) -> None:
    wanted = expected(accumulate)
    first, *others = run_distributed(train_rank, world_size, str(tmp_path), STRATEGIES[kind], accumulate)
    assert not any(metrics for other in others for metrics in other.values()), "rank 0 logs"
    assert first.keys() == wanted.keys()
    for step, metrics in wanted.items():
        assert first[step].keys() == metrics.keys()
        for name, value in metrics.items():
            assert first[step][name] == pytest.approx(value, rel=2e-4, abs=1e-7), (step, name)


class Alternating(Classifier):
    """Two optimizers by hand, one in even batches and one in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = self.blocks.parameters(), self.head.parameters()
        return [torch.optim.SGD(part, lr=0.1) for part in parts]


def test_optimizers_that_take_turns_are_logged_both_with_totals_of_their_own(tmp_path: Path) -> None:
    metrics = Metrics()
    monitor = NormMonitor(every_n_steps=2, levels=["group"])
    trainer = make_trainer(tmp_path, 1, logger=metrics, callbacks=[monitor], log_every_n_steps=1)
    trainer.fit(seeded(Alternating), loader(8, size=48))
    names = {step: {name for name in logged if name.startswith("grad")} for step, logged in metrics.by_step.items()}
    assert names == {
        1: {"grad_norm_group/1.0", "grad_norm_total/1"},
        2: {"grad_norm_group/0.0", "grad_norm_total/0"},
        3: {"grad_norm_group/1.0", "grad_norm_total/1"},
        4: {"grad_norm_group/0.0", "grad_norm_total/0"},
        5: {"grad_norm_group/1.0", "grad_norm_total/1"},
    }


def test_norms_of_bfloat16_have_the_digits_of_float32(tmp_path: Path) -> None:
    exact: list[float] = []

    class Exact(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            exact.append(
                math.sqrt(sum(float(p.grad.full_tensor().double().square().sum()) for p in pl_module.parameters()))
            )

    metrics = Metrics()
    callbacks = [Exact(), NormMonitor(every_n_steps=1, of=["grad"], levels=[])]
    make_trainer(tmp_path, 1, logger=metrics, callbacks=callbacks, precision="bf16-true", log_every_n_steps=1).fit(
        seeded(), loader(8)
    )
    assert [logged["grad_norm_total"] for logged in metrics.by_step.values()] == pytest.approx(exact, rel=1e-5)


def test_a_fit_that_breaks_off_leaves_its_picture(tmp_path: Path) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    path = tmp_path / "norms.png"
    monitor = NormMonitor(every_n_steps=1, picture=path)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, 1, callbacks=[monitor]).fit(seeded(Failing), loader(8))
    assert path.exists()


def test_a_trainer_that_never_logs_gets_no_norms(tmp_path: Path) -> None:
    metrics = Metrics()
    make_trainer(tmp_path, 1, logger=metrics, log_every_n_steps=0, callbacks=[NormMonitor()]).fit(seeded(), loader(8))
    assert not metrics.by_step


def test_what_is_not_asked_for_is_not_logged_and_every_n_steps_is_a_number_of_its_own(tmp_path: Path) -> None:
    monitor = NormMonitor(every_n_steps=1, of=["grad"], levels=["group"])
    found = train(1, str(tmp_path), {}, 1, monitor).by_step
    assert set(found) == set(range(STEPS))
    assert set(found[0]) == {"grad_norm_group/others", "grad_norm_group/1", "grad_norm_total"}


def test_a_picture_of_layers_is_drawn_after_the_fit(tmp_path: Path) -> None:
    path = tmp_path / "made" / "norms.png"
    train(1, str(tmp_path), {}, 1, NormMonitor(every_n_steps=1, picture=path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"of": ["gradient"]}, r"of=\['gradient'\].*expected a list of some of 'grad', 'weight', 'update'"),
        ({"of": "grad"}, "of='grad'"),
        ({"levels": ["module"]}, r"levels=\['module'\]"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormMonitor(**options)


def test_norms_that_would_go_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the Trainer has no logger"):
        make_trainer(tmp_path, 1, callbacks=[NormMonitor()]).fit(seeded(), loader(8))


def test_a_fit_without_a_logged_step_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="NormMonitor: no step of this fit was logged"):
        train(1, str(tmp_path), {}, 1, NormMonitor(every_n_steps=50))


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[NormMonitor()],
        default_root_dir=tmp_path,
    )
    with pytest.raises(TypeError, match='works with strategy="mfsdp"; got SingleDeviceStrategy'):
        trainer.fit(seeded(), loader(8))
