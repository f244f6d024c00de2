"""When a step is recorded as a CUDA graph, when not, and what is left behind: all but the graph itself, with CUDA played by dummies.

Graphs and their numbers: tests/gpu/test_capture.py and tests/lightning/test_cuda_graph_gpu.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_mfsdp.engine import EngineStateError, clip_grad_norm_, fully_shard, no_sync
from lightning_mfsdp.engine.features.graphs import capture, captured_loss, recording
from tests.engine.cases import Case, run_cases
from tests.engine.internals import context_of
from tests.helpers.chain import inputs, loss_of, sharded_chain


class Graph:
    """Remembers replays instead of doing them."""

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.replays = 0
        self.alive.add(self)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.replays += 1


def nowhere(*_: Any) -> AbstractContextManager[None]:
    """Takes the graph that would be recorded, and does not keep it as a mock would."""
    return nullcontext()


@contextmanager
def dummies() -> Iterator[None]:
    """CUDA is there and does nothing; what is recorded simply runs."""
    nothing = {
        name: mock.patch.object(torch.cuda, name, return_value=0)
        for name in ("synchronize", "empty_cache", "memory_reserved", "Stream")
    }
    others = (
        mock.patch.object(torch.cuda, "CUDAGraph", Graph),
        mock.patch.object(recording.Recording, "_graph", nowhere),
        mock.patch.object(recording, "_capturable_context", lambda _, module: context_of(module)),
    )
    with ExitStack() as stack:
        for patch in (*nothing.values(), *others):
            stack.enter_context(patch)
        yield


def captured(step: Callable[..., Any], module: nn.Module) -> Any:
    return captured_loss.capture_loss(step, module, warmup=3)


def call(loss_function: Any, model: nn.Module, *given: Any) -> None:
    """One call; backward as in a step, where it is not replayed."""
    output = loss_function(*given)
    loss = output["loss"] if isinstance(output, dict) else output
    if not loss_function.replayed:
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def the_call_that_is_recorded_is_like_the_one_before(rank: int, world: int) -> None:
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    for rows in (4, 4, 4, 2):  # the last batch of a short epoch
        call(step, model, inputs(0, rank, rows=rows))
    assert not step.is_captured
    call(step, model, inputs(0, rank, rows=4))
    assert not step.is_captured
    call(step, model, inputs(0, rank, rows=4))
    assert step.is_captured
    assert step.replayed


def batches_with_other_keys_or_order_are_not_replayed(rank: int, world: int) -> None:
    model = sharded_chain()
    step = captured(lambda batch: loss_of(model, batch["a"] - batch["b"]), model)
    a, b = inputs(0, rank), inputs(1, rank)
    for _ in range(4):
        call(step, model, {"a": a, "b": b})
    assert step.is_captured
    for other in ({"b": b, "a": a}, {"a": a, "b": b, "c": a}):
        with pytest.warns(UserWarning, match="recorded with inputs"):
            call(step, model, other)
        assert not step.replayed


def a_replay_reads_what_it_was_given(rank: int, world: int) -> None:
    model, seen = sharded_chain(), []

    def loss_function(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch["x"])
        return loss_of(model, batch["x"])

    step = captured(loss_function, model)
    for index in range(4):
        call(step, model, {"x": inputs(index, rank)})
    static, given = seen[-1], inputs(7, rank)
    call(step, model, {"x": given})
    assert step.replayed
    assert len(seen) == 4
    assert torch.equal(static, inputs(7, rank))
    assert torch.equal(given, static)


def a_step_that_handles_gradients_is_not_recorded(rank: int, world: int) -> None:
    def reads(model: nn.Module) -> None:
        assert model.out.weight.grad is None

    def clears(model: nn.Module) -> None:
        model.zero_grad()

    def sets(model: nn.Module) -> None:
        model.out.weight.grad = None

    for handle in (reads, clears, sets):
        model = sharded_chain()

        def step_of(x: torch.Tensor, model: nn.Module = model, handle: Any = handle) -> torch.Tensor:
            handle(model)
            return loss_of(model, x)

        step = captured(step_of, model)
        for _ in range(3):
            call(step, model, inputs(0, rank))
        with pytest.warns(UserWarning, match=r"weight.*: .grad is read or set in a step whose forward is"):
            call(step, model, inputs(0, rank))
        assert not step.is_captured
        call(step, model, inputs(0, rank))


def unused_parameters_get_zeros_and_are_named(rank: int, world: int) -> None:
    for sharding in ("no_shard", "optim_grads_params"):
        model = sharded_chain(sharding=sharding)
        model.wrap = lambda layer, x, model=model: x if layer is model.layers[1] else layer(x)
        step = captured(lambda x, model=model: loss_of(model, x), model)
        for _ in range(3):
            step(inputs(0, rank)).backward()
            assert (model.layers[1].bias.grad is None) == (world == 1)
            model.zero_grad()
        if world == 1:
            step(inputs(0, rank))
            continue
        with pytest.warns(
            UserWarning, match=rf"2 parameters got no gradient on rank {rank}: weight of unit layers.1, bias of"
        ):
            step(inputs(0, rank))


def no_sync_is_refused(rank: int, world: int) -> None:
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    with no_sync(model), pytest.raises(EngineStateError, match="no_sync holds gradients back"):
        step(inputs(0, rank))
    with no_sync(model):
        loss_of(model, inputs(0, rank)).backward()
    with pytest.raises(EngineStateError, match="no_sync holds gradients back"):
        step(inputs(0, rank))


def state_that_a_replay_would_not_change_is_refused(rank: int, world: int) -> None:
    class Mean(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.layer, self.how, self.found = nn.Linear(8, 1), how, []
            self.mean = torch.zeros(())
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> Any:
            loss = self.layer(x).square().mean()
            if self.how == "mean":
                self.mean = 0.9 * self.mean + loss.detach()
            elif self.how == "found":
                self.found.append(loss.detach())
            elif self.how == "buffer seen":
                self.seen = self.seen + 1
            return loss

    for how in ("mean", "found", "buffer seen"):
        model = fully_shard(Mean(how))
        step = captured(model, model)
        for _ in range(3):
            call(step, model, inputs(0, rank))
        kept = model.seen
        with pytest.warns(UserWarning, match=f"{how} of Mean was replaced by a new tensor or grew"):
            call(step, model, inputs(0, rank))
        assert not step.is_captured
        assert how != "buffer seen" or model.seen is not kept, (
            "the ordinary call that followed replaced it, as the user wants"
        )
        call(step, model, inputs(0, rank))
    model = fully_shard(Mean("nothing"))
    step = captured(model, model)
    for _ in range(4):
        call(step, model, inputs(0, rank))
    assert step.is_captured


def a_step_that_fails_while_it_is_recorded_leaves_nothing_behind(rank: int, world: int) -> None:
    model = sharded_chain()
    calls = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyError("the step itself")
        return loss_of(model, x)

    run = captured(step, model)
    for _ in range(3):
        call(run, model, inputs(0, rank))
    with pytest.raises(KeyError, match="the step itself"):
        run(inputs(0, rank))
    assert not any(gradients.main.is_pinned for gradients in context_of(model).gradients)
    loss_of(model, inputs(0, rank)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def a_recording_that_breaks_in_backward_does_not_count(rank: int, world: int) -> None:
    """Its reductions never ran and its gradients are nobody's: the call trains as if it had not been tried."""
    outcomes = []
    for breaks in (False, True):
        model = sharded_chain()
        optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), 0

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer, breaks: bool = breaks
        ) -> torch.Tensor:
            def stop(_: torch.Tensor) -> None:
                nonlocal calls
                calls += 1
                if breaks and calls == 4:
                    raise RuntimeError("this cannot be recorded")

            x.requires_grad_().register_hook(stop)  # the end of the backward
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = capture.capture_step(step, model, [], warmup=3)
        with pytest.warns(UserWarning, match="this cannot be recorded") if breaks else nullcontext():
            losses = [plain_call(run, inputs(index, rank)) for index in range(4 if breaks else 3)]
        assert not context_of(model).lane.pool.is_plan_held
        if not breaks:
            losses.append(step(inputs(3, rank)))
        losses += [step(inputs(index, rank)) for index in range(4, 6)]
        outcomes.append(torch.stack(losses))
    assert torch.equal(*outcomes)


