"""What both strategies are given is held by one set of options, and checked there."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.strategy_options import StrategyOptions, TrainerOptions
from lightning_mfsdp.recompute import Recompute

OPTIONS = {MFSDPStrategy: TrainerOptions, MFSDPFabricStrategy: StrategyOptions}


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
