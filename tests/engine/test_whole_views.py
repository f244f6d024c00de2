"""What is written to a view of a sharded parameter or gradient is written to the parameter or the gradient, as in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    no_sync,
)
from tests.engine.cases import Problems
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import STRATEGIES
from tests.helpers.pairwise import in_turn, in_world

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
    for sharding in in_turn(0, STRATEGIES):
        model, plain = pair(sharding)
        for (view_name, view), (write_name, write) in in_world(world, (2, 3), VIEWS.items(), WRITES.items()):
            for one in (model, plain):
                write(view(one.first.weight.data))
            what = f"{sharding} {view_name} {write_name}"
            problems.close(whole(model.first.weight), plain.first.weight.detach(), what)
        problems.close(model(x), plain(x), f"{sharding}: forward sees it")
    problems.finish()


def views_of_gradients(rank, world):
    problems, x = Problems(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for sharding in in_turn(1, STRATEGIES):
        model, plain = pair(sharding)
        for one in (model, plain):
            one(x).square().sum().backward()
        for (view_name, view), (write_name, write) in in_world(world, (2, 3), VIEWS.items(), WRITES.items()):
            for one in (model, plain):
                write(view(one.first.weight.grad))
            what = f"{sharding} {view_name} {write_name}"
            problems.close(whole(model.first.weight.grad), plain.first.weight.grad, what)
    problems.finish()


def views_made_in_grad_mode_are_written_without_it(rank, world):
    problems = Problems()
    for sharding in in_turn(2, STRATEGIES):
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
    for sharding in in_turn(3, STRATEGIES):
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
    for sharding in in_turn(4, STRATEGIES):
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
    for sharding in in_turn(5, STRATEGIES):
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
    for sharding in in_turn(6, STRATEGIES):
        for looks in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(OrderedDict(used=nn.Linear(3, 3), unused=nn.Linear(3, 3)))
            fully_shard(model, sharding=sharding)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
            before = {name: one.full_tensor() for name, one in model.named_parameters()}
            with no_sync(model):
                model.used(torch.ones(2, 3)).sum().backward()
                if looks:
                    assert all(torch.isfinite(one.grad).all() for one in model.used.parameters())
                    model.used(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            moved = {name for name, one in model.named_parameters() if not torch.equal(one.full_tensor(), before[name])}
            assert moved == {"used.weight", "used.bias"}, (sharding, looks, moved)
            assert len(optimizer.state) == 2


# Views and sharded tensors meet in one call. `w` is 5 x 4 and `b` has 5 numbers.
TOGETHER: dict[str, Callable[[Tensor, Tensor], object]] = {
    "two views of one tensor": lambda w, b: torch._foreach_mul_([w[:1], w[2:3]], 0.0),
    "views that overlap": lambda w, b: torch._foreach_mul_([w[:2], w[1:4]], 0.5),
    "a tensor, then a view": lambda w, b: torch._foreach_mul_([b, w[:1]], 0.0),
    "a view, then a tensor": lambda w, b: torch._foreach_mul_([b[:1], w], 0.0),
    "out": lambda w, b: torch.mul(w.view(5, 4), 0.5, out=w),
    "in place by a view": lambda w, b: w.mul_(w.T.clone().T),
    "swapped": lambda w, b: (w.__setitem__(0, w[1]), w.__setitem__(2, w[0])),
    "apply_": lambda w, b: w[0].apply_(lambda x: x + 1) if w.device.type == "cpu" else w[0].add_(1),
    "relu inplace": lambda w, b: nn.functional.relu(w[1:3], inplace=True),
    "embedding max_norm": lambda w, b: nn.functional.embedding(
        torch.tensor([0, 3], device=w.device), w[:4], max_norm=0.1
    ),
}


def views_and_sharded_tensors_are_written_in_one_call(rank, world):
    problems = Problems()
    for sharding, (name, write), what in in_world(world, (2, 3), STRATEGIES, TOGETHER.items(), ("data", "grad")):
        model, plain = pair(sharding)
        for one in (model, plain):
            one(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                write(getattr(one.first.weight, what), getattr(one.first.bias, what))
        for ours, theirs in zip(weights(model), weights(plain), strict=True):
            problems.close(whole(getattr(ours, what)), getattr(theirs, what), f"{sharding} {name} {what}")
    problems.finish()


class Halving(torch.optim.SGD):
    """Writes to gradients in its step, as fused optimizers do that divide them by the scale of a loss."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


