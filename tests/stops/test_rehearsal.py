"""What 256 ranks exchange at start, in a save and in a load: on a push, with the program that measures 4,096."""

from __future__ import annotations

import json
import subprocess
import sys


def test_256_ranks_start_agree_save_and_load() -> None:
    command = [sys.executable, "-m", "tests.stops.rehearsal", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    # Of each of 32 units a rank has rows in three tensors; then its own state, and a number for each of 128 parameters.
    assert measured["chunks"] == 256 * (32 * 3 + 1) + 128
    assert measured["channel"]["told"] == 255
