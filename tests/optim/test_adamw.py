"""AdamW with moments in bfloat16: torch's rule, moments that are right on the mean, and the same bits on every mesh."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, sharded_parameters
from lightning_mfsdp.optim import AdamW
from tests.checkpoint.internals import ParameterIndex, Ranks, full_optimizer_state, lightning_io, locate
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, weights
from tests.helpers.pairwise import in_turn
from tests.optim.internals import (
    GRADIENT_FACTOR,
    MIX_1,
    MIX_2,
    STEP_FACTOR,
    Rule,
    decoded,
    divided,
    encoded,
    random_bits,
    rounded,
    step_,
)
from tests.optim.linear import linear_loss

# Rows that no number of ranks divides, fewer rows than ranks, a single number, no columns to speak of.
SHAPES = ((7, 3), (2, 9), (1, 1), (16, 5), (33,), (6, 6))
EXACT = MixedPrecisionPolicy(grad_reduce="sum")
NARROW = MixedPrecisionPolicy(main_params_dtype=None, grad_reduce="sum")
LEAN = {"state_dtype": "8bit", "store_param_remainders": True}  # with weights in bfloat16
MOMENTS = ("exp_avg", "exp_avg_sq")
LAST_32_BITS = 0xFFFFFFFF


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_with_moments_in_float32_it_does_what_torchs_does(dtype):
    options = {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3, "maximize": dtype is torch.float64}
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.linspace(-2, 2, 999).to(dtype)) for _ in range(2))
    optimizer, reference = AdamW([ours], state_dtype="float32", **options), torch.optim.AdamW([theirs], **options)
    for _ in range(1000 if dtype is torch.float32 else 20):
        ours.grad = torch.randn(999, generator=generator).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    # A step of 0.002 is rounded to half of the last bit of a weight below 4, a random walk of as many steps; bfloat16 has 8 bits.
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-7, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    assert optimizer.state[ours]["exp_avg_sq"].dtype is torch.float32


def test_weights_are_stepped_from_moments_that_are_not_rounded_yet():
    """So that the first step is that of float32, to the bit."""
    narrow, wide = (nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    for parameter, dtype in ((narrow, "bfloat16"), (wide, "float32")):
        parameter.grad = torch.linspace(3, -2, 64)
        AdamW([parameter], state_dtype=dtype).step()
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("numel", [1, 3, 17, 1001])
def test_random_bits_are_those_of_exact_integers(numel):
    """PyTorch's int32 wraps in the vectorized part of a loop as well as in its tail."""
    weight, gradient = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))

    def mixed(one: int, other: int) -> int:
        bits = (one ^ (other * GRADIENT_FACTOR) & LAST_32_BITS) + 7 * STEP_FACTOR & LAST_32_BITS
        bits = (bits ^ bits >> 16) * MIX_1 & LAST_32_BITS
        bits = (bits ^ bits >> 13) * MIX_2 & LAST_32_BITS
        return bits ^ bits >> 16

    patterns = ([value % 2**32 for value in tensor.view(torch.int32).tolist()] for tensor in (weight, gradient))
    expected = [mixed(*pair) for pair in zip(*patterns, strict=True)]
    assert [value % 2**32 for value in random_bits(weight, gradient, 7).tolist()] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_the_weight_before_the_step(dtype):
    weight, gradient = (part.to(dtype) for part in torch.randn(2, 500, generator=torch.Generator().manual_seed(0)))
    bits = random_bits(weight, gradient, 3)
    mean, variance = torch.zeros(2, 500, dtype=torch.bfloat16)
    step_(weight, gradient, mean, variance, Rule.of(AdamW([nn.Parameter(weight)]).defaults, 1e-3, 3))
    wanted = rounded(gradient.float() * (1 - 0.9), bits & 0xFFFF)
    assert torch.equal(mean, wanted.bfloat16())
    wanted = rounded(gradient.float() * (1 - 0.999) * gradient.float(), (bits >> 16) & 0xFFFF)
    assert torch.equal(variance, wanted.bfloat16())


