"""Gradients whose memory comes and goes: whoever sets, keeps or clears one finds what plain PyTorch would show."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    no_sync,
    reduce_pending,
    sharded_parameters,
    units,
    unshard,
)
from lightning_mfsdp.engine.core import gradients as reduced
from tests.engine.cases import device_type
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, adamw, context, inputs, loss_of, plain_chain, sharded_chain, train
from tests.helpers.hidden import Hidden
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, pairwise


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [view.grad.clone() for view in sharded_parameters(model) if view.grad is not None]


def a_gradient_from_before_sharding_is_forgotten(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        expected_model = sharded_chain(sharding=sharding)
        loss_of(expected_model, inputs(1, rank)).backward()
        model = plain_chain()
        loss_of(model, inputs(0, rank)).backward()
        for layer in model.layers:
            fully_shard(layer, sharding=sharding)
        fully_shard(model, sharding=sharding)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, inputs(1, rank)).backward()
        assert all(map(torch.equal, gradients(model), gradients(expected_model)))


def a_gradient_set_before_the_first_backward_is_added_to(rank, world):
    for sharding in in_turn(1, STRATEGIES):
        expected_model = sharded_chain(sharding=sharding)
        loss_of(expected_model, inputs(0, rank)).backward()
        model = sharded_chain(sharding=sharding)
        for view in sharded_parameters(model):
            if view.local.numel():
                view.local.grad = torch.ones_like(view.local)
        loss_of(model, inputs(0, rank)).backward()
        for found, expected in zip(gradients(model), gradients(expected_model), strict=True):
            torch.testing.assert_close(found, expected + 1)


def a_gradient_set_while_others_wait_to_be_reduced_takes_their_place(rank, world):
    for sharding in in_turn(2, STRATEGIES):
        model, expected_model = sharded_chain(sharding=sharding), sharded_chain(sharding=sharding)
        loss_of(expected_model, inputs(1, rank)).backward()
        with no_sync(model):
            loss_of(model, inputs(0, rank)).backward()
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        loss_of(model, inputs(1, rank)).backward()
        for found, expected in zip(gradients(model), gradients(expected_model), strict=True):
            torch.testing.assert_close(found, expected + 1)


def a_kept_gradient_stays_where_another_was_assigned(rank, world):
    """Gradients of two losses, the second added up in a tensor that took the first one's place."""
    assigned = {"zeros": torch.zeros_like, "scaled": lambda grad: grad * 0.5}
    for (name, make), one, sharding in pairwise(assigned.items(), (False, True), STRATEGIES, together=1):
        case = (name, one, sharding)
        model, other = sharded_chain(sharding=sharding), sharded_chain(sharding=sharding)
        loss_of(other, inputs(1, rank)).backward()
        second = [parameter.grad.full_tensor() for parameter in other.parameters()]
        loss_of(model, inputs(0, rank)).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        before = [grad.full_tensor().clone() for grad in kept]
        replaced = list(model.parameters())[: 1 if one else None]
        for parameter in replaced:
            parameter.grad = make(parameter.grad)
        start = [make(grad) if number < len(replaced) else grad for number, grad in enumerate(before)]
        loss_of(model, inputs(1, rank)).backward()
        for number, parameter in enumerate(model.parameters()):
            torch.testing.assert_close(parameter.grad.full_tensor(), start[number] + second[number], msg=str(case))
            if number < len(replaced):
                assert torch.equal(kept[number].full_tensor(), before[number]), (case, number)


