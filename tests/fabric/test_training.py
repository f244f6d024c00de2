"""Loops under Fabric give what one plain process gives, and what the Trainer gives."""

from __future__ import annotations

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.engine.test_collective_counts import Funnel, Observer, expected_on_one_axis
from tests.engine.worlds import by_world, check
from tests.fabric.loops import GLOBAL_BATCH, assert_same, batches, launched, train, whole
from tests.helpers.chain import STRATEGIES
from tests.helpers.nights import NIGHT
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, train_plainly

STEPS = 3


def every_strategy_trains_like_one_plain_process(rank: int, world_size: int) -> None:
    plain = dict(train_plainly(seeded(), GLOBAL_BATCH, STEPS).named_parameters())
    for sharding in STRATEGIES:
        name = "mfsdp" if sharding == "optim_grads_params" else f"mfsdp_{sharding}"
        fabric = launched(world_size, name)
        assert fabric.strategy.sharding == sharding
        module = seeded()
        # The optimizer is built before the module is sharded, as in every Fabric script.
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        train(fabric, model, optimizer, batches(rank, world_size, STEPS))
        for key, value in whole(model).items():
            if world_size == 1:
                assert torch.equal(value, plain[key]), f"{sharding} {key}"
            else:
                torch.testing.assert_close(value, plain[key].detach(), rtol=1e-5, atol=1e-6, msg=f"{sharding} {key}")


def accumulation_and_clipping_are_those_of_plain_pytorch(rank: int, world_size: int) -> None:
    for accumulation, clip in (("local", {"clip_norm": 0.3}), ("sharded", {"clip_value": 0.01})):
        plain = train_plainly(seeded(optimizer="sgd"), GLOBAL_BATCH, STEPS, accumulate=2, **clip)
        unclipped = train_plainly(seeded(optimizer="sgd"), GLOBAL_BATCH, STEPS, accumulate=2)
        assert not torch.allclose(plain.head.weight, unclipped.head.weight, rtol=1e-3), "the limit is never reached"
        fabric = launched(world_size, {"accumulation": accumulation})
        model = fabric.setup_module(seeded(optimizer="sgd"))
        # Built from sharded parameters.
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        train(fabric, model, optimizer, batches(rank, world_size, 2 * STEPS), accumulate=2, **clip)
        for key, value in whole(model).items():
            expected = plain.get_parameter(key).detach()
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=f"{accumulation} {key}")


