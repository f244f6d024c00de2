"""Tests on GPUs may take as long as their processes may: many cases share one start of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import TIMEOUT_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S["nccl"] + 30))