def parameters_frozen_after_sharding_take_no_part_in_autograd(rank, world):
    for sharding in in_turn(4, STRATEGIES):
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        for one in (model, plain):
            for parameter in one.layers[0].parameters():
                parameter.requires_grad_(False)
        frozen = model.layers[0].weight
        assert not (frozen * 2).requires_grad, sharding
        assert not frozen[:2].requires_grad, sharding
        for one in (model, plain):
            (sum(parameter.pow(2).sum() for parameter in one.parameters())).backward()
            for parameter in one.layers[0].parameters():
                parameter.mul_(0.5)  # in grad mode: nobody follows it
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected.detach(), msg=sharding)
            assert (found.grad is None) == (expected.grad is None), sharding
            if expected.grad is not None:
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=sharding)
        for parameter in model.layers[0].parameters():
            parameter.requires_grad_(True)
        assert (frozen[:2] * 2).requires_grad, sharding


def a_parameter_that_was_frozen_while_gradients_were_held_back_and_that_no_rank_used_has_none(rank, world):
    """An optimizer leaves a parameter without a gradient alone, and would decay one with zeros."""
    for sharding, by_backward in pairwise(STRATEGIES, (False, True)):
        model = sharded_chain(sharding=sharding)
        bias = model.layers[1].bias
        bias.requires_grad_(False)
        with no_sync(model):
            loss_of(model, inputs(0, rank)).backward()
        bias.requires_grad_(True)
        if by_backward:
            model.wrap = lambda layer, x, model=model: x if layer is model.layers[1] else layer(x)
            loss_of(model, inputs(1, rank)).backward()
        else:
            reduce_pending(model)
        assert bias.grad is None, (sharding, by_backward)
        assert model.layers[0].bias.grad is not None, (sharding, by_backward)


def what_is_saved_of_a_gradient_that_is_held_back_is_the_reduced_one(rank, world):
    """DCP reads pieces on the ranks that write them alone: too late for a collective of the engine."""
    model = sharded_chain(sharding="optim_grads_params")
    with no_sync(model):
        loss_of(model, inputs(0, rank)).backward()
    with tempfile.TemporaryDirectory() as folder:
        shared: list[str] = [folder]
        dist.broadcast_object_list(shared, src=0)
        name, parameter = next(iter(model.named_parameters()))
        dcp.save({name: parameter.grad}, checkpoint_id=shared[0])
        saved = {name: torch.zeros_like(parameter.detach())}
        dcp.load(saved, checkpoint_id=shared[0])
        torch.testing.assert_close(saved[name].to_local(), parameter.grad.to_local())
        assert parameter.grad.norm() > 0
        dist.barrier()


