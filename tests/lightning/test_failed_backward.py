"""A training step may catch what its backward raises, clear gradients and go on: as in plain PyTorch nothing of them is left.

On a GPU a thread of autograd's own lets go of a backward that raised, some time after the exception has come. Here somebody holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from tests.engine.worlds import by_world, check
from tests.fabric.loops import launched
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded

BATCH = 4


class Failing(nn.Module):
    """Its backward raises when it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if self.fails:
            y.register_hook(self._fail)
        return y

    def _fail(self, _: Tensor) -> None:
        raise ArithmeticError("this backward fails")


class Catching(Classifier):
    """Of every two microbatches the second fails, and both are dropped."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.automatic_optimization = False
        self.failing = Failing()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.failing(x.requires_grad_()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for self.failing.fails in (False, True):
            loss = self.loss(batch)
            if self.failing.fails:
                with pytest.raises(ArithmeticError):
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
        self.zero_grad()
        assert all(parameter.grad is None for parameter in self.parameters())
        self.failing.fails = False
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.zero_grad()


def held() -> Any:
    """The ends of all backwards stay."""
    ends: list[Callable[[], None]] = []
    on_backward_end = compat.on_backward_end

    def keep(end: Callable[[], None]) -> None:
        ends.append(end)
        on_backward_end(end)

    return mock.patch.object(compat, "on_backward_end", keep)


def plainly(batches: list[Any]) -> dict[str, Tensor]:
    model = seeded(Catching)
    optimizer = model.configure_optimizers()
    for batch in batches:
        model.loss(copy.deepcopy(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def under_the_trainer(rank: int, world: int) -> None:
    data = loader(BATCH, 2 * BATCH)
    expected = plainly(list(data))
    model = seeded(Catching)
    with held():
        make_trainer("unused", world).fit(model, data)
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


def under_fabric(rank: int, world: int) -> None:
    data = list(loader(BATCH, 2 * BATCH))
    expected = plainly(data)
    fabric, module = launched(world, {}), seeded(Catching)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    with held():
        for x, y in data:
            for module.failing.fails in (False, True):
                loss = nn.functional.cross_entropy(model(x), y)
                if module.failing.fails:
                    with pytest.raises(ArithmeticError):
                        fabric.backward(loss)
                else:
                    fabric.backward(loss)
            model.zero_grad()
            module.failing.fails = False
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            model.zero_grad()
    for name, value in full_state(module).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


CASES = (under_the_trainer, under_fabric)
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_gradients_of_a_backward_that_raised_are_cleared(world: int, case: Any) -> None:
    check(WORLDS, world, case)
