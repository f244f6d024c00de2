"""Continuation to the bit on GPUs, where dropout draws from the device and gradients wait in its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import FOREIGN_WARNINGS
from tests.lightning.test_exact_continuation import CASES, SAVES, assert_continued, resumed, straight

pytestmark = [
    pytest.mark.gpus2,
    needs_gpus(2),
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("exact")
    return [run_distributed(function, 2, str(folder), "cuda", backend="nccl") for function in (straight, resumed)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_resumed_run_ends_like_the_one_that_went_on(runs: Any, kind: str, name: str) -> None:
    for before, after in zip(*runs, strict=True):
        assert_continued(after[f"{kind}, {name}"], before[f"{kind}, {name}"], SAVES[name])
