"""Dtypes of weights, gradients and the wire on GPUs: the cases of the CPU, which see the same numbers, with NCCL."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine.cases import on_gpus, run_cases
from tests.engine.test_policy import CASES
from tests.helpers.distributed import needs_gpus

_NAMES = [name for name in CASES if name.startswith(("dtypes [", "bytes of the table"))]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_cases({name: partial(on_gpus, CASES[name]) for name in _NAMES}, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
@pytest.mark.parametrize("case", _NAMES)
def test_a_combination_of_dtypes(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]
