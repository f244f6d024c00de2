"""Checkpoints that were written at the tag (tests/data/tag) are read to the bit, by one rank and by two."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.lightning.models import strict_warnings
from tests.lightning.tag_checkpoint import KINDS, TAG, flat, restored

SHARDINGS = ("optim_grads_params", "no_shard")
LARGEST_BYTES = 200 * 1024


def read_all(rank: int, world: int) -> dict[tuple[str, str], Any]:
    strict_warnings()
    found: dict[tuple[str, str], Any] = {}
    for kind in KINDS:
        for sharding in SHARDINGS:
            try:
                found[kind, sharding] = restored(world, rank, kind, sharding)
            except Exception:  # one of these tests fails, not all
                found[kind, sharding] = traceback.format_exc()
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def outcomes(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Any]]:
    return run_distributed(read_all, request.param)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_tag_is_read_to_the_bit(outcomes: Any, kind: str, sharding: str) -> None:
    expected = flat(torch.load(TAG / "expected.pt", weights_only=True))
    for rank, outcome in enumerate(outcomes):
        found = outcome[kind, sharding]
        assert isinstance(found, dict), f"rank {rank}: {found}"
        found = flat(found)
        assert found.keys() == expected.keys()
        wrong = [
            name
            for name, value in expected.items()
            if found[name].dtype != value.dtype or not torch.equal(found[name], value)
        ]
        assert not wrong, f"rank {rank}: {wrong}"


def test_what_is_stored_says_something() -> None:
    """Weights that moved, moments, a rate that fell, a buffer that counted; and the files stay small."""
    expected = flat(torch.load(TAG / "expected.pt", weights_only=True))
    trained = [name for name in expected if name.startswith("state/") and name.endswith("/exp_avg")]
    assert len(trained) == 8
    assert all(expected[name].count_nonzero() for name in trained)
    assert expected["weights/scale"].shape == ()
    assert expected["weights/scale"] != 1
    assert expected["weights/frozen"].eq(0.5).all()
    assert expected["buffers/seen"] == expected["global_step"] == 5
    assert expected["lr"].allclose(torch.tensor(0.05 * 0.5**5))
    assert sum(file.stat().st_size for file in TAG.rglob("*") if file.is_file()) < LARGEST_BYTES