def plain_call(run: Any, x: torch.Tensor) -> torch.Tensor:
    """A call of the step itself: dummies have no streams to run it on."""
    with mock.patch.object(capture.CapturedStep, "_run", lambda self, given: self._step(*given)):
        return run(x)  # type: ignore[no-any-return]


def gradients_that_outlast_a_step_stay_where_replays_write_them(rank: int, world: int) -> None:
    """A step that begins with clearing them, and an ordinary call between two replays."""
    model = sharded_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = capture.capture_step(step, model, [], warmup=3)
    for index in range(4):
        plain_call(run, inputs(index, rank))
    assert run.is_captured
    each = context_of(model).gradients
    for closed in (False, True):
        optimizer.zero_grad()
        loss_of(model, inputs(0, rank)).backward()
        optimizer.zero_grad()
        loss_of(model, inputs(0, rank))
        assert {gradients.is_open for gradients in each} == {not closed}
        run.close()


def closing_lets_gradients_go(rank: int, world: int) -> None:
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    for _ in range(4):
        call(step, model, inputs(0, rank))
    each = context_of(model).gradients
    assert each
    assert all(gradients.main.is_pinned and gradients.is_open for gradients in each)
    step.close()
    call(step, model, inputs(0, rank))
    loss_of(model, inputs(0, rank))  # a new pass begins
    assert not any(gradients.is_open for gradients in each)


