"""What layers are called with, and write to: dicts, lists and dataclasses are as they were when a layer is computed again."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.recompute import Recompute, apply_recompute
from lightning_mfsdp.recompute.replay import filled, outlined
from tests.recompute.models import DIM, batch, equal, steps

CONFIGS = (
    Recompute(),
    Recompute(num_layers=3),
    Recompute(offload=True),
    Recompute(num_layers=2, offload=True),
    Recompute(method="selective", save_ops=["matmul"]),
)


@dataclass
class State:
    """Of a forward."""

    x: Tensor
    calls: int = 0
    means: list[Tensor] = field(default_factory=list)


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Writes(nn.Module):
    """Replaces entries of what it is given, counts, and adds to a list: the forward of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), kind

    def compute(self, x: Tensor, calls: int) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.2) / (1 + calls)

    def forward(self, state: Any) -> Any:
        if self.kind == "dict":
            state["x"] = self.compute(state["x"], state["calls"])
            state["calls"] += 1
            state["means"].append(state["x"].mean())
        elif self.kind == "dataclass":
            state.x = self.compute(state.x, state.calls)
            state.calls += 1
            state.means.append(state.x.mean())
        else:
            state[0] = self.compute(state[0], len(state) - 1)
            state.append(state[0].mean())
        return state


class Program(nn.Module):
    """Its layers share what they write to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inputs, self.kind = nn.Linear(DIM, DIM), kind
        self.layers = nn.ModuleList(Writes(kind) for _ in range(4))
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x, means = self.inputs(x), []
        state: Any = {"dict": {"x": x, "calls": 0, "means": means}, "dataclass": State(x, 0, means), "list": [x]}[
            self.kind
        ]
        for layer in self.layers:
            state = layer(state)
        if self.kind == "list":
            x, *means = state
        else:
            x = state["x"] if self.kind == "dict" else state.x
        self.means = means
        return x + torch.stack(means).sum()


@pytest.mark.parametrize("kind", ["dict", "dataclass", "list"])
def test_a_layer_may_write_to_the_containers_that_it_is_given(kind) -> None:
    """To the bit, with what it wrote there for its caller once. Layers of a chunk are linked by tensors inside."""
    found = []
    for config in (Recompute(method="none"), *CONFIGS):
        torch.manual_seed(0)
        model = Program(kind)
        apply_recompute(model, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(steps(model))
        assert len(model.means) == 4, config
    assert all(equal(one, found[0]) for one in found)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, shift: Any) -> Tensor:
        shift = shift if isinstance(shift, Tensor) else shift["a"][0]
        return x + self.down(torch.tanh(self.up(x) + shift))


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_written_in_place_before_its_backward_is_noticed_in_containers_too(nested) -> None:
    for config in CONFIGS:
        model = nn.ModuleList(Adds() for _ in range(3))
        apply_recompute(model, config)
        x, shift = batch(0), torch.zeros(DIM)
        for layer in model:
            x = layer(x, {"a": (shift,)} if nested else shift)
            shift += 1
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            x.sum().backward()


def test_containers_come_back_as_they_were() -> None:
    """Of their types, tensors in their places, written to by nobody else, as often as they are asked for."""
    one, two = torch.ones(2), torch.zeros(3)
    given = {
        "named": Pair(one, [two, 1]),
        "ordered": OrderedDict(b=two, a="text"),
        "state": State(one, 3, [two]),
        "size": torch.Size([1, 2]),
        "log": [],
    }
    tensors: list[Tensor] = []
    outline = outlined(given, tensors)
    given["log"].append("later")
    given["state"].calls, given["ordered"]["a"] = 4, "other"
    for _ in range(2):
        found = filled(outline, [tensor + 1 for tensor in tensors])
        assert isinstance(found["named"], Pair)
        assert torch.equal(found["named"].first, one + 1)
        assert torch.equal(found["named"].second[0], two + 1)
        assert type(found["ordered"]) is OrderedDict
        assert list(found["ordered"]) == ["b", "a"]
        assert found["ordered"]["a"] == "text"
        assert found["state"].calls == 3
        assert torch.equal(found["state"].means[0], two + 1)
        assert found["size"] is given["size"]
        assert found["log"] == []
        found["log"].append("mine")
        found["state"].means.clear()
    assert len(given["state"].means) == 1


class Flattens(nn.Module):
    """Takes columns one after the other, which needs an input that lies so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.t().view(-1).view(DIM, -1).t()).t().contiguous().t()


def test_inputs_in_host_memory_lie_as_they_lay() -> None:
    found = []
    for config in (Recompute(method="none"), Recompute(offload=True)):
        torch.manual_seed(0)
        model = nn.Sequential(Flattens(), Flattens(), Flattens())
        apply_recompute(model, config)
        model(batch(0).t().contiguous().t()).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert equal(*found)