def a_gradient_held_back_of_a_parameter_that_was_frozen_since_is_reduced(rank, world):
    """As one process shows it; and only once. A whole unit is frozen, and one parameter of another."""
    for sharding, keeps, clears in pairwise(STRATEGIES, (False, True), (False, True), together=1):
        model = sharded_chain(sharding=sharding)
        frozen = [*model.layers[0].parameters(), model.layers[1].bias]
        names = [name for name, parameter in model.named_parameters() if any(parameter is one for one in frozen)]
        for step in range(3):
            plain = plain_chain()
            for one in range(world):
                (loss_of(plain, inputs(step, one)) / world).backward()
            first = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}
            for one in range(world):
                (loss_of(plain, inputs(step + 10, one)) / world).backward()
            with no_sync(model, keep_sharded=keeps):
                loss_of(model, inputs(step, rank)).backward()
            for parameter in frozen:
                parameter.requires_grad_(False)
                if clears:
                    parameter.grad = None
            loss_of(model, inputs(step + 10, rank)).backward()
            for view in sharded_parameters(model):
                if not view.local.numel():
                    continue
                case = f"{sharding} {keeps} {clears} {view.name}"
                if clears and view.name in names:
                    assert view.grad is None or not view.grad.any(), case
                    continue
                expected = first[view.name] if view.name in names else plain.get_parameter(view.name).grad
                rows = expected[view.rows.start : view.rows.stop]
                torch.testing.assert_close(view.grad, rows, rtol=1e-4, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
            for parameter in frozen:
                parameter.requires_grad_(True)
            model.zero_grad()


def small_gradients_add_up_where_the_optimizer_sees_rounded_ones(rank, world):
    """1 + 64 / 512 in float32; in bfloat16 every addition would be lost."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
    for sharding in in_turn(5, STRATEGIES):
        model = fully_shard(nn.Linear(4, 4, bias=False).bfloat16(), sharding=sharding, policy=policy)
        for microbatch in range(65):
            scale = 1.0 if microbatch == 0 else 2.0**-9
            (model(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * scale).backward()
        for found in gradients(model):
            assert found.eq(1.125).all(), f"{sharding}: {found}"


class HidesItsFirstResult(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return Hidden(y) if x.shape[0] == 1 else y


def a_unit_whose_call_is_hidden_is_reduced_once(rank, world):
    """Its gradients may come late, so its reduction waits for the end of the backward."""
    for sharding in in_turn(6, STRATEGIES):
        torch.manual_seed(0)
        layer = fully_shard(HidesItsFirstResult(8, 8), sharding=sharding)
        model = fully_shard(nn.ModuleList([layer]), sharding=sharding)
        torch.manual_seed(0)
        plain = nn.Linear(8, 8)
        prepare, prepared = reduced.Gradients.prepare, []

        def counted(gradients, *reached, prepare=prepare, prepared=prepared):
            prepared.append(gradients)
            return prepare(gradients, *reached)

        x = inputs(0)
        with mock.patch.object(reduced.Gradients, "prepare", counted):
            layer(torch.tanh(layer(x[:1]).value + x)).square().sum().backward()
        plain(torch.tanh(plain(x[:1]) + x)).square().sum().backward()
        assert len(prepared) == 1
        for view in sharded_parameters(model):
            grad = plain.get_parameter(view.name.removeprefix("0.")).grad
            if len(view.rows):
                torch.testing.assert_close(view.grad, grad[view.rows.start : view.rows.stop])


def a_kept_gradient_outlives_clearing_and_the_next_forward(rank, world):
    for sharding, keep in thinned(product(in_turn(7, STRATEGIES), ("the object", "a view of it")), 3):
        model = sharded_chain(sharding=sharding)
        optimizer = adamw(model)
        loss_of(model, inputs(0, rank)).backward()
        kept = [view.grad for view in sharded_parameters(model) if view.grad is not None]
        if keep == "a view of it":
            kept = [grad.view(-1) for grad in kept]
        copies = [grad.clone() for grad in kept]
        optimizer.zero_grad()
        loss = loss_of(model, inputs(1, rank))
        assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True)), f"{sharding} {keep}"
        loss.backward()
        assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True)), f"{sharding} {keep}: after backward"
        new = [view.grad.clone() for view in sharded_parameters(model) if view.grad is not None]
        for one in kept:
            one.zero_()
        now = [view.grad for view in sharded_parameters(model) if view.grad is not None]
        assert all(torch.equal(*pair) for pair in zip(now, new, strict=True)), f"{sharding} {keep}: its own memory"
        # Nobody keeps one any more: the memory goes with the next forward.
        del kept, one, now
        optimizer.zero_grad()
        loss_of(model, inputs(1, rank))
        assert not any(unit.gradient_bytes for unit in units(model)), sharding


def a_kept_gradient_stays_where_only_some_were_cleared(rank, world):
    """As two optimizers do that each clear their own, and as gradients of several tasks are added up."""
    for sharding in in_turn(8, STRATEGIES):
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        for one in (model, plain):
            kept = []
            for task in range(3):
                loss_of(one, inputs(task)).backward()
                kept.append(one.out.weight.grad)
                one.out.weight.grad = None
            loss_of(one, inputs(3)).backward()
            kept[2].zero_()
            one.out.weight.grad = kept[0] + kept[1] + kept[2] + one.out.weight.grad
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=f"{sharding} {name}"
            )


def a_kept_gradient_is_the_gradient_while_later_ones_are_held_back(rank, world):
    """As in plain PyTorch, where later backwards add to the tensor that somebody keeps."""
    changes = (
        torch.Tensor.zero_,
        lambda grad: grad.mul_(2),
        lambda grad: grad[:1].zero_(),
        lambda grad: torch.mul(input=grad, other=2.0, out=grad),
    )
    for sharding, change in thinned(product(in_turn(9, STRATEGIES), changes), 3):
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        kept = []
        for one in (model, plain):
            # The same data everywhere, so that one process has the same gradients.
            loss_of(one, inputs(0)).backward()
            kept.append(one.out.weight.grad)
            with no_sync(model) if one is model else nullcontext():
                loss_of(one, inputs(1)).backward()
            change(kept[-1])
            loss_of(one, inputs(2)).backward()
        torch.testing.assert_close(model.out.weight.grad.full_tensor(), plain.out.weight.grad)


def assigned(parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    parameter.grad = grad
    return grad


# What a program may keep of a gradient.
KEPT = {
    "itself": lambda parameter: parameter.grad,
    "detached": lambda parameter: parameter.grad.detach(),
    "data": lambda parameter: parameter.grad.data,
    "assigned": lambda parameter: assigned(parameter, parameter.grad * 0.5),
    "assigned zeros": lambda parameter: assigned(parameter, torch.zeros_like(parameter.grad)),
}


def whatever_is_kept_of_a_gradient_has_later_ones_added(rank, world):
    """As in plain PyTorch, where a backward adds in place; whether they are held back when it is read or reduced."""
    for sharding, (kind, keep) in thinned(product(in_turn(9, STRATEGIES), KEPT.items()), 2):
        models = sharded_chain(sharding=sharding), plain_chain()
        seen = []
        for model in models:
            for number in range(2):  # with memory of its own, and in memory that was there before
                loss_of(model, inputs(0)).backward()
                kept = [keep(parameter) for parameter in model.parameters()]
                found = []
                for sync in (False, True, False, False):
                    with no_sync(model) if model is models[0] and not sync else nullcontext():
                        loss_of(model, inputs(1 + number)).backward()
                    found += [grad.clone() for grad in kept]
                if model is models[0]:
                    found = [grad.full_tensor() for grad in found]
                seen += found
                kept[0].zero_()
                first = next(model.parameters()).grad
                assert not first.full_tensor().any() if model is models[0] else not first.any(), (sharding, kind)
                model.zero_grad()
        half = len(seen) // 2
        for found, expected in zip(seen[:half], seen[half:], strict=True):
            torch.testing.assert_close(found, expected, msg=lambda text, case=(sharding, kind): f"{case}: {text}")


def a_gradient_taken_while_it_is_held_back_stays_what_it_was(rank, world):
    """Once it was used, as in plain PyTorch, where a cleared gradient that somebody keeps is not written any more."""
    for sharding in STRATEGIES:
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        kept = []
        for one in (model, plain):
            with no_sync(model) if one is model else nullcontext():
                loss_of(one, inputs(0)).backward()
            kept.append(one.out.weight.grad)
            kept[-1].mul_(2)
            one.zero_grad()
            loss_of(one, inputs(1)).backward()
        torch.testing.assert_close(kept[0].full_tensor(), kept[1], msg=sharding)
        torch.testing.assert_close(model.out.weight.grad.full_tensor(), plain.out.weight.grad, msg=sharding)


def _assign(make):
    """An event that assigns to `.grad` of one parameter what is made of it."""

    def assign(model, parameter, kept):
        if parameter.grad is not None:
            parameter.grad = make(parameter, kept)

    return assign


def _keep_detached(model, parameter, kept):
    if parameter.grad is not None:
        kept.append(parameter.grad.detach())


def _assign_what_was_kept(model, parameter, kept):
    parameter.grad = kept[0]


def _assign_zeros(model, parameter, kept):
    parameter.grad = torch.zeros_like(parameter)


def _read(model, parameter, kept):
    [one.grad + 1 for one in (parameter, model.out.weight) if one.grad is not None]


# What may happen to gradients between backwards; all but the first three change that of one parameter alone.
EVENTS = {
    "clear": lambda model, parameter, kept: model.zero_grad(),
    "zero": lambda model, parameter, kept: model.zero_grad(set_to_none=False),
    "read": _read,
    "clear one": lambda model, parameter, kept: setattr(parameter, "grad", None),
    "scale one": _assign(lambda parameter, kept: parameter.grad * 0.5),
    "detach one": _assign(lambda parameter, kept: parameter.grad.detach()),
    "keep one detached": _keep_detached,
    "assign what was kept": _assign_what_was_kept,
    "assign zeros": _assign_zeros,
}


def _play(model, events, is_plain):
    """Play events after a backward. Returns what `.grad` of a parameter was after each, and of another."""
    model.zero_grad()
    parameter, kept, others = model.layers[0].weight, [], []
    for place, event in enumerate(("hold", *events)):
        if event in EVENTS:
            EVENTS[event](model, parameter, kept)
        else:
            with no_sync(model) if event == "hold" and not is_plain else nullcontext():
                loss_of(model, inputs(place)).backward()
        for one, keep in ((parameter, kept), (model.out.weight, others)):
            if one.grad is not None:
                keep.append(one.grad)
    return kept + others


def _unless_cleared(read):
    """What is read; `None` where that says that a gradient was cleared before ranks had reduced it."""
    try:
        return read()
    except EngineStateError as error:
        if "was cleared or replaced before" not in str(error):
            raise
        return None


def what_is_kept_of_a_gradient_is_what_plain_pytorch_keeps_or_says_that_it_was_cleared(rank, world):
    """Gradients kept after each of four events: what was cleared before ranks had reduced it raises or is NaN. At night every order."""
    for_all = ("hold", "sync", "clear", "zero", "read")
    every = ("hold", "sync", *EVENTS)
    sequences = thinned(pairwise(every, every, every), 3)
    models, plain = {sharding: sharded_chain(sharding=sharding) for sharding in STRATEGIES}, plain_chain()
    for number, events in enumerate(sequences):
        sharding = STRATEGIES[number % len(STRATEGIES)]
        case, model = (sharding, events), models[sharding]
        kept = _unless_cleared(lambda: _play(model, events, is_plain=False))  # noqa: B023 - called at once
        if kept is None:
            assert "assign what was kept" in events, case
            assert world > 1, case
            model.zero_grad()
            continue
        expected, lost = _play(plain, events, is_plain=True), 0
        for ours, theirs in zip(kept, expected, strict=True):
            found = _unless_cleared(ours.full_tensor)
            if found is None or found.isnan().all():
                lost += 1
            else:
                torch.testing.assert_close(found, theirs, msg=lambda text, case=case: f"{case}: {text}")
        for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (parameter.grad is None), case
            if found.grad is not None:
                torch.testing.assert_close(
                    found.grad.full_tensor(), parameter.grad, msg=lambda text, case=case: f"{case}: {text}"
                )
        assert not lost or world > 1, case
        if all(event in for_all for event in events):
            cleared_unread, is_held = False, True
            for event in events:
                cleared_unread = cleared_unread or (event == "clear" and is_held)
                is_held = event == "hold" or (is_held and event == "zero")
            assert (lost > 0) == (cleared_unread and world > 1), (case, lost)


def a_gradient_held_back_is_not_reduced_inside_a_backward(rank, world):
    for sharding in STRATEGIES:
        model = sharded_chain(sharding=sharding)
        with no_sync(model):
            loss_of(model, inputs(0)).backward()
        loss = loss_of(model, inputs(1))
        loss.register_hook(lambda _, model=model: model.out.weight.grad.sum())
        with pytest.raises(
            EngineStateError, match=r"gradient of parameter out\.weight is read or changed while a backward"
        ):
            loss.backward()


def gradients_put_back_by_hand_are_clipped(rank, world):
    model = sharded_chain()
    optimizer = adamw(model)
    loss_of(model, inputs(0, rank)).backward()
    norm = grad_norm(model)
    saved = [(view.local, view.grad.clone()) for view in sharded_parameters(model) if view.grad is not None]
    optimizer.zero_grad()
    loss_of(model, inputs(1, rank))
    for local, grad in saved:
        local.grad = grad
    torch.testing.assert_close(clip_grad_norm_(model, 1e-3), norm)
    torch.testing.assert_close(grad_norm(model), torch.tensor(1e-3), rtol=1e-3, atol=0)


def a_nan_norm_leaves_nothing_behind(rank, world):
    """Clipping scales whole segments; gaps must not keep the NaN when gradients are cleared in place."""
    for sharding in in_turn(10, STRATEGIES):
        model = sharded_chain(sharding=sharding, dim=7)
        optimizer = adamw(model)
        x = inputs(0, rank, dim=7)
        loss_of(model, x * float("nan")).backward()
        assert clip_grad_norm_(model, 1.0).isnan()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()
        assert grad_norm(model).isfinite(), sharding


def a_rank_without_rows_adds_nothing_to_a_norm(rank, world):
    """Two rows on four ranks of a 2 x 2 mesh; what the outer axis holds back is reduced when somebody looks."""
    mesh = torch.distributed.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    model = fully_shard(nn.Linear(8, 2), mesh, outer_sharding="optim")
    with no_sync(model, keep_sharded=True):
        model(torch.ones(2, 8)).sum().backward()
    assert grad_norm(model).item() == pytest.approx((16 * 4 + 2 * 4) ** 0.5)


class Scaled(nn.Module):
    """An embedding whose forward hook reads its weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.table.register_forward_hook(lambda module, _, output: output * module.weight.mean())
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, ids):
        return self.layers(self.table(ids))