def test_what_is_rounded_is_right_on_the_mean_and_one_of_two_neighbors():
    generator = torch.Generator().manual_seed(0)
    value = torch.tensor([1.001, -3.3, 1e-30, 7.0, -1.0 - 2**-9]).repeat_interleave(100_000)
    results = rounded(value, torch.randint(0, 1 << 16, value.shape, generator=generator, dtype=torch.int32))
    assert torch.equal(results.bfloat16().float(), results), "bfloat16 has them"
    unit = torch.exp2(value.abs().log2().floor() - 7)  # of the last of eight bits
    assert ((results - value).abs() < unit).all()
    errors = ((results - value) / unit).view(5, -1).mean(1)
    assert errors.abs().max() < 5 * 0.5 / 100_000**0.5
    assert torch.equal(results[300_000:400_000], value[300_000:400_000]), "7 needs no rounding"
    special = torch.tensor([float("inf"), float("-inf"), 0.0])
    assert torch.equal(rounded(special, torch.full((3,), 0xFFFF, dtype=torch.int32)).abs()[:2], special.abs()[:2])
    assert rounded(torch.tensor([float("nan")]), torch.tensor([0xFFFF], dtype=torch.int32)).isnan().all()


def test_the_second_moment_shrinks_where_the_nearest_rounding_would_keep_it():
    """With beta 0.999 it changes by less than half of its last bit: the reason for rounding at random."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096))
    optimizer = AdamW([parameter], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    nearest, exact = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096)
    parameter.grad = torch.ones(4096)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1)
    for _ in range(1500):
        parameter.grad = 0.1 * torch.randn(4096, generator=generator)
        optimizer.step()
        squares = parameter.grad.square()
        nearest.copy_(nearest.float() * 0.999 + squares * 0.001)
        exact.mul_(0.999).add_(squares, alpha=0.001)
    found = optimizer.state[parameter]["exp_avg_sq"].float()
    assert nearest.float().mean() > 0.9, "which is why"
    assert abs(found.mean() / exact.mean() - 1) < 0.01
    assert (found / exact - 1).std() < 0.12


def test_what_is_not_a_number_stays_so():
    """The largest pattern of bits would become that of a small number, if bits were added to it."""
    values = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(values, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all()


def test_descending_is_ascending_with_other_signs_to_the_bit():
    down, up = (nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    first, second = AdamW([down]), AdamW([up], maximize=True)
    for step in range(4):
        down.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        up.grad = -down.grad
        first.step()
        second.step()
    assert torch.equal(down, up)
    assert torch.equal(first.state[down]["exp_avg_sq"], second.state[up]["exp_avg_sq"])


def test_a_negative_zero_rounds_like_zero():
    """Whether a gradient was cleared to zero or to none, and added to it, is nobody's concern."""
    for sign in (1.0, -1.0):
        bits = []
        for zero in (0.0, -0.0):
            parameter = nn.Parameter(torch.linspace(-1, 1, 50))
            optimizer = AdamW([parameter], maximize=sign < 0)
            parameter.grad = torch.linspace(1, 2, 50)
            optimizer.step()
            parameter.grad = torch.full((50,), zero)
            optimizer.step()
            bits.append(optimizer.state[parameter]["exp_avg"])
        assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_steps_are_counted_whatever_the_default_dtype_is(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = AdamW([parameter])
        optimizer.state[parameter] = {}
        parameter.grad = torch.ones(2)
        for _ in range(3):
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state[parameter]["step"].dtype is torch.float32
    assert optimizer.state[parameter]["step"] == 3


def test_equal_gradients_of_equal_weights_round_in_different_ways_in_other_steps():
    parameter = nn.Parameter(torch.zeros(8))
    weight, gradient = parameter.detach(), torch.ones(8)
    bits = torch.stack([random_bits(weight, gradient, step) for step in range(1, 9)])
    assert len(set(bits[:, 0].tolist())) == 8
    assert (bits == bits[:, :1]).all(), "and in the same way wherever they are"


# -- as any optimizer --------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    """Parameters of all `SHAPES`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, step: int) -> Tensor:
        return linear_loss(self.parameters(), step)


class Model(nn.Module):
    """Two units and a root with numbers of its own; one parameter is frozen and one unit is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = Numbers(0), Numbers(1), nn.Parameter(torch.linspace(-1, 1, 40).view(10, 4))
        self.first.weights[3].requires_grad_(False)

    def forward(self, step: int) -> Tensor:
        loss = self.first(step) + (self.own * (step + 2)).sum()
        return loss + self.second(step + 50) if step % 2 == 0 else loss


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    model = Model().to(dtype)
    options.setdefault("policy", EXACT if dtype is torch.float32 else NARROW)
    for unit in (model.first, model.second):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def groups(model: Model) -> list[dict[str, Any]]:
    return [{"params": [*model.first.parameters(), model.own]}, {"params": model.second.parameters(), "lr": 0.3}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, factor: int = 1) -> None:
    for step in steps:
        (model(step) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(
    world: int, steps: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Weights by name and moments by number of one process."""
    model = Model().to(dtype)
    optimizer = AdamW(groups(model), lr=0.05, **options)
    train(model, optimizer, range(steps), world)
    state = optimizer.state_dict()["state"]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, state


def assert_equal(model: Model, optimizer: torch.optim.Optimizer, expected: Any, case: object) -> None:
    for name, value in weights(model).items():
        assert torch.equal(value, expected[0][name]), f"{case}: {name}"
    state = full_optimizer_state(optimizer, keep=True)["state"]
    assert state.keys() == expected[1].keys(), case
    for name, values in state.items():
        for key in ("step", *MOMENTS):
            assert values[key].dtype is expected[1][name][key].dtype, f"{case} {name} {key}"
            assert torch.equal(values[key].cpu(), expected[1][name][key]), f"{case} {name} {key}"


def it_trains_as_one_process_to_the_bit_under_every_sharding(rank, world):
    """Also joined with its neighbors, with moments that follow to another sharding, and those of float32."""
    for sharding in in_turn(world, STRATEGIES):
        for dtype in ("bfloat16", "8bit", "float32"):
            model = made(sharding=sharding)
            optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, state_dtype=dtype))
            train(model, optimizer, range(4))
            assert_equal(model, optimizer, reference(world, 4, state_dtype=dtype), f"{sharding} {dtype}")
        model = made(torch.bfloat16, sharding=sharding)
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, **LEAN))
        train(model, optimizer, range(4))
        assert_equal(model, optimizer, reference(world, 4, torch.bfloat16, **LEAN), f"{sharding} lean")


