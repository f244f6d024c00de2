"""Loops under Fabric that the tests in this folder share."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_mfsdp.fabric  # noqa: F401  registers the strategy
from lightning_mfsdp import sharded_parameters, unshard
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.lightning.models import loader, strict_warnings

GLOBAL_BATCH = 8


def launched(world_size: int, strategy: Any = None, **options: Any) -> Fabric:
    """A Fabric on CPU processes that are there already. `strategy`: a name, or arguments."""
    strict_warnings()
    if not isinstance(strategy, str):
        strategy = MFSDPFabricStrategy(**{"units": ["Block"], **(strategy or {})})
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def batches(rank: int, world_size: int, count: int) -> list[Any]:
    """This rank's parts of global batches."""
    return list(loader(GLOBAL_BATCH // world_size, GLOBAL_BATCH * count, rank, world_size))


def train(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    data: list[Any],
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> list[Tensor]:
    """One step for every `accumulate` batches; returns the losses."""
    losses = []
    for index, batch in enumerate(data):
        is_last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1]) / accumulate
            fabric.backward(loss)
        losses.append(loss.detach())
        if is_last:
            if clip_norm is not None or clip_value is not None:
                fabric.clip_gradients(model, optimizer, clip_val=clip_value, max_norm=clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Main weights by the module's own names."""
    inner = model.module
    with unshard(inner):
        return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}


def rows(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank owns of weights and optimizer state; of objects that Fabric did not wrap."""
    state = optimizer.state
    return {
        view.name: (view.main.clone(), {key: value.clone() for key, value in state.get(view.local, {}).items()})
        for view in sharded_parameters(module)
    }


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, at any depth."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected), f"{where}: {actual} instead of {expected}"
    else:
        assert actual == expected, where
