"""A program may set a default device (`torch.set_default_device`, `with torch.device(...)`): training is as without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp import (
    AveragedWeights,
    GradientWatch,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
)
from lightning_mfsdp.optim import Muon
from tests.engine.worlds import by_world, check


class Net(nn.Module):
    """Rank 0 never uses `second`, whose weights the root has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.first, self.second = (nn.Linear(6, 6, device="cpu") for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.scale * (self.second(x) if self.rank else x)


def trained(rank: int, world: int, sharding: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Net(rank)
    for module in (model.first, model):
        fully_shard(module, sharding=sharding)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizers = [
        fully_shard_optimizer(Muon(weights, lr=0.1)),
        fully_shard_optimizer(torch.optim.SGD(others, lr=0.1, momentum=0.9)),
    ]
    watch, average = GradientWatch(model), AveragedWeights(model)
    generator = torch.Generator("cpu").manual_seed(rank)
    for _ in range(3):
        with no_sync(model):
            model(torch.randn(4, 6, generator=generator, device="cpu")).square().sum().backward()
        loss = model(torch.randn(4, 6, generator=generator, device="cpu")).square().sum()
        (loss + model.scale.square().sum() + model.first.weight.abs().sum()).backward()
        assert watch.check() is None
        clip_grad_norm_(model, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update(0.9)
    return full_state_dict(model)


def _is_as_without(rank: int, world: int, sharding: Any) -> None:
    expected = trained(rank, world, sharding)
    with torch.device("meta"):
        found = trained(rank, world, sharding)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def whole_weights(rank: int, world: int) -> None:
    _is_as_without(rank, world, "optim_grads")


def sharded_weights(rank: int, world: int) -> None:
    _is_as_without(rank, world, "optim_grads_params")


WORLDS = dict.fromkeys((1, 2), (whole_weights, sharded_weights))


@by_world(WORLDS)
def test_training_makes_nothing_on_it(world: int, case: Any) -> None:
    check(WORLDS, world, case)
