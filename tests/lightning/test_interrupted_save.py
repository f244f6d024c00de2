"""A save that is killed leaves a checkpoint that loads: the old one, or the new one, whole. Damaged ones are told from good ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.internals import lightning_io, locate
from tests.engine.worlds import by_world, check
from tests.helpers.forked import run
from tests.lightning.interrupted_saves import NEW, OLD, PART_NAME, made, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=" in ".join(way), marks=[pytest.mark.nightly] * (way != ["sharded"]))
        for way in (["sharded"], ["sharded", "two renames"], ["full"])
    ],
)
def test_a_save_killed_at_any_file_operation_leaves_a_checkpoint_that_loads(way: list[str], tmp_path: Path) -> None:
    script = ROOT / "tests/lightning/interrupted_saves.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code, output = run(
        [str(script), str(tmp_path / "saves"), *way], environment, tmp_path / "output", ROOT, timeout=300
    )
    assert code == 0, output[-2000:]
    lines = output.splitlines()
    found = [re.search(r"loaded (.*)$", line) for line in lines]
    loaded = [match.group(1) if match else line for match, line in zip(found, lines, strict=True)]
    assert set(loaded) == {f"{OLD}", f"{NEW}"}, output
    assert loaded == sorted(loaded), "first the old one, from some moment on the new one"
    if way == ["sharded", "two renames"]:
        assert any(f"os.rename {PART_NAME}" in line for line in lines), "killed in the middle of the exchange as well"
    else:
        assert not any("os.rename last.ckpt " in line for line in lines), "the old one never leaves its place"
    if way[0] == "sharded":
        assert sum("expected a directory with meta.pt in it" in line for line in lines) > 3, (
            "broken ones are known as such"
        )
    assert len(lines) > (4 if way == ["full"] else 7)


def damaged_checkpoints_are_named_and_nothing_is_read(rank: int, world: int) -> None:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    for damage, expected in (
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes instead of"),
        (lambda path: (path / ".metadata").unlink(), ".metadata cannot be read (FileNotFoundError"),
        (lambda path: os.truncate(path / ".metadata", 50), ".metadata cannot be read ("),
    ):
        path = folder / "one.ckpt"
        save(path, "sharded", OLD)
        damage(path)
        model, optimizer = made(NEW)
        with pytest.raises(RuntimeError) as info:
            lightning_io.load(locate(path), model, [optimizer], strict=True, weights_only=True)
        assert "nothing was read: rank 0 finds that" in str(info.value)
        assert expected in str(info.value), str(info.value)
        for parameter in optimizer.param_groups[0]["params"]:
            assert parameter.eq(NEW).all(), "the model is as it was"


def a_link_to_a_save_that_did_not_end_says_so(rank: int, world: int) -> None:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    (folder / "last.ckpt").symlink_to("step=4.ckpt")
    model, optimizer = made(NEW)
    with pytest.raises(ValueError, match=r"a link to step=4\.ckpt, which is not there: its save did not end"):
        lightning_io.load(locate(folder / "last.ckpt"), model, [optimizer], strict=True, weights_only=True)


def an_optimizer_that_does_not_fit_leaves_weights_alone(rank: int, world: int) -> None:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "one.ckpt"
    save(path, "sharded", OLD)
    model, _ = made(NEW)
    other = torch.optim.SGD([*model.parameters()][:1], lr=0.1)
    with pytest.raises(RuntimeError, match="parameter group 0 differs"):
        lightning_io.load(locate(path), model, [other], strict=True, weights_only=True)
    for parameter in model.parameters():
        assert parameter.to_local().eq(NEW).all()  # type: ignore[attr-defined]


WORLDS = {
    1: [
        damaged_checkpoints_are_named_and_nothing_is_read,
        a_link_to_a_save_that_did_not_end_says_so,
        an_optimizer_that_does_not_fit_leaves_weights_alone,
    ]
}


@by_world(WORLDS)
def test_damage(world: Any, case: Any) -> None:
    check(WORLDS, world, case)
