"""A whole step as a CUDA graph: same numbers as without, learning rates that still move, and an honest way back."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    capture_step,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    unshard,
)
from tests.engine.test_gradient_lifetime import Joins
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.helpers.models import batch, build, loss_of

ROWS = 12
STEPS = 10


def made(sharding="optim_grads_params"):
    model = build(dim=256).cuda()
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, policy=policy, sharding=sharding)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)


def inputs(index, rank, world):
    return [part.cuda().chunk(world)[rank] for part in batch(index, ROWS)]


def train(rank, world, *, captured, sharding):
    """Losses, norms and final weights of steps of two microbatches, with clipping, a schedule, and validation in between."""
    model, optimizer, schedule = made(sharding)

    def step(ids, targets):
        with no_sync(model):
            (loss_of(model, ids, targets) / 2).backward()
        loss = loss_of(model, ids.flip(0), targets.flip(0))
        (loss / 2).backward()
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "norm": norm}

    run = capture_step(step, model, optimizer) if captured else step
    results, checks = [], []
    for index in range(STEPS):
        results.append(run(*inputs(index, rank, world)))
        schedule.step()
        if index % 3 == 2:
            with torch.no_grad():
                checks.append(loss_of(model, *inputs(99, rank, world)))
    if captured:
        assert run.is_captured, run.failure
        assert run.pool_bytes > 0
    with unshard(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    losses, norms = (torch.stack([one[key] for one in results]) for key in ("loss", "norm"))
    return losses, norms, torch.stack(checks), weights


def a_captured_step_trains_like_an_ordinary_one(rank, world):
    for sharding in ("optim_grads_params", "optim_grads", "no_shard"):
        expected = train(rank, world, captured=False, sharding=sharding)
        found = train(rank, world, captured=True, sharding=sharding)
        for name, one, other in zip(("losses", "norms", "validation"), found, expected, strict=False):
            difference = (one - other).abs().max().item()
            assert difference < 2e-2, f"{sharding} {name}: {one} and {other}"
        for one, other in zip(found[3], expected[3], strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)


def what_cannot_be_recorded_is_named_and_runs_uncaptured(rank, world):
    model, optimizer, _ = made()

    def step(ids, targets):
        loss = loss_of(model, ids, targets)
        loss.backward()
        loss.item()  # waits for the device
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture_step(step, model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [run(*inputs(0, rank, world)) for _ in range(8)]
    assert not run.is_captured
    assert "loss.item()" in run.failure
    assert re.search(r"test_capture\.py:\d+", run.failure)
    assert len([one for one in caught if "cannot be recorded" in str(one.message)]) == 1
    assert losses[-1] < losses[0], "it goes on training"


def what_breaks_in_backward_runs_uncaptured(rank, world):
    """Reductions were under way, with events that never come."""
    (model, *_), (broken, *_) = made(), made()

    def waits(gradient):
        gradient.sum().item()

    broken.embedding.register_forward_hook(lambda module, given, output: output.register_hook(waits) and None)
    plain, found = [], []
    for one, losses in ((model, plain), (broken, found)):
        optimizer = fully_shard_optimizer(torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True))

        def step(ids, targets, model=one, optimizer=optimizer):
            loss = loss_of(model, ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = capture_step(step, one, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses += [run(*inputs(0, rank, world)) for _ in range(8)]
        told = [one for one in caught if "cannot be recorded" in str(one.message)]
        assert (run.is_captured, len(told)) == ((True, 0) if one is model else (False, 1)), run.failure
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=2e-2, atol=2e-2)


def ordinary_steps_before_the_recording_leave_nothing_alive(rank, world):
    """On another stream than the recording's, with units of several inputs: autograd's nodes would still belong to that stream."""
    outcomes = []
    for captured in (False, True):
        model = Joins().cuda()
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + index / 9, parameter.numel()).view_as(parameter))
        for join in model.joins:
            fully_shard(join)
        fully_shard(model)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        given = torch.linspace(-1, 1, 32, device="cuda").view(8, 4) + rank
        losses = [step(given) for _ in range(3)]
        run = capture_step(step, model, optimizer) if captured else step
        losses += [run(given) for _ in range(8)]
        if captured:
            assert run.is_captured, run.failure
        outcomes.append(torch.stack(losses))
    torch.testing.assert_close(*outcomes)


def other_shapes_run_uncaptured(rank, world):
    model, optimizer, _ = made()

    def step(ids, targets):
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture_step(step, model, optimizer)
    for index in range(6):
        run(*inputs(index, rank, world))
    assert run.is_captured
    ids, targets = inputs(7, rank, world)
    with pytest.warns(UserWarning, match="recorded with inputs"):
        assert torch.isfinite(run(ids[:1], targets[:1]))
    assert torch.isfinite(run(ids, targets))


KEPT = []


def a_closed_step_does_not_hold_the_process_group(rank, world):
    """It outlives the function; were its graph still there, the end of the group would wait for ever."""
    model, optimizer, _ = made()

    def step(ids, targets):
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    KEPT.append(capture_step(step, model, optimizer))
    for index in range(6):
        KEPT[0](*inputs(index, rank, world))
    assert KEPT[0].is_captured
    KEPT[0].close()
    assert not KEPT[0].is_captured
    assert torch.isfinite(KEPT[0](*inputs(7, rank, world))).all()


def everything(rank, world):
    a_closed_step_does_not_hold_the_process_group(rank, world)
    a_captured_step_trains_like_an_ordinary_one(rank, world)
    other_shapes_run_uncaptured(rank, world)
    what_cannot_be_recorded_is_named_and_runs_uncaptured(rank, world)
    ordinary_steps_before_the_recording_leave_nothing_alive(rank, world)
    what_breaks_in_backward_runs_uncaptured(rank, world)


@pytest.mark.gpu
@needs_gpus(1)
def test_a_step_is_captured_on_one_gpu():
    run_distributed(everything, 1, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_a_step_is_captured_on_two_gpus():
    run_distributed(everything, 2, backend="nccl")
