"""54 programs that reach units by their results and by side doors: right, as in plain PyTorch, but for two that raise; none is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.side_door_programs import DIM, PROGRAMS, build, whole
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.nights import NIGHT

STEPS = 4 if NIGHT else 3
AS_IN_PYTORCH = {"write_in_forward_after_use", "step_between_forward_and_backward", "activation_written"}  # it raises
# No hooks can be put around what a backward saves, or a forward in a transform.
LOUD = {
    "double_backward_to_input": "a backward read its weight .*create_graph=True",
}


def trained(name: str, rank: int, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights and all that the program returned."""
    run, returned = build(name, **options), []
    for run.step in range(STEPS):
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * run.step + rank))
        found = PROGRAMS[name](run, x)
        if found is not None:
            found = found if isinstance(found, tuple) else (found,)
            returned += [whole(one.detach()).clone() for one in found]
        run.update()
    return {name: whole(one.detach()) for name, one in run.parameters.items()}, returned


def compare(name: str, rank: int, world: int) -> None:
    options: dict[str, Any] = {"sharding": "optim_grads_params"}
    if name in AS_IN_PYTORCH:
        for one in ({}, options):
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was written after the forward"):
                trained(name, rank, **one)
        return
    if name in LOUD:
        with pytest.raises(RuntimeError, match=LOUD[name]):
            trained(name, rank, **options)
        options = {"sharding": "optim_grads"}
    expected, found = trained(name, rank), trained(name, rank, **options)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)


def case(name: str) -> Any:
    made = partial(compare, name)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


CASES = tuple(map(case, PROGRAMS))
WORLDS = {2: CASES, **at_night({3: CASES})}


def test_there_are_54_and_at_most_three_are_loud() -> None:
    assert len(PROGRAMS) == 54
    assert len(LOUD) <= 3


@by_world(WORLDS)
def test_side_door_programs(world: int, case: Any) -> None:
    check(WORLDS, world, case)