def rows_of_neighbors_are_stepped_together(rank, world):
    model = made()
    optimizer = fully_shard_optimizer(AdamW(model.parameters()))
    counts = []
    model(0).backward()
    optimizer.register_step_post_hook(lambda *_: counts.append(len(optimizer.state)))
    stepped = []
    own = AdamW._state_of

    def counting(self: AdamW, parameter: Tensor) -> Any:
        stepped.append(parameter.numel())
        return own(self, parameter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "_state_of", counting)
        optimizer.step()
    assert len(stepped) < len([one for one in model.parameters() if one.requires_grad]) == 12
    assert counts == [12]


def a_parameter_takes_few_bytes_between_steps(rank, world):
    """Of this rank's rows: main weights, compute shards beside them, and tensors of state. As a table of docs/strategies.md says."""
    lean = MixedPrecisionPolicy(main_params_dtype=None)
    mixed = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for dtype, policy, options, expected in (
        (torch.float32, mixed, {}, 8),
        (torch.float32, mixed, {"state_dtype": "8bit"}, 6),
        (torch.bfloat16, lean, {"store_param_remainders": True}, 8),
        (torch.bfloat16, lean, LEAN, 6),
    ):
        model = made(dtype, policy=policy)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, **options))
        train(model, optimizer, range(1))
        state = [one for values in optimizer.state.values() for one in values.values() if one.dim()]
        state_bytes = sum(one.to_local().nbytes for one in state)
        found = sum(view.main.nbytes for view in sharded_parameters(model)) + state_bytes
        found += sum(group.weights.extra_bytes for unit in context_of(model).units for group in unit.groups)
        assert found == expected * sum(view.main.numel() for view in sharded_parameters(model)), options


