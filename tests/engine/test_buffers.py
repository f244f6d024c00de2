"""Buffers take the values of the first rank, together, and what each rank has for itself stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp import broadcast_buffers, fully_shard
from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe import GroupedExperts, TopKRouter
from tests.engine.cases import device_type
from tests.engine.worlds import by_world, check


class Kinds(nn.Module):
    """Buffers of every kind, which differ by rank once `fill` was called."""

    buffers_of_each_rank = ("mine",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mine", torch.zeros(2))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("low", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(3, 2).T)
        self.register_buffer("repeated", torch.zeros(2, 1).expand(2, 3))
        self.register_buffer("absent", None)
        self.same = self.norm.running_mean

    @torch.no_grad()
    def fill(self, value: int) -> None:
        for name, buffer in self.named_buffers():
            if name == "repeated":
                buffer[:, :1].fill_(value)
            elif name == "turned":
                buffer.copy_(torch.arange(6.0).view(2, 3) + value)
            else:
                buffer.fill_(value)

    def values(self) -> dict[str, Any]:
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


def filled(rank: int, **options: Any) -> Kinds:
    model = Kinds()
    fully_shard(model.linear, **options)
    fully_shard(model, **options)
    model.fill(rank + 1)
    return model


class Counted:
    """Collectives issued inside, by name."""

    def __enter__(self) -> dict[str, int]:
        self.patch, self.found = pytest.MonkeyPatch(), {}
        for name in ("broadcast", "all_reduce"):
            self.patch.setattr(dist, name, self._counting(name, getattr(dist, name)))
        return self.found

    def _counting(self, name: str, function: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.found[name] = self.found.get(name, 0) + 1
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def every_kind_follows_in_one_broadcast_and_its_memory_stays(rank, world):
    model = filled(rank)
    memory = {name: (id(buffer), buffer.data_ptr()) for name, buffer in model.named_buffers()}
    expected = filled(0).values()
    with Counted() as found:
        broadcast_buffers(model)
    assert found == {"broadcast": 1, "all_reduce": 1}
    assert model.values() == {**expected, "mine": [rank + 1] * 2}
    assert {name: (id(buffer), buffer.data_ptr()) for name, buffer in model.named_buffers()} == memory


def much_memory_goes_in_several_broadcasts(rank, world):
    model = filled(rank)
    patch = pytest.MonkeyPatch()
    patch.setattr("lightning_mfsdp.engine.comm.collectives.TOGETHER_BYTES", 16)
    with Counted() as found:
        broadcast_buffers(model)
    patch.undo()
    assert found["broadcast"] > 4
    assert model.values() == {**filled(0).values(), "mine": [rank + 1] * 2}


def parameters_of_a_unit_take_the_first_ranks_values_in_one_broadcast(rank, world):
    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3, dtype=torch.bfloat16))
        made[1].weight = nn.Parameter(made[1].weight.detach().t())  # with gaps between rows in memory
        return made

    expected = {name: value.detach().clone() for name, value in built(0).named_parameters()}
    for most, broadcasts in (
        (1 << 20, 2),
        (70, 7),
    ):  # two groups, since dtypes differ; 64 bytes of a weight and 16 of a bias
        model, patch = built(rank), pytest.MonkeyPatch()
        patch.setattr("lightning_mfsdp.engine.comm.collectives.TOGETHER_BYTES", most)
        patch.setattr("lightning_mfsdp.engine.core.group.TOGETHER_BYTES", most)
        with Counted() as found:
            fully_shard(model)
        patch.undo()
        assert found == {"broadcast": broadcasts, "all_reduce": 1}, found
        for name, value in model.named_parameters():
            assert torch.equal(value.full_tensor(), expected[name]), name


def a_backward_over_buffers_that_were_shared_since_its_forward_raises(rank, world):
    """As after any write to what autograd has saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3))
    model[1].running_var.fill_(1.0 + rank)
    fully_shard(model)
    loss = model(torch.ones(2, 4)).sum()
    broadcast_buffers(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def what_ddp_was_told_to_ignore_stays(rank, world):
    model = filled(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["norm.running_mean", "low"])
    broadcast_buffers(model)
    assert model.norm.running_mean.tolist() == [rank + 1] * 4
    assert model.low.tolist() == [rank + 1] * 5
    assert model.norm.running_var.tolist() == [1] * 4


def buffers_made_by_an_evaluation_follow_too(rank, world):
    model = filled(rank)
    with torch.inference_mode():
        model.flag = torch.tensor(rank == 0)
        broadcast_buffers(model)
        model.count += rank
    broadcast_buffers(model)
    assert model.flag.item()
    assert model.count.tolist() == [1] * 3


def other_buffers_on_other_ranks_are_refused_on_all(rank, world):
    model = filled(rank)
    model.low = torch.zeros(5 + rank, dtype=torch.bfloat16)
    with pytest.raises(
        EngineStateError, match=r"low: \(5,\) torch.bfloat16 and \(6,\) torch.bfloat16.*broadcast_buffers=False"
    ):
        broadcast_buffers(model)
    model = filled(rank)
    if rank == 1:
        model.register_buffer("more", torch.zeros(1))
    with pytest.raises(EngineStateError, match=r"more: \(1,\) torch.float32 and none"):
        broadcast_buffers(model)


def nothing_happens_without_sharding(rank, world):
    model = Kinds()
    model.fill(rank + 1)
    broadcast_buffers(model)
    assert model.norm.running_mean.tolist() == [rank + 1] * 4


def sharding_takes_one_broadcast_for_all_and_keeps_shared_ones_shared(rank, world):
    model, bare = Kinds(), Kinds()
    model.fill(rank + 1)
    model.linear.register_buffer("tied", model.norm.running_mean)
    for part in bare.modules():
        part._buffers.clear()
    counts = []
    for one in (bare, model):
        with Counted() as found:
            fully_shard(one)
        counts.append(found["broadcast"])
    assert counts[1] == counts[0] + 1
    assert model.linear.tied is model.norm.running_mean
    del model.linear.tied
    assert model.values() == {**filled(0).values(), "mine": [1, 1]}


def the_first_rank_of_two_axes_is_followed(rank, world):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    model = filled(rank, mesh=mesh)
    broadcast_buffers(model)
    assert model.values() == {**filled(0).values(), "mine": [rank + 1] * 2}


class Mixture(nn.Module):
    """A router for all ranks, and experts of which each rank of the expert axis has others."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size=4, num_experts=4, top_k=1, balancing="bias")
        self.experts = GroupedExperts(num_experts=2, hidden_size=4, intermediate_size=8)
        self.experts.register_buffer("scale", torch.ones(2))


def buffers_of_experts_follow_the_first_rank_that_has_the_same_ones(rank, world):
    meshes = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("shard", "expert"))
    model = Mixture()
    fully_shard(model.experts, meshes)
    fully_shard(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(rank)
    broadcast_buffers(model)
    assert model.experts.scale.tolist() == [rank % 2] * 2
    assert model.router.bias.tolist() == [0] * 4
    assert model.router.load.tolist() == [rank] * 4, "what this rank has counted since balance()"
    assert (model.experts.live_rows.item(), model.experts.over_budget.item()) == (rank, bool(rank))


WORLDS = {
    1: (nothing_happens_without_sharding,),
    2: (
        every_kind_follows_in_one_broadcast_and_its_memory_stays,
        much_memory_goes_in_several_broadcasts,
        parameters_of_a_unit_take_the_first_ranks_values_in_one_broadcast,
        a_backward_over_buffers_that_were_shared_since_its_forward_raises,
        what_ddp_was_told_to_ignore_stays,
        buffers_made_by_an_evaluation_follow_too,
        other_buffers_on_other_ranks_are_refused_on_all,
        nothing_happens_without_sharding,
        sharding_takes_one_broadcast_for_all_and_keeps_shared_ones_shared,
    ),
    4: (
        the_first_rank_of_two_axes_is_followed,
        buffers_of_experts_follow_the_first_rank_that_has_the_same_ones,
    ),
}


@by_world(WORLDS)
def test_buffers(world: int, case: Any) -> None:
    check(WORLDS, world, case)