def graphs_go_at_once_when_they_are_given_up(rank: int, world: int) -> None:
    """NCCL waits for those that use it when a process group is destroyed, and nothing collects garbage there."""
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    gc.collect()
    gc.disable()
    before = len(Graph.alive)

    def record() -> None:
        while not step.is_captured:
            call(step, model, inputs(0, rank))
        assert len(Graph.alive) == before + 2

    record()
    step.record_again()
    assert len(Graph.alive) == before
    record()
    step.close()
    assert len(Graph.alive) == before
    gc.enable()


def gradients_that_were_there_are_back_after_a_recording(rank: int, world: int) -> None:
    """Lightning clears gradients after training_step, and not for every microbatch."""
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    for _ in range(3):
        call(step, model, inputs(0, rank))
    loss_of(model, inputs(0, rank)).backward()
    before = [(parameter, parameter.grad.to_local().clone()) for parameter in model.parameters()]
    assert any(grad.numel() for _, grad in before)
    step(inputs(0, rank))
    assert step.is_captured
    assert all(parameter.grad is not None for parameter, _ in before)


def a_replayed_backward_leaves_the_gradients_that_were_recorded(rank: int, world: int) -> None:
    model = sharded_chain()
    step = captured(lambda x: loss_of(model, x), model)
    loss_of(model, inputs(0, rank)).backward()
    expected = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    for _ in range(4):
        call(step, model, inputs(0, rank))
    step(inputs(0, rank)).backward()
    assert step.replayed
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), grad)


CASES = [
    the_call_that_is_recorded_is_like_the_one_before,
    batches_with_other_keys_or_order_are_not_replayed,
    a_replay_reads_what_it_was_given,
    a_step_that_handles_gradients_is_not_recorded,
    unused_parameters_get_zeros_and_are_named,
    no_sync_is_refused,
    state_that_a_replay_would_not_change_is_refused,
    a_step_that_fails_while_it_is_recorded_leaves_nothing_behind,
    a_recording_that_breaks_in_backward_does_not_count,
    gradients_that_outlast_a_step_stay_where_replays_write_them,
    closing_lets_gradients_go,
    graphs_go_at_once_when_they_are_given_up,
    gradients_that_were_there_are_back_after_a_recording,
    a_replayed_backward_leaves_the_gradients_that_were_recorded,
]


def with_dummies(case: Case, rank: int, world: int) -> None:
    with dummies():
        case(rank, world)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_cases({case.__name__: partial(with_dummies, case) for case in CASES}, 2)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_recording(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


def test_a_failed_recording_names_the_line_of_the_user() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    with pytest.raises(EngineStateError) as raised:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert recording._line_of(raised.value).startswith(f"{__file__}:")