def a_view_that_is_kept_shows_what_was_written_since(rank, world):
    """By whomever: a function, another view that overlaps, an optimizer. And what it writes leaves other rows as they are."""
    problems = Problems()
    for sharding, kind in in_world(world, (2, 3), STRATEGIES, (torch.optim.SGD, Halving)):
        model, plain = pair(sharding)
        seen: list[list[Tensor]] = []
        for one in (model, plain):
            optimizer = kind(one.parameters(), lr=0.5)
            if one is model:
                optimizer = fully_shard_optimizer(optimizer, elementwise=True if kind is Halving else None)
            weight = one.first.weight
            row, rows, detached = weight.data[0], weight.data[:2], weight.detach()[1:]
            shown = [row.clone()]
            weight.data.fill_(0.3)
            shown += [row.clone(), rows.sum(), detached[0] * 2]
            rows.fill_(0.2)
            shown += [row.clone(), detached.clone()]
            one(torch.ones(2, 4)).square().sum().backward()
            gradient = weight.grad[:1]
            optimizer.step()
            shown += [row.clone(), detached.clone(), gradient.clone()]
            one(torch.ones(2, 4)).square().sum().backward()
            shown.append(gradient.clone())
            nn.functional.relu(rows.neg_(), inplace=True)
            shown.append(whole(weight))
            seen.append(shown)
        for number, (ours, theirs) in enumerate(zip(*seen, strict=True)):
            problems.close(ours, theirs, f"{sharding} {kind.__name__} {number}")
    problems.finish()


def a_view_shows_what_was_written_to_rows_that_an_optimizer_holds(rank, world):
    """Outside of a step, where nobody tells of it."""
    for sharding in in_turn(3, STRATEGIES):
        model, _ = pair(sharding)
        optimizer = fully_shard_optimizer(Halving(model.parameters(), lr=0.5), elementwise=True)
        row = model.first.weight.data[0]
        before = row.clone()
        with torch.no_grad():
            for rows in optimizer.param_groups[0]["params"]:
                rows.mul_(0.5)
        assert torch.equal(row.clone(), before * 0.5), sharding


def views_are_made_and_written_without_grad_mode(rank, world):
    problems = Problems()
    for sharding in in_turn(7, STRATEGIES):
        model, plain = pair(sharding)
        for one in (model, plain):
            one(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                one.first.weight[:1].mul_(2.0)
                one.first.weight.T[1].zero_()
                one.first.weight[1:2] += 1.0
                one.first.weight.grad[:2].zero_()
                one.first.bias.data[0] = 3.0
        problems.close(whole(model.first.weight), plain.first.weight.detach(), sharding)
        problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding}: gradient")
        problems.close(whole(model.first.bias), plain.first.bias.detach(), f"{sharding}: bias")
        with torch.no_grad():
            problems.close(
                model.first.weight @ model.first.weight.T, plain.first.weight @ plain.first.weight.T, sharding
            )
        with torch.inference_mode():
            problems.close(model.first.weight[1].sum(), plain.first.weight[1].sum(), sharding)
            problems.close(whole(model.first.weight.detach()), plain.first.weight.detach(), sharding)
    problems.finish()


# Of a weight that a loss is computed from outside of its module's forward, with an activation of two rows of 4 numbers.
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clone": lambda w, x: nn.functional.linear(x, w.clone()),
    "to": lambda w, x: nn.functional.linear(x.double(), w.to(torch.float64)),
    "type_as": lambda w, x: nn.functional.linear(x.double(), w.type_as(x.double())),
    "of a copy": lambda w, x: nn.functional.linear(x.double(), w.clone().double()),
    "double and a row": lambda w, x: w.double()[:2] * 2,
    "clone and a sum": lambda w, x: w.clone().sum() * x.sum(),
    "contiguous": lambda w, x: x @ w.T.contiguous(),
    "a row and the whole": lambda w, x: torch.cat([w[:1], w * 3]),
    "a view that is written and read": lambda w, x: _written(w[:2]).square(),
}