def an_embedding_with_a_hook_on_it_is_gathered_for_backward(rank, world):
    torch.manual_seed(0)
    plain = Scaled()
    torch.manual_seed(0)
    model = Scaled()
    fully_shard(model.table)
    fully_shard(model.layers)
    fully_shard(model)
    ids = torch.tensor([1, 5, 7])
    for step in range(3):
        for one in (plain, model):
            one.zero_grad()
            one(ids + step).square().sum().backward()
        for view in sharded_parameters(model):
            if len(view.rows):
                expected = plain.get_parameter(view.name).grad[view.rows.start : view.rows.stop]
                torch.testing.assert_close(view.grad, expected)


def gradients_may_be_cleared_between_forward_and_backward(rank, world):
    """By the module as well as by the optimizer: what `parameters()` shows then are those that have them."""
    for sharding, reshard in thinned(product(in_turn(11, STRATEGIES), (True, False)), 3):
        model = sharded_chain(sharding=sharding, reshard_after_forward=reshard)
        expected_model = sharded_chain(sharding=sharding, reshard_after_forward=reshard)
        for index in range(3):
            loss = loss_of(model, inputs(index, rank))
            model.zero_grad()
            loss.backward()
            expected_model.zero_grad()
            loss_of(expected_model, inputs(index, rank)).backward()
        for found, expected in zip(gradients(model), gradients(expected_model), strict=True):
            assert torch.equal(found, expected), (sharding, reshard)


