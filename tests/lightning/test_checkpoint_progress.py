"""Bars while checkpoints are saved and loaded; and the ways of Lightning's to read a checkpoint that take no strategy or no pickles."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.base import progress
from lightning_mfsdp.checkpoint import export_model, load_safetensors
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Bar:
    """Takes tqdm's place and notes what would be shown."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *, desc: str, total: int, **_: Any) -> None:
        self.desc, self.total, self.n, self.closed = desc, total, 0, False
        self.made.append(self)

    def update(self, more: int) -> None:
        assert more >= 0
        self.n += more

    def close(self) -> None:
        self.closed = True


class Silent(ProgressBar):
    """The Trainer's bar, of which nothing is seen."""

    def disable(self) -> None:
        """Lightning turns it off where the rank is not 0."""

    def enable(self) -> None:
        """And on again."""


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def fit(world: int, folder: str, kind: Any, callbacks: list[Any], path: str | None = None) -> tuple[Any, Any]:
    trainer = make_trainer(
        folder,
        world,
        strategy=MFSDPStrategy(units=["Block"], state_dict_type=kind),
        callbacks=callbacks,
        max_epochs=1 if path is None else 2,
        enable_progress_bar=bool(callbacks),
    )
    model = seeded()
    trainer.fit(model, loader(8), ckpt_path=path, weights_only=None if path is None else True)
    return trainer, model


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "tqdm", Bar)
        patch.setattr(progress, "BYTES_WORTH_A_BAR", 1)
        for kind in ("sharded", "full"):
            path = f"{folder}/{kind}.ckpt"
            trainer, model = fit(world, folder, kind, [Silent()])
            trainer.save_checkpoint(path)
            found[kind] = full_state(model)
            fit(world, folder, kind, [Silent()], path)
            found[f"{kind} bars"] = [(bar.desc, bar.n, bar.total, bar.closed) for bar in Bar.made]
            Bar.made.clear()
            fit(world, folder, kind, [], path)
            found[f"{kind} quiet"] = len(Bar.made)
        patch.setattr(progress, "BYTES_WORTH_A_BAR", 2**20)
        fit(world, folder, "sharded", [Silent()], f"{folder}/sharded.ckpt")
        found["small"] = len(Bar.made)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("progress")
    return folder, run_distributed(everything, 2, str(folder))


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_rank_zero_shows_all_bytes_of_saves_and_loads_where_there_are_bars(runs: Any, kind: str) -> None:
    folder, (first, second) = runs
    path = folder / f"{kind}.ckpt"
    bars = first[f"{kind} bars"]
    assert [desc for desc, *_ in bars] == [f"Saving {path}", f"Loading {path}", f"Loading optimizers of {path}"]
    assert all(0 < done == total and closed for _, done, total, closed in bars)
    assert second[f"{kind} bars"] == []
    assert first[f"{kind} quiet"] == second[f"{kind} quiet"] == 0


def test_small_checkpoints_show_no_bar(runs: Any) -> None:
    assert [found["small"] for found in runs[1]] == [0, 0]


def test_a_full_file_loads_without_a_trainer(runs: Any) -> None:
    folder, (first, _) = runs
    model = Classifier.load_from_checkpoint(folder / "full.ckpt", weights_only=True)
    for name, value in first["full"].items():
        assert torch.equal(model.get_parameter(name), value), name


def test_weights_that_are_exported_and_loaded_show_a_bar_on_a_terminal_unless_a_callback_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(progress, "BYTES_WORTH_A_BAR", 1)
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    Bar.made.clear()
    _, model = fit(1, str(tmp_path), "sharded", [])
    path = tmp_path / "weights"
    export_model(model, path)
    load_safetensors(model, path)
    assert [(bar.desc, bar.n == bar.total, bar.closed) for bar in Bar.made] == [
        (f"Writing {path}", True, True),
        (f"Loading {path}", True, True),
    ]
    Bar.made.clear()
    calls: list[tuple[int, int]] = []
    load_safetensors(model, path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    load_safetensors(model, path)
    assert Bar.made == []
