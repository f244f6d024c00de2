"""Version counters of unsharded parameters: what autograd compares, and what tells of writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.core import versions as versions_module
from lightning_mfsdp.engine.core.versions import RESHARDED, Place, Versions


def two() -> tuple[list[nn.Parameter], Versions, Place, Place]:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    return parameters, Versions(parameters), Place([], parameters, []), Place([], parameters, [])


def counters(parameters: list[nn.Parameter]) -> list[int]:
    return [compat.version_of(parameter) for parameter in parameters]


def write(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def test_the_same_values_in_the_same_place_have_the_same_versions_and_no_others_do():
    parameters, versions, here, there = two()
    versions.lie_in(here)
    first = counters(parameters)
    versions.leave()
    resharded = counters(parameters)
    versions.lie_in(there)
    elsewhere = counters(parameters)
    versions.leave()
    versions.lie_in(here)
    assert counters(parameters) == first
    assert set(first).isdisjoint(elsewhere)
    assert min(resharded) >= RESHARDED > max(*first, *elsewhere)


def test_each_group_has_another_version_while_it_is_resharded():
    _, one, *_ = two()
    _, other, *_ = two()
    assert one.resharded != other.resharded


def test_a_write_is_noticed_once_taken_over_and_outdates_every_place():
    parameters, versions, here, there = two()
    versions.lie_in(there)
    elsewhere = counters(parameters)
    versions.leave()
    versions.lie_in(here)
    assert versions.are_as_set()
    write(parameters[1])
    assert not versions.are_as_set()
    assert versions.written() == [1]
    after = counters(parameters)  # what is saved from here on stays good
    versions.take_over([1])
    assert versions.are_as_set()
    versions.leave()
    versions.lie_in(here)
    assert counters(parameters) == after
    versions.leave()
    versions.lie_in(there)
    assert counters(parameters)[0] == elsewhere[0]
    assert counters(parameters)[1] not in (elsewhere[1], after[1])


def test_a_write_while_resharded_is_noticed():
    parameters, versions, here, _ = two()
    versions.lie_in(here)
    versions.leave()
    write(parameters[0])
    assert versions.written() == [0]


def test_what_was_saved_before_a_write_is_out_of_date_wherever_it_was_saved():
    for second in (False, True):
        parameters, versions, here, there = two()
        losses = []
        for place in (here, there):
            versions.lie_in(place)
            losses.append(parameters[0].square().sum())
            versions.leave()
        place = there if second else here
        versions.lie_in(place)
        write(parameters[0])
        versions.take_over(versions.written())
        for place in (here, there):
            versions.leave()
            versions.lie_in(place)
            for loss in losses:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward(retain_graph=True)


def test_a_write_to_main_weights_after_one_by_the_program_outdates_what_was_saved_in_between():
    parameters, versions, here, _ = two()
    versions.lie_in(here)
    write(parameters[0])
    loss = parameters[0].square().sum()
    versions.outdate([0])
    assert versions.are_as_set()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_to_one_main_weight_hides_no_write_of_the_program_to_another():
    parameters, versions, here, _ = two()
    versions.lie_in(here)
    write(parameters[0])
    versions.outdate([1])
    versions.outdate([])
    assert versions.written() == [0]


def test_places_are_freed_with_their_slots():
    parameters, versions, here, _ = two()
    versions.lie_in(here)
    for _ in range(5):
        versions.outdate([0])
        versions.lie_in(Place([], parameters, []))
    assert len(versions._lain) <= 3  # `here`, where they lie, and the one before


@pytest.mark.parametrize("indices", [[0], [0, 1]])
def test_a_write_to_main_weights_outdates_what_was_saved_of_these_alone(indices):
    parameters, versions, here, _ = two()
    versions.lie_in(here)
    losses = [parameter.square().sum() for parameter in parameters]
    versions.outdate(indices)
    assert versions.are_as_set()
    for round_trip in (False, True):
        if round_trip:
            versions.leave()
            versions.lie_in(here)
        for index, loss in enumerate(losses):
            if index in indices:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)


def test_raw_data_have_the_versions_of_their_parameters():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    raw = [torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(3)]  # two forms
    versions, place = Versions(parameters), Place([], parameters, raw)
    versions.lie_in(place)
    before = [compat.version_of(one) for one in place.tensors]
    versions.outdate([1])
    after = [compat.version_of(one) for one in place.tensors]
    assert [was == now for was, now in zip(before, after, strict=True)] == [True, False] * 3
    versions.leave()
    assert {compat.version_of(one) for one in place.tensors} == {versions.resharded}


def test_numbers_begin_again_below_those_of_resharded_parameters(monkeypatch):
    monkeypatch.setattr(versions_module, "_STEP", RESHARDED // 21)
    parameters, versions, here, _ = two()
    seen = set()
    versions.lie_in(here)
    for _ in range(30):
        before = counters(parameters)
        loss = parameters[0].square().sum()
        versions.outdate([0, 1])
        assert counters(parameters) != before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        seen.update(counters(parameters))
        versions.leave()
        versions.lie_in(here)
    assert 1 <= min(seen) <= max(seen) < RESHARDED
    assert len(seen) == 20


def test_counters_have_32_bits():
    parameter = nn.Parameter(torch.ones(2))
    compat.set_versions((parameter,), ((1 << 32) - 1,))
    assert compat.version_of(parameter) == (1 << 32) - 1
    write(parameter)
    assert compat.version_of(parameter) == 0
