"""The names Lightning knows, and what the constructor accepts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import KubeflowEnvironment, TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, fully_shard

import lightning_mfsdp
from lightning_mfsdp import MFSDPStrategy, MixedPrecisionPolicy, ShardingError
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.mesh import MeshSizes
from tests.helpers.distributed import run_distributed
from tests.lightning.models import loader, make_trainer, seeded, strict_warnings

NAMES = {
    "mfsdp": "optim_grads_params",
    "mfsdp_optim_grads": "optim_grads",
    "mfsdp_optim": "optim",
    "mfsdp_no_shard": "no_shard",
    "mfsdp_notebook": "optim_grads_params",
}


@pytest.mark.parametrize(("name", "sharding"), NAMES.items())
def test_a_name_gives_its_sharding_strategy(name: str, sharding: str, tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, 2, strategy=name)
    assert isinstance(trainer.strategy, MFSDPStrategy)
    assert trainer.strategy.sharding == sharding
    assert trainer.world_size == 2
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


def test_registering_again_changes_nothing() -> None:
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    lightning_mfsdp.register_strategies()
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sharding": "FULL_SHARD"}, ValueError, 'name of FSDP.s; use sharding="optim_grads_params"'),
        ({"sharding": ShardingStrategy.HYBRID_SHARD}, ValueError, "is a name of FSDP's; use .*outer="),
        (
            {"sharding": "zero3"},
            ShardingError,
            "sharding: expected one of no_shard, optim, optim_grads, optim_grads_params or 0 to 3",
        ),
        ({"sharding": 4}, ShardingError, "got 4"),
        ({"outer_sharding": "optim_grads"}, ShardingError, "HFSDP"),
        ({"units": 3}, TypeError, 'expected "auto"'),
        ({"units": "Block"}, TypeError, "a list of module classes or class names"),
        ({"units": [int]}, TypeError, "units="),
        ({"blocks_per_unit": 0}, ValueError, "blocks_per_unit=0: expected"),
        ({"blocks_per_unit": "all"}, ValueError, "blocks_per_unit=.all.: expected"),
        ({"storage": "heap"}, ValueError, "'pooled', 'dynamic'"),
        ({"accumulation": "none"}, ValueError, "'local', 'sharded'"),
        ({"state_dict_type": "other"}, ValueError, "state_dict_type='other': expected one of 'sharded', 'full'"),
        ({"policy": "bf16"}, TypeError, "expected a MixedPrecisionPolicy"),
        ({"data_parallel_size": 0}, ValueError, "expected a positive number"),
        ({"outer_size": "two"}, ValueError, "outer='two'"),
        ({"outer_size": 2, "outer": 4}, ValueError, "two names of one option"),
        ({"data": 2.0}, ValueError, "data=2.0: expected a positive number of ranks"),
        (
            {"recompute": True},
            TypeError,
            r'recompute=True: .* recompute=\{"method": "uniform"\} recomputes whole layers',
        ),
        ({"recompute": "full"}, TypeError, r'recompute=\{"method": "uniform"\}'),
        (
            {"offload": "cpu"},
            ValueError,
            'offload=.cpu.: .* offload="optimizer" keeps main weights and optimizer state in host',
        ),
        ({"unused_parameters": True}, ValueError, 'no gradient, and with unused_parameters="zero" one of zeros'),
        ({"accumulation": 4}, ValueError, r"such as Trainer\(accumulate_grad_batches=4\)"),
        ({"compile": "default"}, TypeError, r'such as \{"mode": "max-autotune-no-cudagraphs"\}'),
        ({"policy": "bf16"}, TypeError, 'precision, of the Trainer or Fabric, such as precision="bf16-mixed"'),
        ({"global_batch_size": "auto"}, ValueError, "such as global_batch_size=512"),
        ({"context": True}, ValueError, "a positive number of ranks, such as context=2"),
        ({"data": "all"}, ValueError, 'a positive number of ranks or "auto", such as data=2'),
        (
            {"mesh": (2, 4)},
            TypeError,
            r"mesh=\(2, 4\): expected a DeviceMesh or None; sizes .* such as data=4, outer=2",
        ),
        ({"symmetric_memory": "no"}, ValueError, "symmetric_memory='no': expected one of True, False"),
        ({"free_gradients": "no"}, ValueError, "free_gradients='no': expected one of True, False"),
        ({"data": 2, "data_parallel_size": 4}, ValueError, "both say how many ranks"),
        ({"checkpoint_io": AsyncCheckpointIO()}, TypeError, "AsyncCheckpointIO would be ignored"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MFSDPStrategy(**arguments)


@pytest.mark.parametrize("units", ["auto", ["Block"], [nn.Linear, "Block"], lambda module: False])
def test_units_may_be_auto_names_classes_or_a_callable(units: Any) -> None:
    MFSDPStrategy(units=units)


def test_the_mesh_is_not_there_before_the_processes_are() -> None:
    with pytest.raises(RuntimeError, match="before processes are connected"):
        _ = MFSDPStrategy().device_mesh


def test_a_checkpoint_plugin_that_would_be_ignored_is_refused_by_the_trainer(tmp_path: Any) -> None:
    make_trainer(tmp_path, 1, plugins=[TorchCheckpointIO()])
    with pytest.raises(TypeError, match="would be ignored"):
        make_trainer(tmp_path, 1, plugins=[AsyncCheckpointIO()])


def test_the_timeout_and_backend_reach_the_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen: dict[str, Any] = {}

    def stop(backend: str, **settings: Any) -> None:
        seen.update(settings, backend=backend)
        raise InterruptedError

    monkeypatch.setattr(torch.distributed, "init_process_group", stop)
    strategy = MFSDPStrategy(timeout=timedelta(seconds=7), process_group_backend="gloo")
    trainer = make_trainer(tmp_path, 1, strategy=strategy)
    with pytest.raises(InterruptedError):
        trainer.validate(seeded(), loader(4))
    assert seen["timeout"] == timedelta(seconds=7)
    assert seen["backend"] == "gloo"


def meshes(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}

    def fit(**arguments: Any) -> Trainer:
        model = seeded()
        trainer = make_trainer(".", world_size, max_steps=1, strategy=MFSDPStrategy(units=["Block"], **arguments))
        trainer.fit(model, loader(4, 16, rank, world_size))
        assert model.device_mesh is trainer.strategy.device_mesh  # type: ignore[attr-defined]
        return trainer

    for key, arguments in {
        "plain": {},
        "hsdp": {"outer_size": 2},
        "hfsdp": {"outer_size": 2, "outer_sharding": "optim"},
        "hfsdp on one group": {"outer_sharding": "optim"},
    }.items():
        mesh = fit(**arguments).strategy.device_mesh  # type: ignore[attr-defined]
        found[key] = mesh.mesh_dim_names, tuple(mesh.shape)
    own = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    assert fit(mesh=own).strategy.device_mesh is own  # type: ignore[attr-defined]
    for key, arguments in {
        "lightning's words": {"data_parallel_size": "auto"},
        "both": {"data_parallel_size": 4, "outer": 2},
    }.items():
        strategy: Any = fit(**arguments).strategy
        mesh, sharded = strategy.device_mesh, strategy._run_mesh.sharded
        found[key] = mesh.mesh_dim_names, tuple(mesh.shape), sharded.mesh_dim_names, tuple(sharded.shape)
    for key, arguments in {
        "size": {"data_parallel_size": 2},
        "outer": {"outer": 3},
        "product": {"outer": 2, "data": 4},
    }.items():
        with pytest.raises(ValueError) as info:  # noqa: PT011  what it says is compared below
            fit(**arguments)
        found[key] = str(info.value)
    return found


def test_meshes_have_named_axes_and_sizes_that_must_fit() -> None:
    found = run_distributed(meshes, 4)[0]
    assert found["plain"] == (("data",), (4,))
    assert found["hsdp"] == (("outer", "data"), (2, 2))
    assert found["hfsdp"] == (("outer", "data"), (2, 2))
    assert found["hfsdp on one group"] == (("outer", "data"), (1, 4))
    lightning = ("data_parallel", "tensor_parallel"), (4, 1)
    assert found["lightning's words"] == (*lightning, ("data",), (4,))
    assert found["both"] == (*lightning, ("outer", "data"), (2, 2))
    assert "data_parallel_size x tensor_parallel_size = 2 x 1, but there are 4 ranks" in found["size"]
    assert (
        "outer x data x context x tensor = 3 x 1 x 1 x 1 = 3, but there are 4 ranks; use sizes that divide it"
        in found["outer"]
    )
    assert "2 x 4 x 1 x 1 = 8, but there are 4 ranks; leave data at" in found["product"]


class ShardedByTorch(BoringModel):
    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def shard_by_torch(rank: int, world_size: int) -> list[str]:
    strict_warnings()
    messages = []
    for strategy in (MFSDPStrategy(data_parallel_size="auto"), MFSDPStrategy()):
        with pytest.raises(ShardingError) as info:
            make_trainer(".", world_size, strategy=strategy).fit(ShardedByTorch())
        messages.append(str(info.value))
    return messages


def test_a_module_that_configure_model_gave_to_torch_is_refused_with_the_line_to_leave_out() -> None:
    for given, axes in run_distributed(shard_by_torch, 2):
        assert "layer of ShardedByTorch was given to torch.distributed.fsdp.fully_shard" in given
        assert "Leave out the lines that call it, in configure_model for example" in given
        assert "'data_parallel'" in axes
        assert "Leave out the lines that shard the model" in axes


def test_a_policy_is_given_once() -> None:
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="two policies"):
        MFSDPStrategy(
            policy=policy,
            precision_plugin=lightning_mfsdp.MFSDPPrecision(policy=MixedPrecisionPolicy(grad_reduce="sum")),
        )
    strategy = MFSDPStrategy(policy=policy, precision_plugin=lightning_mfsdp.MFSDPPrecision("bf16-mixed"))
    assert strategy.precision_plugin.policy is policy
    assert strategy.precision_plugin.precision == "bf16-mixed"


def places(rank: int, world_size: int) -> dict[str, Any]:
    """Of ranks on meshes with a context axis: number of data ranks, which, and the ranks that divide its batch."""
    found: dict[str, Any] = {}
    for names in (("data", "context"), ("context", "data")):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        sizes = MeshSizes(mesh=mesh)
        connected = sizes.connect("cpu", world_size)
        assert sizes.divides_sequences
        assert connected.context is not None
        group = torch.distributed.get_process_group_ranks(connected.context)
        found[names[0]] = *sizes.data_place(world_size, rank), group
        assert connected.device_mesh is connected.sharded is mesh
    sizes = MeshSizes(outer=2, context=2)
    found["sizes"] = *sizes.data_place(world_size, rank), sizes.connect("cpu", world_size).device_mesh.mesh_dim_names
    with pytest.raises(ValueError, match=r"context=2 and mesh=.*: a mesh already has its axes"):
        MeshSizes(mesh=mesh, context=2)
    return found


def test_a_rank_beyond_the_configured_world_is_an_error_that_names_both() -> None:
    with pytest.raises(
        ValueError, match=r"rank 1, so there are at least 2, .* was given 1 \(num_nodes x devices\); make them agree"
    ):
        MeshSizes().data_place(1, rank=1)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_another_number_of_processes_than_was_configured_is_an_error_before_any_of_them_waits(
    num_nodes: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    options: dict[str, Any] = {"num_nodes": num_nodes, "plugins": [KubeflowEnvironment()]}
    message = rf"KubeflowEnvironment: 2 processes were started but .* was given {num_nodes} \(num_nodes x devices\)"
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, 1, **options).fit(seeded(), loader(4))
    with pytest.raises(ValueError, match=message):
        Fabric(accelerator="cpu", devices=1, strategy=MFSDPFabricStrategy(), **options).launch()


def test_a_process_that_was_given_no_device_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of `torchrun --nproc-per-node 2` with devices=1."""
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r'local rank 1 has no device: devices=1 was given, .* Pass devices="auto"'):
        make_trainer(tmp_path, 1, plugins=[TorchElasticEnvironment()]).fit(seeded(), loader(4))


def test_ranks_that_divide_a_batch_are_known_on_meshes_of_ones_own() -> None:
    found = run_distributed(places, 4)
    assert [one["data"] for one in found] == [(2, 0, [0, 1]), (2, 0, [0, 1]), (2, 1, [2, 3]), (2, 1, [2, 3])]
    assert [one["context"] for one in found] == [(2, 0, [0, 2]), (2, 1, [1, 3]), (2, 0, [0, 2]), (2, 1, [1, 3])]
    axes = ("outer", "data", "context")
    assert [one["sizes"] for one in found] == [(2, 0, axes), (2, 0, axes), (2, 1, axes), (2, 1, axes)]
