"""The options of both strategies: spelled out in two signatures, with the types and defaults of one set, and checked there."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.strategy_options import StrategyOptions, TrainerOptions
from lightning_mfsdp.recompute import Recompute

# What Lightning hands to any strategy, and no option of ours.
LIGHTNINGS = {
    MFSDPStrategy: {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    },
    MFSDPFabricStrategy: {"accelerator", "parallel_devices", "cluster_environment", "precision"},
}
OPTIONS = {MFSDPStrategy: TrainerOptions, MFSDPFabricStrategy: StrategyOptions}


@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_signature_has_the_names_types_and_defaults_of_the_options(strategy):
    parameters = inspect.signature(strategy).parameters
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters.values())
    ours = {name: (one.annotation, one.default) for name, one in parameters.items() if name not in LIGHTNINGS[strategy]}
    assert ours == {one.name: (one.type, one.default) for one in fields(OPTIONS[strategy])}


@pytest.mark.parametrize("strategy", OPTIONS)
def test_what_was_given_is_what_the_options_hold(strategy):
    given = {"sharding": "optim", "outer_sharding": "optim", "accumulation": "sharded", "state_dict_type": "full"}
    options = strategy(**given, process_group_backend="gloo")._options
    assert type(options) is OPTIONS[strategy]
    assert options.process_group_backend == "gloo"
    assert {name: getattr(options, name) for name in given} == given
    with pytest.raises(FrozenInstanceError):
        options.sharding = "no_shard"


def test_what_a_callback_adds_is_checked_as_what_was_given():
    options = TrainerOptions(cuda_graph=True)
    with pytest.raises(ValueError, match=r'cuda_graph=True with expert=2 .*use expert_dispatcher="all_gather"'):
        TrainerOptions(cuda_graph=True, expert=2)
    assert TrainerOptions(cuda_graph=True, expert=2, expert_dispatcher="all_gather").cuda_graph
    with pytest.raises(ValueError, match="cuda_graph=True with Recompute"):
        replace(options, recompute=Recompute(offload=True))