def _written(view: Tensor) -> Tensor:
    with torch.no_grad():
        view.mul_(2.0)
    return view


def a_copy_or_a_view_of_a_weight_leads_to_its_gradient(rank, world):
    problems, x = Problems(), torch.arange(8.0).view(2, 4)
    for sharding in in_turn(8, STRATEGIES):
        for name, use in USES.items():
            model, plain = pair(sharding)
            for one in (model, plain):
                with gather_root(model) if one is model else nullcontext():
                    loss = use(one.first.weight, x).sum().float() + one(x).sum()
                loss.backward()
            problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding} {name}")
        leaf = model.first.weight.detach().clone().requires_grad_()
        with pytest.raises(EngineStateError, match="the gradient would be lost"):
            nn.functional.linear(x, leaf)
    problems.finish()


def _two(weight: Tensor, bias: Tensor, x: Tensor, write: Callable[[Tensor, Tensor], object]) -> Tensor:
    """A loss of a view, a copy and a detached view, all made before `write` and used after it, the last one twice."""
    view, kept, seen = weight[:2], weight.clone(), weight.detach()[1:3]
    saves = write not in (
        CHANGES["it"],
        CHANGES["itself"],
    )  # else plain PyTorch raises, as what a graph saved was written
    loss = (x @ seen.T).square().mean() + (x @ seen.T).mean() if saves else x.sum()
    with torch.no_grad():
        write(weight, bias)
    return loss + view.sum() + ((weight - kept) * 3 + kept.float().double()).sum() + kept[:1].sum()


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "nothing": lambda w, b: None,
    "another": lambda w, b: b.mul_(2.0),
    "it": lambda w, b: w.mul_(2.0),
    "its gradient": lambda w, b: None if w.grad is None else w.grad.mul_(2.0),
    "a look": lambda w, b: w[:2].tolist(),
    "itself": lambda w, b: setattr(w, "data", w.data[:]),
}


def what_was_made_before_a_write_is_right_after_it(rank, world):
    """Views show what was written, copies do not, and both lead to the gradient; graphs keep what they saved."""
    problems = Problems()
    for sharding, (name, write) in in_world(world, (2, 3), STRATEGIES, CHANGES.items()):
        model, plain = pair(sharding)
        for one in (model, plain):
            one(torch.ones(2, 4)).sum().backward()
            x = torch.tanh(one.first(torch.ones(2, 4))).T[:4].T.detach().requires_grad_()
            with gather_root(model) if one is model else nullcontext():
                loss = _two(one.first.weight, one.first.bias, x, write)
            loss.backward()
            one.seen = [loss.detach(), x.grad]
        for ours, theirs in zip(model.seen, plain.seen, strict=True):
            problems.close(ours, theirs, f"{sharding} {name}")
        problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding} {name}: gradient")
        for one in (model, plain):
            one.first.weight.grad = one.first.weight.grad[:] * 2
            one(torch.ones(2, 4)).sum().backward()
        problems.close(whole(model.first.weight.grad), plain.first.weight.grad, f"{sharding} {name}: next gradient")
    problems.finish()


def a_view_is_looked_at_by_one_rank(rank, world):
    model, plain = pair("optim_grads_params")
    row = model.first.weight.data[0]
    if rank == 0:
        assert str(row.tolist()) == str(plain.first.weight.data[0].tolist())
        assert repr(row)
    model.first.weight.data.mul_(2.0)
    if rank == 0:
        assert repr(row), "as it was"


def what_initializes_a_parameter_in_grad_mode_writes_to_it(rank, world):
    problems = Problems()
    for sharding in in_turn(9, STRATEGIES):
        for name, initialize in {
            "constant_": lambda w: nn.init.constant_(w, 2.0),
            "by keyword": lambda w: nn.init.constant_(tensor=w, val=3.0),
            "normal_": lambda w: (torch.manual_seed(0), nn.init.normal_(w)),
            "orthogonal_": lambda w: (torch.manual_seed(0), nn.init.orthogonal_(w)),
        }.items():
            model, plain = pair(sharding)
            for one in (model, plain):
                initialize(one.first.weight)
            problems.close(whole(model.first.weight), plain.first.weight.detach(), f"{sharding} {name}")
    problems.finish()