def weights_written_between_two_forwards_are_read(rank, world):
    """The first has no backward, so full weights are kept for one that never comes."""
    for sharding, reshard in thinned(product(in_turn(12, STRATEGIES), (True, False)), 3):
        model = sharded_chain(sharding=sharding, reshard_after_forward=reshard)
        optimizer = adamw(model)
        loss_of(model, inputs(0, rank)).backward()
        before = loss_of(model, inputs(1, rank)).detach()
        optimizer.step()
        with torch.no_grad():
            expected = loss_of(model, inputs(1, rank))
        found = loss_of(model, inputs(1, rank)).detach()
        assert torch.equal(found, expected), (sharding, reshard)
        assert not torch.equal(found, before), (sharding, reshard)


class Join(nn.Module):
    """A unit with two inputs that need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.linear(left) * right


class Joins(nn.Module):
    """Each unit gets two results of what is before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.joins = nn.ModuleList(Join() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for join in self.joins:
            x = x + join(x.tanh(), x.sigmoid())
        return x


def sharded_joins() -> tuple[Joins, Joins]:
    """Sharded, and as it was."""
    torch.manual_seed(0)
    model = Joins()
    reference = copy.deepcopy(model)
    for join in model.joins:
        fully_shard(join)
    return fully_shard(model), reference


def a_graph_ends_with_its_loss_where_units_have_several_inputs(rank, world):
    """And not when the garbage collector comes by: nothing in it is part of a circle."""
    model, _ = sharded_joins()
    x = torch.randn(2, 4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for backwards in (1, 0):
            began = Began()
            loss = model(Begin.apply(x, began)).sum()
            alive = weakref.ref(began)
            del began
            assert alive() is not None
            if backwards:
                loss.backward()
            del loss
            assert alive() is None, backwards
    finally:
        gc.enable()


class Returns(Join):
    """Gives its result back in another way, or none, or raises."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        if self.what == "an error":
            raise ValueError
        result = super().forward(left, right)
        return {"an input": (result, right), "an object": Hidden(result), "a constant": result.detach()}[self.what]


class Around(nn.Module):
    """Makes a sum of whatever its unit returns."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(4, 4), Returns(what)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            result = self.unit(x.tanh(), x.sigmoid())
        except ValueError:
            return x
        if isinstance(result, Hidden):
            return x + result.value
        return x + (sum(result) if isinstance(result, tuple) else result)


def a_graph_ends_with_its_loss_whatever_units_return(rank, world):
    for what, backwards in product(("an input", "an object", "a constant", "an error"), (1, 0)):
        torch.manual_seed(0)
        model = Around(what)
        reference = copy.deepcopy(model)
        fully_shard(model.unit)
        fully_shard(model)
        x = torch.randn(2, 4, requires_grad=True)
        gc.collect()
        gc.disable()
        try:
            began = Began()
            loss = model(Begin.apply(x, began)).square().sum()
            alive = weakref.ref(began)
            del began
            if backwards:
                loss.backward()
            del loss
            assert alive() is None, (what, backwards)
        finally:
            gc.enable()
        if backwards:
            expected = x.grad.clone()
            x.grad = None
            reference(x).square().sum().backward()
            torch.testing.assert_close(expected, x.grad)
            if what == "an object":  # weights stay until they are stepped
                fully_shard_optimizer(torch.optim.SGD(model.parameters())).step()
            assert not any(group.weights.present for unit in context(model).units for group in unit.groups), what


class Began:
    """Lives as long as the graph that it is noted in."""


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, began):
        ctx.began = began
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def units_with_several_inputs_end_when_the_last_gradient_is_there(rank, world):
    """In one backward, in two of the same graph, and in one that needs only one of the inputs."""
    model, reference = sharded_joins()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        for one in (model, reference):
            loss = one(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert not any(group.weights.present for unit in context(model).units for group in unit.groups)
        with torch.no_grad():
            for parameter in reference.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world)
        expected = dict(reference.named_parameters())
        for view in sharded_parameters(model):
            if view.main.numel():
                torch.testing.assert_close(view.grad, expected[view.name].grad[view.rows.start : view.rows.stop])
        model.zero_grad()
        reference.zero_grad()
    join = model.joins[0]
    left, right = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_().unbind()
    output = join(left * 1, right * 1)
    found = torch.autograd.grad(output.sum(), [right], retain_graph=True)
    with unshard(model):
        expected = join.linear(left).detach()
    torch.testing.assert_close(found[0], expected)
    assert not any(group.weights.present for unit in context(model).units for group in unit.groups)


def a_failure_while_a_bucket_is_filled_does_not_stop_later_steps(rank, world):
    model, expected = sharded_chain(), sharded_chain()
    optimizer, other = adamw(model), adamw(expected)
    with (
        mock.patch.object(reduced, "copy_or_add", side_effect=MemoryError("made up")),
        pytest.raises(MemoryError, match="made up"),
    ):
        loss_of(model, inputs(0, rank).requires_grad_()).backward()
    optimizer.zero_grad()
    found, wanted = train(model, optimizer, range(3), rank), train(expected, other, range(3), rank)
    assert torch.equal(torch.stack(found), torch.stack(wanted))


WORLDS = {
    1: (
        a_kept_gradient_stays_where_only_some_were_cleared,
        a_kept_gradient_stays_where_another_was_assigned,
        parameters_frozen_after_sharding_take_no_part_in_autograd,
        a_kept_gradient_is_the_gradient_while_later_ones_are_held_back,
        whatever_is_kept_of_a_gradient_has_later_ones_added,
        a_gradient_taken_while_it_is_held_back_stays_what_it_was,
        what_is_kept_of_a_gradient_is_what_plain_pytorch_keeps_or_says_that_it_was_cleared,
        a_gradient_from_before_sharding_is_forgotten,
        a_gradient_set_before_the_first_backward_is_added_to,
        a_kept_gradient_outlives_clearing_and_the_next_forward,
        gradients_put_back_by_hand_are_clipped,
        small_gradients_add_up_where_the_optimizer_sees_rounded_ones,
    ),
    2: (
        a_kept_gradient_stays_where_only_some_were_cleared,
        a_kept_gradient_stays_where_another_was_assigned,
        parameters_frozen_after_sharding_take_no_part_in_autograd,
        a_kept_gradient_is_the_gradient_while_later_ones_are_held_back,
        whatever_is_kept_of_a_gradient_has_later_ones_added,
        a_gradient_taken_while_it_is_held_back_stays_what_it_was,
        what_is_kept_of_a_gradient_is_what_plain_pytorch_keeps_or_says_that_it_was_cleared,
        a_gradient_from_before_sharding_is_forgotten,
        a_gradient_set_before_the_first_backward_is_added_to,
        a_gradient_set_while_others_wait_to_be_reduced_takes_their_place,
        a_gradient_held_back_of_a_parameter_that_was_frozen_since_is_reduced,
        a_parameter_that_was_frozen_while_gradients_were_held_back_and_that_no_rank_used_has_none,
        what_is_saved_of_a_gradient_that_is_held_back_is_the_reduced_one,
        a_gradient_held_back_is_not_reduced_inside_a_backward,
        small_gradients_add_up_where_the_optimizer_sees_rounded_ones,
        a_unit_whose_call_is_hidden_is_reduced_once,
        a_kept_gradient_outlives_clearing_and_the_next_forward,
        gradients_put_back_by_hand_are_clipped,
        a_nan_norm_leaves_nothing_behind,
        an_embedding_with_a_hook_on_it_is_gathered_for_backward,
        gradients_may_be_cleared_between_forward_and_backward,
        weights_written_between_two_forwards_are_read,
        a_graph_ends_with_its_loss_where_units_have_several_inputs,
        a_graph_ends_with_its_loss_whatever_units_return,
        units_with_several_inputs_end_when_the_last_gradient_is_there,
        a_failure_while_a_bucket_is_filled_does_not_stop_later_steps,
    ),
    4: (a_rank_without_rows_adds_nothing_to_a_norm,),
}


@by_world(WORLDS)
def test_gradients(world, case):
    check(WORLDS, world, case)
