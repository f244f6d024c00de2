"""Tensors in arguments and results: found in every container, replaced in copies, never in the caller's objects."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.containers import map_tensors, renewed, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Output:
    value: Tensor
    hidden: Tensor = field(init=False, default_factory=lambda: torch.ones(1))
    label: str = "kept"


def _double(tensor: Tensor) -> Tensor:
    return tensor * 2


def test_every_container_is_looked_into_and_rebuilt_as_itself():
    one = torch.ones(1)
    value = (one, [one, "text"], {"a": one}, Pair(one, 3), OrderedDict(b=one), Output(one))
    mapped = map_tensors(_double, value)
    assert [tensor.item() for tensor in tensors_in(mapped)] == [2.0] * 7
    assert len(tensors_in(value)) == 7
    assert isinstance(mapped[3], Pair)
    assert isinstance(mapped[4], OrderedDict)
    assert mapped[5].label == "kept"
    assert mapped[1][1] == "text"


def test_the_callers_containers_are_not_written_to():
    batch = defaultdict(list, x=torch.ones(1))
    mapped = map_tensors(_double, batch)
    assert batch["x"].item() == 1.0
    assert mapped["x"].item() == 2.0
    assert mapped["missing"] == []


def test_nothing_is_rebuilt_where_nothing_changes():
    value = ({"a": torch.ones(1)}, [torch.ones(1)], Output(torch.ones(1)))
    assert map_tensors(lambda tensor: tensor, value) is value


def test_find_and_replace_agree_on_dataclass_fields_outside_the_constructor():
    value = Output(torch.ones(1))
    numbers = iter(range(10))
    mapped = map_tensors(lambda tensor: torch.tensor(float(next(numbers))), value)
    assert [tensor.item() for tensor in tensors_in(mapped)] == [0.0, 1.0]


def test_whatever_somebody_could_write_to_is_new_and_the_rest_is_what_it_was():
    one, module, other = torch.ones(1), nn.Linear(1, 1), UserDict(a=torch.ones(1))
    value = ({"a": one}, [one], Output(one), OrderedDict(b=one), (one, "text"), module, other)
    again = renewed(lambda leaf: leaf, value)
    assert [new is old for new, old in zip(again, value, strict=True)] == [False] * 4 + [True] * 3
    assert [type(new) for new in again] == [type(old) for old in value]
    assert all(new is old for new, old in zip(tensors_in(again), tensors_in(value), strict=True))