def values_are_compared_alike_on_all_ranks(rank, world):
    for sharding in in_turn(10, STRATEGIES):
        model, plain = pair(sharding)
        other = plain.first.weight.detach().clone()
        assert torch.equal(model.first.weight.data, other)
        other[0] += 1  # the first rank's row
        assert not torch.equal(model.first.weight.data, other), sharding
        assert not torch.equal(other, model.first.weight), sharding


class Copied(TorchDispatchMode):
    """Counts copies of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.count += args[0].dim() == 2
        return func(*args, **(kwargs or {}))


def what_is_shown_or_written_is_copied_once(rank, world):
    """After the gather: to memory in which views may be written, and of what a function wrote the rows."""
    ids = torch.tensor([0, 3])
    for sharding in STRATEGIES[1:]:
        model, _ = pair(sharding)
        with Copied() as shown:
            assert model.first.weight[:2].shape == (2, 4)
        with torch.no_grad(), Copied() as written:
            nn.functional.embedding(ids, model.first.weight, max_norm=0.1)
        assert (shown.count, written.count) == (1, 1), (sharding, shown.count, written.count)


def a_view_keeps_nothing_of_its_callers(rank, world):
    model, _ = pair("optim_grads_params")
    big = torch.zeros(1000)
    alive = weakref.ref(big)
    model.first.weight.data[0].mul_(0.5)
    del big
    gc.collect()
    assert alive() is None


def what_cannot_follow_a_view_is_refused_or_copies(rank, world):
    model, plain = pair("optim_grads_params")
    row = model.first.weight.data[0]
    torch.testing.assert_close(copy.deepcopy(row), plain.first.weight.data[0])
    copy.deepcopy(row).zero_()
    torch.testing.assert_close(whole(model.first.weight), plain.first.weight.detach())
    if row.device.type == "cpu":
        model.first.weight.data.apply_(lambda x: x + 1)
        torch.testing.assert_close(whole(model.first.weight), plain.first.weight.detach() + 1)
        with pytest.raises(EngineStateError, match="map_"):
            model.first.weight.data.map_(plain.first.weight.data, lambda x, y: y)
    if world > 1:
        with pytest.raises(EngineStateError, match=r"weight of unit first is handed to another library"):
            torch.from_dlpack(row)
        with pytest.raises(EngineStateError, match=r"would make both one memory"):
            model.first.bias.data = model.second.weight.data.view(-1)[:5]


CASES = (
    views_and_sharded_tensors_are_written_in_one_call,
    a_view_that_is_kept_shows_what_was_written_since,
    a_view_shows_what_was_written_to_rows_that_an_optimizer_holds,
    views_are_made_and_written_without_grad_mode,
    a_copy_or_a_view_of_a_weight_leads_to_its_gradient,
    what_was_made_before_a_write_is_right_after_it,
    a_view_is_looked_at_by_one_rank,
    what_initializes_a_parameter_in_grad_mode_writes_to_it,
    values_are_compared_alike_on_all_ranks,
    what_is_shown_or_written_is_copied_once,
    a_view_keeps_nothing_of_its_callers,
    what_cannot_follow_a_view_is_refused_or_copies,
    views_of_data,
    views_of_gradients,
    views_made_in_grad_mode_are_written_without_it,
    a_view_that_was_kept_is_written_over_present_values,
    out_is_written_where_plain_tensors_take_part,
    a_forward_in_another_dtype_sees_what_a_view_wrote,
    a_step_after_backwards_under_no_sync_alone_leaves_what_nobody_used,
)
WORLDS = {2: CASES, **at_night({1: CASES, 3: CASES})}


@by_world(WORLDS)
def test_views(world, case):
    check(WORLDS, world, case)


def test_what_numpy_shows_of_a_view_cannot_be_written(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    model = fully_shard(nn.Linear(3, 2))
    array = model.weight.data[0].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
