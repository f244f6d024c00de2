"""A training of two processes that saves all the time is killed at random moments; a checkpoint that loads is always left.

Twice on a push, 50 times at night.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_mfsdp.checkpoint.io.local import part_of
from tests.helpers.forked import run
from tests.helpers.nights import NIGHT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "kills"), [pytest.param("sync", 25, marks=pytest.mark.nightly), ("async", 25 if NIGHT else 2)]
)
def test_a_killed_training_leaves_the_last_checkpoint_it_finished_or_the_one_after(
    mode: str, kills: int, tmp_path: Path
) -> None:
    command = [str(ROOT / "tests/lightning/killed_training.py"), str(tmp_path), str(kills), "7", mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code, output = run(command, environment, tmp_path / "output", ROOT, timeout=280)
    assert code == 0, output[-6000:]
    seen = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(seen) == kills
    for one in seen:
        assert len(one["loaded"]) == 1, f"a mixture of checkpoints: {one}"
        # The save after the last one that returned may have got through, or even have returned unheard.
        assert one["finished"] <= one["loaded"][0] <= one["finished"] + 2, one
    beside = [one["beside"] for one in seen if part_of(Path("last.ckpt")).name in one["names"]]
    whole = [found for found in beside if isinstance(found[0], float)]
    assert all(len(found) == 1 for found in whole), "killed before or after it took its place, and whole"
    broken = [found for found in beside if found not in whole]
    assert broken or not NIGHT, "some were killed in the middle of a save"
    for found in broken:  # both ranks say the same, or each what it has seen
        refusals = ("the directory has no such file", "so nothing was read", "meta.pt cannot be read, so nothing was")
        assert all(any(refusal in said for refusal in refusals) for said in found), found
