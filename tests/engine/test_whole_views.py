"""What is written to a view of a sharded parameter or gradient is written to the parameter or the gradient, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import EngineStateError, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, no_sync
from tests.engine.cases import Problems
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES

# From a 2-D tensor of 5 x 4 and what takes part, to a view that is written. `t` is a parameter's data or a gradient.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[0]": lambda t: t[0],
    "[1:3]": lambda t: t[1:3],
    "[:, 2]": lambda t: t[:, 2],
    "[0][1:]": lambda t: t[0][1:],
    "view(-1)": lambda t: t.view(-1),
    "T": lambda t: t.T,
    "t().data": lambda t: t.t().data,
    "chunk": lambda t: t.chunk(2)[1],
    "narrow": lambda t: t.narrow(0, 2, 2),
    "unbind": lambda t: t.unbind()[3],
    "view_as": lambda t: t.view_as(torch.ones(5, 4)),
    "detach()[2:]": lambda t: t.detach()[2:],
    "diagonal": lambda t: t.diagonal(),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(0.5),
    "clamp_": lambda v: v.clamp_(-0.05, 0.05),
    "init": nn.init.ones_,
    "copy_": lambda v: v.copy_(torch.full_like(v, 2.0)),
    "[...] =": lambda v: v.__setitem__(..., 3.0),
    "out": lambda v: torch.clamp(v, 0.01, out=v),
    "foreach": lambda v: torch._foreach_mul_([v], 0.25),
    "data": lambda v: v.data.add_(1.0),
}
OUTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda t, plain: torch.add(t, plain, out=t),
    "mul of a mask": lambda t, plain: torch.mul(t, (plain > 0).to(t.dtype), out=t),
    "lerp": lambda t, plain: torch.lerp(t, plain, 0.25, out=t),
    "where": lambda t, plain: torch.where(plain > 0, t, plain, out=t),
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def pair(sharding: str, **options) -> tuple[Two, Two]:
    model = Two()
    fully_shard(model.first, sharding=sharding, **options)
    return fully_shard(model, sharding=sharding, **options), Two()


def weights(model: Two) -> list[Tensor]:
    return [model.first.weight, model.first.bias]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def views_of_data(rank, world):
    problems, x = Problems(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for sharding in STRATEGIES:
        model, plain = pair(sharding)
        for view_name, view in VIEWS.items():
            for write_name, write in WRITES.items():
                for one in (model, plain):
                    write(view(one.first.weight.data))
                what = f"{sharding} {view_name} {write_name}"
                problems.close(whole(model.first.weight), plain.first.weight.detach(), what)
        problems.close(model(x), plain(x), f"{sharding}: forward sees it")
    problems.finish()


def views_of_gradients(rank, world):
    problems, x = Problems(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for sharding in STRATEGIES:
        model, plain = pair(sharding)
        for one in (model, plain):
            one(x).square().sum().backward()
        for view_name, view in VIEWS.items():
            for write_name, write in WRITES.items():
                for one in (model, plain):
                    write(view(one.first.weight.grad))
                what = f"{sharding} {view_name} {write_name}"
                problems.close(whole(model.first.weight.grad), plain.first.weight.grad, what)
    problems.finish()


def views_made_in_grad_mode_are_written_without_it(rank, world):
    problems = Problems()
    for sharding in STRATEGIES:
        model, plain = pair(sharding)
        for one in (model, plain):
            row, flat = one.first.weight[:2], one.first.weight.view(-1)
            with torch.no_grad():
                row.mul_(0.5)
                flat[3:5].zero_()  # the first write is seen by the second view
            one.first.weight[4].data.fill_(7.0)
            one.first.weight.T.detach()[1].neg_()
        problems.close(whole(model.first.weight), plain.first.weight.detach(), sharding)
        with pytest.raises(EngineStateError, match=r"mul_ on a view of parameter weight of unit first.*torch.no_grad"):
            model.first.weight[:2].mul_(2.0)
        (model.first.weight[:2].square().sum() + model.first.weight.T[0].sum()).backward()
        (plain.first.weight[:2].square().sum() + plain.first.weight.T[0].sum()).backward()
        problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding}: gradients of views")
    problems.finish()


def a_view_that_was_kept_is_written_over_present_values(rank, world):
    problems = Problems()
    for sharding in STRATEGIES:
        model, plain = pair(sharding)
        kept = [one.first.weight.data[:2] for one in (model, plain)]
        for one, view in zip((model, plain), kept, strict=True):
            with torch.no_grad():
                one.first.weight.mul_(3.0)
            view[0].add_(1.0)
        problems.close(whole(model.first.weight), plain.first.weight.detach(), sharding)
    problems.finish()


def out_is_written_where_plain_tensors_take_part(rank, world):
    problems, plain_operand = Problems(), torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    for sharding in STRATEGIES:
        for name, write in OUTS.items():
            model, plain = pair(sharding)
            for one in (model, plain):
                one(torch.ones(2, 4)).sum().backward()
                with torch.no_grad():
                    write(one.first.weight, plain_operand)
                    write(one.first.weight.grad, plain_operand)
                    write(one.first.weight.data, plain_operand)
            problems.close(whole(model.first.weight), plain.first.weight.detach(), f"{sharding} {name}")
            problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding} {name}: gradient")
    problems.finish()


def a_forward_in_another_dtype_sees_what_a_view_wrote(rank, world):
    problems, x = Problems(), torch.ones(1, 4)
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for sharding in STRATEGIES:
        model, plain = pair(sharding, policy=policy)
        fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        model(x)
        for one in (model, plain):
            one.first.weight.data[0].zero_()
            one.first.bias.data[:1].zero_()
        got = model.first(x.bfloat16())
        problems.expect(got[0, 0].item() == 0.0, f"{sharding}: {got[0, 0].item()}")
    problems.finish()


def a_step_after_backwards_under_no_sync_alone_leaves_what_nobody_used(rank, world):
    for sharding in STRATEGIES:
        for looks in (False, True):
            torch.manual_seed(0)
            model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
            fully_shard(model, sharding=sharding)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
            before = {name: one.full_tensor() for name, one in model.named_parameters()}
            with no_sync(model):
                model["used"](torch.ones(2, 3)).sum().backward()
                if looks:
                    assert all(torch.isfinite(one.grad).all() for one in model["used"].parameters())
                    model["used"](torch.ones(2, 3)).sum().backward()
            optimizer.step()
            moved = {name for name, one in model.named_parameters() if not torch.equal(one.full_tensor(), before[name])}
            assert moved == {"used.weight", "used.bias"}, (sharding, looks, moved)
            assert len(optimizer.state) == 2


CASES = (
    views_of_data,
    views_of_gradients,
    views_made_in_grad_mode_are_written_without_it,
    a_view_that_was_kept_is_written_over_present_values,
    out_is_written_where_plain_tensors_take_part,
    a_forward_in_another_dtype_sees_what_a_view_wrote,
    a_step_after_backwards_under_no_sync_alone_leaves_what_nobody_used,
)
WORLDS = {1: CASES, 2: CASES, 3: CASES}


@by_world(WORLDS)
def test_views(world, case):
    check(WORLDS, world, case)


def test_what_numpy_shows_of_a_view_cannot_be_written(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    model = fully_shard(nn.Linear(3, 2))
    array = model.weight.data[0].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
