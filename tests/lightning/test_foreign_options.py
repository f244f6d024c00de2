"""Options of other strategies are answered with ours, misspelled ones with the nearest; signatures stay exact."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric
from lightning.fabric import strategies as fabric_strategies
from lightning.pytorch import Trainer
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mfsdp import MFSDPStrategy, MixedPrecisionPolicy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.foreign_options import FOREIGN_OPTIONS
from lightning_mfsdp.recompute import Recompute
from tests.lightning.models import make_trainer

PEERS = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "DDPStrategy")
# What FSDPStrategy and DDPStrategy pass on by **kwargs, and what FSDP2 has.
BELOW = (
    torch.distributed.fsdp.FullyShardedDataParallel,
    torch.nn.parallel.DistributedDataParallel,
    torch.distributed.fsdp.fully_shard,
)
OURS = {MFSDPStrategy: trainer_strategies, MFSDPFabricStrategy: fabric_strategies}


def names_of(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind not in kinds} - {"self", "module"}


def foreign(ours: type) -> set[str]:
    """Names of options that another strategy has and ours lacks."""
    peers = [*(getattr(OURS[ours], peer) for peer in PEERS), *BELOW]
    return set().union(*map(names_of, peers)) - names_of(ours)


@pytest.mark.parametrize("ours", OURS)
def test_every_option_that_another_strategy_has_and_ours_lacks_has_an_answer(ours: type) -> None:
    for name in sorted(foreign(ours)):
        assert name in FOREIGN_OPTIONS, f"{name!r} has no answer"
        with pytest.raises(TypeError) as info:
            ours(**{name: None})
        assert str(info.value) == f"{ours.__name__} has no option {name!r}: {FOREIGN_OPTIONS[name]}"


@pytest.mark.parametrize("name", ["context_parallel_size", "expert_model_parallel_size", "tensor_model_parallel_size"])
def test_what_other_programs_call_an_axis_is_answered_with_that_axis(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no option '{name}': use {name.partition('_')[0]}: the number of ranks"):
        MFSDPStrategy(**{name: 2})


def test_the_walk_sees_lightnings_options() -> None:
    seen = {"cpu_offload", "forward_prefetch", "stage", "find_unused_parameters"}
    if "dp_mesh_dims" in inspect.signature(torch.distributed.fsdp.fully_shard).parameters:  # not with PyTorch 2.11
        seen.add("dp_mesh_dims")
    assert seen <= foreign(MFSDPStrategy)


def test_answers_name_options_that_exist() -> None:
    """Every `name=` and `use name` is an option of ours, or of what the sentence says it is of."""
    ours = names_of(MFSDPStrategy) | names_of(MFSDPFabricStrategy)
    others = set().union(
        *map(names_of, (Trainer, Fabric, MixedPrecisionPolicy, Recompute)), {"elementwise", "scaler", "mode"}
    )
    for name, answer in FOREIGN_OPTIONS.items():
        said = set(re.findall(r"(\w+)=", answer)) | set(re.findall(r"^use (\w+)(?![\w.(])", answer))
        assert said <= ours | others | {"Trainer"}, f"{name}: {said - ours - others}"


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("shardng", "did you mean 'sharding'?"),
        ("Sharding", "did you mean 'sharding'?"),
        ("reshard_after_foward", "did you mean 'reshard_after_forward'?"),
        ("cpu_offloading", "if 'cpu_offload' is meant: use offload"),
        ("zzz", "it takes sharding, outer_sharding, policy"),
    ],
)
@pytest.mark.parametrize("ours", OURS)
def test_a_misspelled_option_is_answered_with_the_nearest(ours: type, given: str, answer: str) -> None:
    with pytest.raises(TypeError, match=re.escape(answer)):
        ours(**{given: 1})


def test_all_wrong_names_are_answered_at_once_before_values_are_looked_at() -> None:
    with pytest.raises(TypeError) as info:
        MFSDPStrategy(sharding="no such", stage=3, auto_wrap_policy={torch.nn.Linear})  # type: ignore[call-arg]
    assert [line.split(":")[0] for line in str(info.value).splitlines()] == [
        "MFSDPStrategy has no option 'stage'",
        "MFSDPStrategy has no option 'auto_wrap_policy'",
    ]


@pytest.mark.parametrize("ours", OURS)
def test_signatures_show_the_options_and_nothing_else(ours: type) -> None:
    parameters = inspect.signature(ours).parameters
    kinds = {one.kind for one in parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert not set(parameters) & {"cpu_offload", "stage"}
    documented = re.findall(r"\w+", inspect.getdoc(ours).partition("Raises:")[0])  # type: ignore[union-attr]
    assert set(parameters) <= set(documented)
    assert ours.__init__.__qualname__ == f"{ours.__name__}.__init__"


class WithMore(MFSDPStrategy):
    """A user's own, which passes on what it does not know."""

    def __init__(self, *, more: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.more = more


def test_a_users_own_strategy_takes_its_options_and_gets_the_answers() -> None:
    strategy = WithMore(more=3, sharding="optim")
    assert (strategy.more, strategy.sharding) == (3, "optim")
    assert "more" in inspect.signature(WithMore).parameters
    with pytest.raises(TypeError, match="MFSDPStrategy has no option 'cpu_offload': use offload"):
        WithMore(cpu_offload=True)


def test_the_registry_makes_them_and_answers(tmp_path: Any) -> None:
    assert isinstance(make_trainer(tmp_path, 1, strategy="mfsdp_optim").strategy, MFSDPStrategy)
    entry = StrategyRegistry["mfsdp"]
    with pytest.raises(TypeError, match="sharding_strategy"):
        entry["strategy"](**entry["init_params"], sharding_strategy="FULL_SHARD")


def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_subclass_arguments(Strategy, "strategy")
    return made


def in_yaml(**settings: Any) -> Any:
    made = parser()
    return made.instantiate_classes(
        made.parse_object({"strategy": {"class_path": "lightning_mfsdp.MFSDPStrategy", **settings}})
    ).strategy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_yaml_options_are_what_the_signature_says_and_dict_kwargs_are_answered() -> None:
    assert in_yaml(init_args={"sharding": "optim", "units": ["Block"]}).sharding == "optim"
    with pytest.raises(Exception, match="cpu_offload' is not accepted"):
        in_yaml(init_args={"cpu_offload": True})
    with pytest.raises(Exception, match="MFSDPStrategy has no option 'cpu_offload': use offload"):
        in_yaml(dict_kwargs={"cpu_offload": True})
