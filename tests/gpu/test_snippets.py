"""Blocks of the README and the docs that need GPUs, by plain `python`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.pages import PROGRAMS, Block
from tests.helpers.programs import run_plain

MARKS = {1: pytest.mark.gpu, 2: pytest.mark.gpus2, 4: pytest.mark.gpus4}


def on_gpus(block: Block) -> Any:
    found = torch.cuda.device_count()
    without = pytest.mark.skipif(found < block.gpus, reason=f"needs {block.gpus} CUDA device(s), found {found}")
    return pytest.param(block, marks=[MARKS[block.gpus], without], id=str(block))


@pytest.mark.parametrize("block", [on_gpus(block) for block in PROGRAMS if block.gpus])
def test_a_block_for_gpus_runs_alone(block: Block, tmp_path: Path) -> None:
    if block.missing:
        pytest.skip(f"needs {', '.join(block.missing)}")
    path = tmp_path / "program.py"
    path.write_text(block.text)
    run_plain(path, gpus=True)