def with_offload_it_comes_to_the_same(rank, world):
    for dtype, options in ((torch.float32, {}), (torch.float32, {"state_dtype": "8bit"}), (torch.bfloat16, LEAN)):
        model = made(dtype, offload="optimizer")
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, **options))
        train(model, optimizer, range(3))
        assert_equal(model, optimizer, reference(world, 3, dtype, **options), f"offload {options}")


def with_decoupled_gradients_none_is_rounded_to_bfloat16(rank, world):
    """Sums of microbatches and ranks have more digits: training is that of one process with weights and gradients in float32."""
    plain = Model().bfloat16().float()
    wide = AdamW(groups(plain), lr=0.05, state_dtype="8bit")
    for step in range(3):
        for more in (0, 50):
            (plain(step + more) * 3 * world).backward()
        wide.step()
        wide.zero_grad()
    expected = {name: divided(parameter.detach())[0] for name, parameter in plain.named_parameters()}
    masters = [
        parameter.detach() for group in groups(plain) for parameter in group["params"] if parameter.requires_grad
    ]
    everywhere: list[dict[str, Any]] = [{"sharding": sharding} for sharding in in_turn(world, STRATEGIES)]
    for options in (*everywhere, {"offload": "optimizer"}):
        model = made(torch.bfloat16, **options)
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, **LEAN, use_decoupled_grad=True))
        for step in range(3):
            for more in (0, 50):
                (model(step + more) * 3).backward()
            assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
        for name, value in weights(model).items():
            assert torch.equal(value, expected[name]), f"{options} {name}"
        saved = full_optimizer_state(optimizer, keep=True)["state"]
        for found, master in zip(saved.values(), masters, strict=True):
            assert torch.equal(found["master_param"].cpu(), master), options


def a_state_follows_to_other_dtypes_and_optimizers(rank, world):
    """Into float32 to the bit; from float32 to the nearest; into torch's own and back. 8 bits are shown in bfloat16."""
    for first, kinds in (
        ("bfloat16", ("float32", "torch", "bfloat16")),
        ("8bit", ("float32", "torch", "bfloat16", "8bit")),
    ):
        model = made()
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, state_dtype=first))
        train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        wanted = full_optimizer_state(optimizer, keep=True)["state"]
        for kind in kinds:
            other = made(sharding="optim")
            held = groups(other)
            theirs = torch.optim.AdamW(held) if kind == "torch" else AdamW(held, state_dtype=kind)
            fully_shard_optimizer(theirs)
            theirs.load_state_dict(copy.deepcopy(saved))
            for name, values in full_optimizer_state(theirs, keep=True)["state"].items():
                for key in MOMENTS:
                    shown = torch.float32 if kind in ("float32", "torch") else torch.bfloat16
                    assert values[key].dtype is shown, (first, kind)
                    assert torch.equal(values[key].float(), wanted[name][key].float()), f"{first} {kind} {name} {key}"
            again = fully_shard_optimizer(AdamW(groups(other), state_dtype=first))
            again.load_state_dict(theirs.state_dict())
            for name, values in full_optimizer_state(again, keep=True)["state"].items():
                same = all(torch.equal(values[key], wanted[name][key]) for key in MOMENTS)
                assert same, f"back from {kind} to {first}: {name}"


