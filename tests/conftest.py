"""Tests marked `nightly` are left out unless MFSDP_NIGHTLY=1, and a process group that a file made ends with the file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("MFSDP_NIGHTLY") == "1":
        return
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.skip(reason="runs at night: set MFSDP_NIGHTLY=1"))


@pytest.fixture(autouse=True, scope="module")
def process_groups_end_with_a_file() -> Iterator[None]:
    """A Trainer makes one in the process of the tests; Lightning and `fully_shard` look for it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
