"""A program of one process on a GPU: see tests/engine/test_alone.py."""

from __future__ import annotations

import pytest

from tests.engine.test_alone import train_alone
from tests.helpers.distributed import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


def test_a_plain_program_trains_on_the_gpu_after_one_message():
    train_alone()