def state_from_before_sharding_moves_over(rank, world):
    model = Model()
    optimizer = AdamW(groups(model), lr=0.05)
    train(model, optimizer, range(2), world)
    for unit in (model.first, model.second):
        fully_shard(unit, policy=EXACT)
    fully_shard(model, policy=EXACT)
    fully_shard_optimizer(optimizer)
    train(model, optimizer, range(2, 4))
    assert_equal(model, optimizer, reference(world, 4), "moved")


def a_directory_goes_on_on_another_mesh_to_the_bit(rank, world):
    """Four shards, two by two with state divided over both axes, and whole weights."""
    shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    two_by_two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    meshes = ({}, {"mesh": two_by_two, "outer_sharding": "optim"}, {"sharding": "no_shard"})
    kinds = ((torch.float32, {}), (torch.float32, {"state_dtype": "8bit"}), (torch.bfloat16, LEAN))
    for kind, (dtype, own) in enumerate(kinds):
        for number, options in enumerate(meshes):
            case = f"{options} {own}"
            model = made(dtype, **options)
            optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05 if number == 0 else 9.0, **own))
            if number:
                path = locate(f"{shared[0]}/{kind}-{number - 1}.ckpt")
                lightning_io.load(path, model, [optimizer], strict=True, weights_only=True)
                assert_equal(model, optimizer, reference(world, number, dtype, **own), case)
            train(model, optimizer, range(number, number + 1))
            assert_equal(model, optimizer, reference(world, number + 1, dtype, **own), case)
            index = ParameterIndex(model)
            states = [lightning_io.optimizer_state(index, optimizer)]
            content = {"state_dict": model.state_dict(), "optimizer_states": states, "global_step": number}
            saved = lightning_io.ShardedContent.of(index, content, Ranks())
            lightning_io.save(locate(f"{shared[0]}/{kind}-{number}.ckpt"), saved, ranks=Ranks())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])


class Normed(AdamW):
    """Of a class that is derived from it nobody knows that it is elementwise."""

    def step(self, closure=None):
        norms = [one.grad.norm() for group in self.param_groups for one in group["params"] if one.grad is not None]
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        one.grad.div_(
                            torch.stack(
                                [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
                            ).norm()
                        )
        return super().step(closure)


def a_class_derived_from_it_has_whole_tensors(rank, world):
    plain, model = Model(), made()
    theirs, ours = Normed(plain.parameters(), lr=0.1), fully_shard_optimizer(Normed(model.parameters(), lr=0.1))
    train(plain, theirs, range(3), world)
    train(model, ours, range(3))
    for name, value in weights(model).items():
        torch.testing.assert_close(value, dict(plain.named_parameters())[name].detach(), rtol=1e-4, atol=1e-4)


def elementwise_false_steps_uneven_rows(rank, world):
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, LEAN)):
        model = made(dtype)
        optimizer = fully_shard_optimizer(AdamW(groups(model), lr=0.05, **options), elementwise=False)
        train(model, optimizer, range(3))
        assert_equal(model, optimizer, reference(world, 3, dtype, **options), f"elementwise=False {options}")