def a_loop_equals_the_trainer_to_the_bit(rank: int, world_size: int) -> None:
    trained = seeded()
    trainer = make_trainer(tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]))
    trainer.fit(trained, loader(GLOBAL_BATCH // world_size, GLOBAL_BATCH * STEPS, rank, world_size))
    fabric = launched(world_size)
    module = seeded()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    # A LightningModule: training_step is marked as a forward method by Fabric itself.
    for index, batch in enumerate(batches(rank, world_size, STEPS)):
        fabric.backward(model.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(whole(model), full_state(trained))
    assert_same(module.losses, trained.losses)


def no_backward_sync_costs_no_collective(rank: int, world_size: int) -> None:
    ways = (("local", "no_sync"), ("sharded", "keep_sharded"))
    for number, sharding in enumerate(STRATEGIES):
        for accumulation, sync in ways if NIGHT else (ways[number % 2],):
            options = {"units": [nn.Linear], "sharding": sharding, "accumulation": accumulation}
            fabric = launched(world_size, options)
            torch.manual_seed(0)
            module = Funnel()
            model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
            observer = Observer(module)

            def step() -> None:
                for micro in range(3):
                    with fabric.no_backward_sync(model, enabled=micro < 2):  # noqa: B023  called in this round only
                        fabric.backward(model(torch.ones(2, 8, requires_grad=True)).sum())  # noqa: B023
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            step()
            with observer.watching() as counts:
                step()
            expected = expected_on_one_axis(sharding, 3, sync)
            assert counts == expected, f"{sharding} {sync}: {counts - expected} over, {expected - counts} missing"


class TwoWays(Classifier):
    def embed(self, x: Tensor) -> Tensor:
        """Uses root weights, an attribute of it, and a unit."""
        return self.blocks[0](self.inputs(x)) * self.scale


def methods_marked_as_forward_see_whole_weights(rank: int, world_size: int) -> None:
    plain = seeded(TwoWays)
    fabric = launched(world_size)
    model = fabric.setup(seeded(TwoWays))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    with pytest.raises(RuntimeError, match="explicitly mark it as a forward method"):
        model.embed(x)
    model.mark_forward_method("embed")
    output = model.embed(x)
    torch.testing.assert_close(output, plain.embed(x))
    fabric.backward(output.square().mean())
    plain.embed(x).square().mean().backward()
    expected = plain.scale.grad
    dist.all_reduce(expected, op=dist.ReduceOp.SUM)
    torch.testing.assert_close(model.module.scale.grad.full_tensor(), expected / world_size)


def compiled_modules_and_compiled_units_train_alike(rank: int, world_size: int) -> None:
    results = []
    for how in ("not", "module", "units") if NIGHT else ("not", "module"):  # units: tests/lightning/test_compile.py
        torch.compiler.reset()
        fabric = launched(world_size, {"compile": {"backend": "eager"} if how == "units" else False})
        # The compiler asks every tensor it meets.
        warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf.*")
        module = seeded()
        optimizer = module.configure_optimizers()
        called = torch.compile(module, backend="eager") if how == "module" else module
        model, optimizer = fabric.setup(called, optimizer)
        train(fabric, model, optimizer, batches(rank, world_size, STEPS))
        inner = model._orig_mod if how == "module" and not hasattr(model, "module") else model
        results.append(whole(inner))
    for other in results[1:]:
        for key, value in other.items():
            torch.testing.assert_close(value, results[0][key], rtol=1e-5, atol=1e-6, msg=key)


def a_model_built_on_meta_is_the_one_built_for_real(rank: int, world_size: int) -> None:
    fabric = launched(world_size, precision="bf16-true")
    with fabric.init_module(empty_init=True):
        module = Classifier()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    with pytest.raises(RuntimeError, match="which real ones will replace"):
        fabric.setup(module, torch.optim.AdamW(module.parameters()))
    torch.manual_seed(11)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    with fabric.init_module(empty_init=False):
        real = fabric.setup_module(seeded())
    assert_same(whole(model), whole(real))
    assert torch.equal(module.shift, torch.full((12,), 0.25, dtype=torch.bfloat16))
    before = whole(model)
    train(fabric, model, optimizer, batches(rank, world_size, 1))
    assert any(not torch.equal(before[key], value) for key, value in whole(model).items())


def small_things_are_shared_over_ranks(rank: int, world_size: int) -> None:
    fabric = launched(world_size, {"outer_size": world_size})
    assert (fabric.global_rank, fabric.local_rank, fabric.world_size) == (rank, rank, world_size)
    assert fabric.strategy.device_mesh.mesh_dim_names == ("outer", "data")
    assert tuple(fabric.strategy.device_mesh.shape) == (world_size, 1)
    assert fabric.broadcast(f"from {rank}", src=1) == "from 1"
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item() == world_size * (world_size - 1) / 2
    gathered = fabric.all_gather({"x": torch.tensor([rank, 7])})["x"]
    assert gathered.tolist() == [[other, 7] for other in range(world_size)]
    assert fabric.strategy.reduce_boolean_decision(rank == 0) is False
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False) is True
    fabric.barrier()
    data = fabric.setup_dataloaders(loader(2, 8))
    assert len(list(data)) == 4 // world_size
    # Two models in turn, each a root of its own.
    first, second = fabric.setup(seeded()), fabric.setup(seeded())
    x = torch.ones(2, 3)
    fabric.backward(first(x).sum() + second(first(x)[:, :3]).sum())
    assert all(parameter.grad is not None for parameter in (*first.parameters(), *second.parameters()))


WORLDS = {
    1: (every_strategy_trains_like_one_plain_process, a_loop_equals_the_trainer_to_the_bit),
    2: (
        every_strategy_trains_like_one_plain_process,
        accumulation_and_clipping_are_those_of_plain_pytorch,
        a_loop_equals_the_trainer_to_the_bit,
        no_backward_sync_costs_no_collective,
        methods_marked_as_forward_see_whole_weights,
        compiled_modules_and_compiled_units_train_alike,
        a_model_built_on_meta_is_the_one_built_for_real,
        small_things_are_shared_over_ranks,
    ),
}


@by_world(WORLDS)
def test_fabric(world, case):
    check(WORLDS, world, case)


def test_importing_the_package_registers_all_names() -> None:
    for name, sharding in {
        "mfsdp": "optim_grads_params",
        "mfsdp_optim_grads": "optim_grads",
        "mfsdp_optim": "optim",
        "mfsdp_no_shard": "no_shard",
        "mfsdp_notebook": "optim_grads_params",
    }.items():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=name)
        assert isinstance(fabric.strategy, MFSDPFabricStrategy)
        assert fabric.strategy.sharding == sharding
        assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}
        launcher = "_MultiProcessingLauncher" if name == "mfsdp_notebook" else "_SubprocessScriptLauncher"
        assert type(fabric.strategy.launcher).__name__ == launcher
