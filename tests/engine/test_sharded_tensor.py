"""What users hold of a sharded parameter outside its unit: right values, or an error that says what to do."""

from __future__ import annotations

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_mfsdp.engine import EngineStateError, fully_shard, fully_shard_optimizer, sharded_parameters, unshard
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, inputs, sharded_chain, train, weights


def uneven(seed: int = 0) -> nn.Module:
    """Rows that no number of ranks divides, and fewer rows than ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def derived_tensors_know_where_their_rows_lie(rank, world):
    plain, model = uneven(), fully_shard(uneven())
    state = model.state_dict()
    for name, parameter in plain.named_parameters():
        mine, expected = model.get_parameter(name), parameter.detach()
        assert torch.equal(state[name].full_tensor(), expected)
        for derive in (
            Tensor.detach,
            Tensor.clone,
            Tensor.abs,
            lambda t: t.data,
            lambda t: 2 * t + t,
            lambda t: -t.detach(),
        ):
            with torch.no_grad():
                assert torch.equal(derive(mine).full_tensor(), derive(expected)), name
        with torch.no_grad():
            torch.testing.assert_close(mine.norm().full_tensor(), expected.norm())
            torch.testing.assert_close(torch._foreach_norm([mine, mine])[1].full_tensor(), expected.norm())
            assert torch._foreach_mul([mine], 2.0)[0].full_tensor().equal(2 * expected)
    whole = fully_shard(uneven(), sharding="no_shard")
    assert torch.equal(copy.deepcopy(whole.state_dict())["2.bias"].full_tensor(), plain[2].bias.detach())
    copied = copy.deepcopy(state)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model.load_state_dict(copied)
    found = weights(model)
    assert all(torch.equal(found[name], parameter.detach()) for name, parameter in plain.named_parameters())


def numbers_are_those_of_the_whole_tensor_on_every_rank(rank, world):
    """Also of parameters that lie whole on one rank."""
    for sharding in ("no_shard", "optim_grads_params"):
        plain, model = uneven(), uneven()
        for layer in model[::2]:
            fully_shard(layer, sharding=sharding)
        fully_shard(model, sharding=sharding)
        for name, expected in plain.named_parameters():
            mine = model.get_parameter(name)
            for look in (Tensor.sum, Tensor.norm, lambda t: t.norm(1), lambda t: (t * float("nan")).isnan().any()):
                assert look(mine).item() == pytest.approx(look(expected).item(), rel=1e-5), f"{sharding} {name}"
        total = float(sum(parameter.square().sum() for parameter in model.parameters()))
        assert total == pytest.approx(
            float(sum(parameter.square().sum() for parameter in plain.parameters())), rel=1e-5
        )


def writes_through_a_state_dict_reach_forward(rank, world):
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        model, x = sharded_chain(sharding=sharding), inputs(0)
        train(model, adamw(model), range(1), rank)
        with torch.no_grad():
            before = model(x)
            for value in model.state_dict().values():
                value.zero_()
            assert before.abs().sum() > 0
            assert model(x).abs().sum() == 0, sharding


def what_looks_at_rows_by_position_gathers_them(rank, world):
    model = fully_shard(uneven())
    square = fully_shard(nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 7)))
    whole_on_one_rank = fully_shard(nn.Linear(3, 1, bias=False))
    for weight, look in (
        (square[0].weight, lambda t: t @ t),
        (square[0].weight, torch.trace),
        *((whole_on_one_rank.weight, look) for look in (lambda t: t[0], lambda t: t.cumsum(0))),
        *(
            (model[0].weight, look)
            for look in (
                lambda t: t.softmax(0),
                lambda t: t[1:],
                lambda t: t.T,
                lambda t: t.flatten(),
                lambda t: t.sort(0)[0],
                lambda t: t.chunk(2)[0],
                lambda t: torch._foreach_max([t])[0],
            )
        ),
    ):
        whole = weight.full_tensor()
        for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with mode:
                torch.testing.assert_close(look(weight).detach().clone(), look(whole), check_dtype=False)
    assert model[2].bias.item() == model[2].bias.full_tensor().item()
    nn.init.orthogonal_(square[0].weight)
    whole = square[0].weight.full_tensor()
    torch.testing.assert_close(whole @ whole.T, torch.eye(7))
    with pytest.raises(EngineStateError, match="sharded by rows"):
        model[0].weight.redistribute(placements=model[0].weight.placements)


def torchs_own_checkpoints_write_and_read_the_right_rows(rank, world):
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    source, target = fully_shard(uneven(0)), fully_shard(uneven(1))
    dcp.save(source.state_dict(), checkpoint_id=folder[0])
    state = target.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    target.load_state_dict(state)
    expected = weights(source)
    assert all(torch.equal(value, expected[name]) for name, value in weights(target).items())
    whole = {name: torch.empty_like(value) for name, value in expected.items()}
    dcp.load(whole, checkpoint_id=folder[0])
    assert all(torch.equal(value, expected[name]) for name, value in whole.items())


def pickling_says_what_to_save_instead(rank, world):
    model = fully_shard(uneven())
    if world == 1:  # which has whole tensors
        torch.save(model.state_dict(), io.BytesIO())
        return
    with pytest.raises(
        EngineStateError, match=r"parameter 0\.weight of unit Sequential.*save full_state_dict\(module\)"
    ):
        torch.save(model.state_dict(), io.BytesIO())


def what_looks_at_rows_by_position_gets_the_whole_in_grad_mode(rank, world):
    plain, model = uneven(), fully_shard(uneven())
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for look in (lambda t: t[1:], lambda t: t.T, lambda t: t.flatten(), lambda t: t.max(), lambda t: t.softmax(0)):
        torch.testing.assert_close(look(model[0].weight), look(plain[0].weight))
        torch.testing.assert_close(look(model[0].weight.requires_grad_(False)), look(plain[0].weight))
        model[0].weight.requires_grad_(True)


def shards_are_not_moved_into_shared_memory(rank, world):
    model = fully_shard(uneven())
    with pytest.raises(EngineStateError, match="share_memory_ on parameter"):
        model.share_memory()


def marks_on_parameters_stay(rank, world):
    model = uneven()
    model[0].bias.no_weight_decay = True
    fully_shard(model)
    marked = [hasattr(parameter, "no_weight_decay") for parameter in model.parameters()]
    assert marked == [False, True, False, False]
    assert [hasattr(view.local, "no_weight_decay") for view in sharded_parameters(model)] == marked


def copies_for_an_asynchronous_save_are_sharded_alike(rank, world):
    """PyTorch's stager copies the attributes that a class names in `__slots__`, and of a subclass only its own."""
    stager = DefaultStager(StagingOptions(*[False] * 4))
    plain, model = uneven(), fully_shard(uneven())
    staged = stager.stage(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for name, parameter in plain.named_parameters():
        assert torch.equal(staged[name].full_tensor(), parameter.detach()), name


class OddDtypes(nn.Linear):
    """Buffers and a frozen parameter of dtypes that collectives do not know."""

    def __init__(self, factor: int) -> None:
        super().__init__(4, 4)
        for dtype in (torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.full((3,), factor).to(dtype))
        self.register_buffer("scalar", torch.tensor(factor, dtype=torch.int16))
        self.table = nn.Parameter(torch.arange(12).view(6, 2).to(torch.int16) * factor, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table.sum()


def every_dtype_is_the_first_ranks(rank, world):
    model = fully_shard(OddDtypes(1 if rank == 0 else 0))
    assert all(buffer.to(torch.complex64).real.eq(1).all() for buffer in model.buffers())
    assert model(torch.ones(1, 4)).abs().sum() > 0, "the table is gathered"
    with unshard(model):
        assert model.table.flatten().tolist() == list(range(12))


CASES = tuple(
    value
    for value in list(globals().values())
    if getattr(value, "__module__", "") == __name__
    and getattr(value, "__code__", None)
    and value.__code__.co_varnames[:2] == ("rank", "world")
)
WORLDS = {
    2: CASES,
    3: (derived_tensors_know_where_their_rows_lie, torchs_own_checkpoints_write_and_read_the_right_rows),
}


@by_world(WORLDS)
def test_sharded_tensors(world, case):
    check(WORLDS, world, case)