def its_state_and_torchs_are_each_others_in_pytorchs_own_checkpoints(rank, world):
    """`torch.distributed.checkpoint` compares the names of what is saved with those of what is there."""
    shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    kinds = {"ours": AdamW, "8bit": partial(AdamW, state_dtype="8bit"), "torch": torch.optim.AdamW}
    pairs = (("ours", "torch"), ("torch", "ours"), ("8bit", "torch"), ("8bit", "8bit"), ("torch", "8bit"))
    for flat, (first, second) in product((False, True), pairs):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        before, after = made(), made(sharding="optim")
        saved = fully_shard_optimizer(kinds[first](groups(before), lr=0.05))
        train(before, saved, range(2))
        path = f"{shared[0]}/{flat}-{first}"
        dcp.save({"optimizer": get_optimizer_state_dict(before, saved, options=options)}, checkpoint_id=path)
        loaded = fully_shard_optimizer(kinds[second](groups(after), lr=0.05))
        template = {"optimizer": get_optimizer_state_dict(after, loaded, options=options)}
        dcp.load(template, checkpoint_id=path)
        set_optimizer_state_dict(after, loaded, template["optimizer"], options=options)
        found, wanted = (full_optimizer_state(one, keep=True)["state"] for one in (loaded, saved))
        for number, values in wanted.items():
            for name in MOMENTS:
                if (first, second) == ("torch", "8bit"):
                    expected = encoded(*(values[moment].bfloat16() for moment in MOMENTS))  # what is shown to be loaded
                    wanted_here = decoded(*expected)[MOMENTS.index(name)].bfloat16()
                else:
                    wanted_here = values[name].to(found[number][name].dtype)
                assert torch.equal(found[number][name], wanted_here), (flat, first, second, name)
    whole = StateDictOptions(full_state_dict=True)
    before, after = made(torch.bfloat16), made(torch.bfloat16, sharding="optim")
    saved = fully_shard_optimizer(AdamW(groups(before), lr=0.05, **LEAN))
    train(before, saved, range(2))
    state = get_optimizer_state_dict(before, saved, options=whole)
    loaded = fully_shard_optimizer(AdamW(groups(after), lr=0.05, **LEAN))
    set_optimizer_state_dict(after, loaded, state, options=whole)
    found, wanted = (full_optimizer_state(one, keep=True)["state"] for one in (loaded, saved))
    for number, values in wanted.items():
        assert torch.equal(found[number]["exp_avg"], values["exp_avg"])
        mine, theirs = (divided(one["master_param"])[1] for one in (found[number], values))
        assert torch.equal(mine, theirs), number
    for first, second in (("ours", "torch"), ("torch", "ours")):
        before, after = made(), made(sharding="optim")
        saved = fully_shard_optimizer(kinds[first](groups(before), lr=0.05))
        train(before, saved, range(2))
        state = get_optimizer_state_dict(before, saved, options=whole)
        loaded = fully_shard_optimizer(kinds[second](groups(after), lr=0.05))
        set_optimizer_state_dict(after, loaded, state, options=whole)
        assert float(full_optimizer_state(loaded, keep=True)["state"][0]["step"]) == 2
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])


def dtensors_of_others_are_stepped_where_they_are(rank, world):
    """As under FSDP2 and tensor parallelism; gradients may be placed otherwise."""
    mesh = dist.init_device_mesh("cpu", (world,))
    plain = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5))
    optimizer = AdamW([plain])
    gradients = [torch.randn(7, 5, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    for gradient in gradients:
        plain.grad = gradient.clone()
        optimizer.step()
    for placement, of_gradient in (
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
    ):
        placed = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 35).view(7, 5), mesh, [placement]))
        theirs = AdamW([placed])
        for gradient in gradients:
            placed.grad = distribute_tensor(gradient, mesh, [of_gradient])
            theirs.step()
        assert torch.equal(placed.full_tensor(), plain)
        for name in MOMENTS:
            assert theirs.state[placed][name].placements == (placement,)
            assert torch.equal(theirs.state[placed][name].full_tensor(), optimizer.state[plain][name])


WORLDS = {
    1: (with_offload_it_comes_to_the_same, a_state_follows_to_other_dtypes_and_optimizers),
    2: (
        it_trains_as_one_process_to_the_bit_under_every_sharding,
        rows_of_neighbors_are_stepped_together,
        a_parameter_takes_few_bytes_between_steps,
        with_offload_it_comes_to_the_same,
        with_decoupled_gradients_none_is_rounded_to_bfloat16,
        a_state_follows_to_other_dtypes_and_optimizers,
        state_from_before_sharding_moves_over,
        dtensors_of_others_are_stepped_where_they_are,
        a_class_derived_from_it_has_whole_tensors,
        elementwise_false_steps_uneven_rows,
        its_state_and_torchs_are_each_others_in_pytorchs_own_checkpoints,
    ),
    3: (it_trains_as_one_process_to_the_bit_under_every_sharding,),
    4: (a_directory_goes_on_on_another_mesh_to_the_bit,),
}


