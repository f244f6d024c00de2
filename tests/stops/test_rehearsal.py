"""What many ranks exchange at start, in a save and in a load, with the program that measures 4,096, here with 256."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.helpers.forked import run
from tests.stops.rehearsal import SETTINGS


def test_many_ranks_start_agree_save_and_load(tmp_path: Path) -> None:
    ranks = 256
    command = ["-m", "tests.stops.rehearsal", str(ranks)]
    code, output = run(command, {**os.environ, **SETTINGS}, tmp_path / "output", Path.cwd(), timeout=540)
    assert code == 0, output
    measured = json.loads(output.splitlines()[-1])
    # Of each of 32 units a rank has rows in three tensors; then its own state, and a number for each of 128 parameters.
    assert measured["chunks"] == ranks * (32 * 3 + 1) + 128
    assert measured["channel"]["told"] == ranks - 1