@by_world(WORLDS)
def test_on_shards(world, case):
    check(WORLDS, world, case)


def test_copies_pickles_and_the_dtype_of_a_checkpoint_that_is_no_option():
    parameter = nn.Parameter(torch.ones(5))
    parameter.grad = torch.linspace(0, 1, 5)
    optimizer = AdamW([parameter], use_decoupled_grad=True)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_dtype == "bfloat16"
        assert other.use_decoupled_grad
        (values,) = other.state.values()
        assert values["exp_avg"].dtype is torch.bfloat16
    wide = AdamW([parameter], state_dtype="float32")
    wide.load_state_dict(optimizer.state_dict())
    assert wide.state_dtype == "float32"
    assert wide.state[parameter]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_loaded_has_the_bits_of_what_was_saved_whatever_the_weights_have(dtype, state_dtype):
    """Of second moments that float16 does not have, too."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(200, generator=generator).to(dtype))
    optimizer = AdamW([parameter], state_dtype=state_dtype)
    for _ in range(3):
        parameter.grad = (1e-5 * torch.randn(200, generator=generator)).to(dtype)
        optimizer.step()
    again = AdamW([nn.Parameter(parameter.detach().clone())], state_dtype=state_dtype)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ((_, loaded),) = again.state.items()
    for name in MOMENTS:
        assert torch.equal(loaded[name], optimizer.state[parameter][name])
    assert loaded["exp_avg_sq"].any()


def test_groups_have_the_names_of_torchs_and_a_state_of_its_fused_one_is_taken():
    parameter = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(3)
    theirs.step()
    ours = AdamW([parameter])
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    state = copy.deepcopy(theirs.state_dict())
    state["param_groups"][0]["capturable"] = True
    state["state"][0]["step"] = 1
    del state["param_groups"][0]["maximize"]
    ours.load_state_dict(state)
    assert not ours.param_groups[0]["fused"]
    ours.step()
    assert ours.state[parameter]["step"] == 2
    assert ours.state[parameter]["step"].dtype is torch.float32


def test_a_state_that_is_refused_changes_nothing():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    ours = AdamW([parameter], lr=0.5)
    ours.step()
    before = copy.deepcopy(ours.state_dict())
    for theirs, expected in (
        (torch.optim.AdamW([parameter], amsgrad=True), "option amsgrad=True: expected False"),
        (torch.optim.Adam([parameter]), "option decoupled_weight_decay=False: expected True"),
        (
            torch.optim.SGD([parameter], momentum=0.9),
            "betas, eps are not there: this is the state of another optimizer",
        ),
    ):
        theirs.step()
        assert expected in message_of(lambda theirs=theirs: ours.load_state_dict(theirs.state_dict()))
        assert ours.param_groups[0]["lr"] == 0.5
        assert ours.state_dict()["param_groups"] == before["param_groups"]
        assert ours.state[parameter].keys() == before["state"][0].keys()


def test_what_a_schedule_has_left_is_taken():
    """A rate that was rounded below zero, and one of NumPy."""
    for rate in (-2.96e-18, numpy.float32(0.05)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = AdamW([parameter], betas=(numpy.float32(0.5), 0.9))
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.ones(2)
        optimizer.step()
        again = AdamW([parameter])
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again.param_groups[0]["lr"] == rate
        again.step()


def test_hooks_may_make_a_state_fit_and_what_belongs_to_no_parameter_is_taken_as_it_is():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    theirs = torch.optim.Adam([parameter])
    theirs.step()
    state = copy.deepcopy(theirs.state_dict())
    state["state"][7] = copy.deepcopy(state["state"][0])
    state["state"]["global_step"] = 3
    ours = AdamW([parameter])

    def decoupled(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "param_groups": [{**group, "decoupled_weight_decay": True} for group in given["param_groups"]]}

    ours.register_load_state_dict_pre_hook(decoupled)
    ours.load_state_dict(state)
    assert torch.equal(ours.state[7]["exp_avg"], theirs.state[parameter]["exp_avg"])
    assert ours.state["global_step"] == 3
    assert ours.state[parameter]["exp_avg"].dtype is torch.bfloat16
    ours.step()
    assert len(ours._optimizer_load_state_dict_pre_hooks) == 1


def test_memory_layouts_with_gaps_or_another_order_are_stepped_alike():
    plain, last = nn.Parameter(torch.randn(2, 3, 4, 5)), None
    last = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    gap = nn.Parameter(torch.empty(2, 3, 4, 10)[..., ::2].copy_(plain.detach()))
    gradient = torch.randn(2, 3, 4, 5)
    for parameter in (plain, last, gap):
        optimizer = AdamW([parameter])
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(plain, last)
    assert torch.equal(plain, gap)


def test_a_closure_is_called_with_gradients_enabled():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter], lr=torch.tensor(0.5))

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert (parameter < 0.6).all()


def message_of(function: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match="AdamW") as info:
        function()
    return str(info.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"state_dtype": "int8"}, 'AdamW: option state_dtype=\'int8\': expected "bfloat16", "8bit" or "float32"'),
        ({"lr": -1.0}, "AdamW: option lr=-1.0: expected a number of at least 0"),
        ({"betas": (0.9, 1.0)}, "AdamW: option betas=(0.9, 1.0): expected two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, "AdamW: option betas=(0.9,): expected two numbers"),
        ({"betas": 0.9}, "AdamW: option betas=0.9: expected two numbers"),
        ({"lr": "1e-3"}, "AdamW: option lr='1e-3': expected a number of at least 0"),
        ({"lr": torch.ones(2)}, "AdamW: option lr=tensor([1., 1.]): expected a number"),
        ({"eps": -1e-8}, "AdamW: option eps=-1e-08: expected a number of at least 0"),
        ({"weight_decay": -0.1}, "AdamW: option weight_decay=-0.1: expected a number of at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_named(options, expected):
    assert expected in message_of(lambda: AdamW([nn.Parameter(torch.ones(1))], **options))


def test_what_it_cannot_step_is_refused():
    assert "a parameter of shape (2,) has dtype torch.complex64" in message_of(
        lambda: AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    )
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    assert "the gradient of a parameter of shape (4, 2) is sparse" in message_of(optimizer.step)
    assert not optimizer.state
    before = AdamW([nn.Parameter(torch.ones(2))])
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert "has dtype torch.float64 and its moments 8 bits" in message_of(lambda: AdamW([wide], state_dtype="8bit"))
    refused = (("state_dtype", "float32"), ("store_param_remainders", True), ("fused", True))
    for option, value in (*refused, ("capturable", True), ("amsgrad", True)):
        group = {"params": [nn.Parameter(torch.ones(1))], option: value}
        assert f"option {option}={value!r} of a parameter group" in message_of(lambda group=group: AdamW([group]))
    before.param_groups[0]["capturable"] = True  # as `capture_step` does
    assert "to record a step in a CUDA graph use torch.optim.AdamW" in message_of(before.step)
    with pytest.raises(ValueError, match="expected real"):
        before.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.complex64))]})
    assert len(before.param_groups) == 1


def test_a_tensor_without_numbers_has_state_and_changes_nothing():
    parameter = nn.Parameter(torch.ones(0, 4))
    parameter.grad = torch.ones(0, 4)
    optimizer = AdamW([parameter])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].shape == (0, 4)
    rule = Rule.of(optimizer.param_groups[0], 1e-3, 1)
    step_(parameter.detach(), parameter.grad, *(torch.ones(0, 4) for _ in range(2)), rule)
