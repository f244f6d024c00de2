"""Ranks that use different blocks: with whole weights they train as one process on all data, and every rank reduces equally often."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import fully_shard, gather_root, no_sync, watch_backward
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, context, inputs, loss_of, weights
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_world, pairwise

WHOLE = ("no_shard", "optim", "optim_grads")


def again(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


class Paths(nn.Module):
    """Layers between a stem and an output layer of the root. The layers that run, and how, are set for each step.

    Attributes:
        path: Which layers run, in this order.
        ignored: Those of them whose results are not used.
        call: Runs a layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.path, self.ignored = list(range(6)), ()
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.path:
            y = self.call(self.layers[index], x)
            x = x if index in self.ignored else x + torch.tanh(y)
        return self.out(x)


def built(together: int = 0, **options) -> Paths:
    """`together` layers in each unit; not sharded where it is 0."""
    torch.manual_seed(0)
    model = Paths()
    for start in range(0, 6, together) if together else ():
        members = list(model.layers[start : start + together])
        fully_shard(members[0] if together == 1 else members, **options)
    return fully_shard(model, **options) if together else model


def path_of(rank: int, step: int) -> list[int]:
    """Another for every rank and step; at least one layer, and any layer on some rank in some step."""
    drawn = torch.rand(6, generator=torch.Generator().manual_seed(10 * step + rank)).tolist()
    chosen = [index for index, value in enumerate(drawn) if value > 0.5]
    return chosen or [step % 6]


def once(model: nn.Module, paths: Paths, x: Callable[[int], Tensor]) -> None:
    loss_of(model, x(0)).backward()


def reversed_on_odd_ranks(model: nn.Module, paths: Paths, x: Callable[[int], Tensor]) -> None:
    paths.path = paths.path[::-1] if len(paths.path) % 2 else paths.path
    loss_of(model, x(0)).backward()


def retained(model: nn.Module, paths: Paths, x: Callable[[int], Tensor]) -> None:
    loss = loss_of(model, x(0))
    loss.backward(retain_graph=True)
    loss.backward()


def unused_results(model: nn.Module, paths: Paths, x: Callable[[int], Tensor]) -> None:
    paths.ignored = tuple(paths.path[::2])
    loss_of(model, x(0)).backward()
    paths.ignored = ()


def two_losses(model: nn.Module, paths: Paths, x: Callable[[int], Tensor]) -> None:
    first = loss_of(model, x(0))
    paths.path = paths.path[:1]
    (first + loss_of(model, x(1))).backward()


PROGRAMS = (once, reversed_on_odd_ranks, retained, unused_results, two_losses)
WAYS = ((1, None), (3, None), (1, again), (3, again))  # layers in a unit, and how they are called


def trained_alone(program, world: int) -> dict[str, Tensor]:
    """Without the engine: mean gradients of what the ranks do, none where no rank used a parameter."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        sums, used = [torch.zeros_like(parameter) for parameter in model.parameters()], set()
        for rank in range(world):
            model.path = path_of(rank, step)
            program(model, model, lambda micro, rank=rank, step=step: inputs(10 * step + micro, rank))
            for total, parameter in zip(sums, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total += parameter.grad / world
                    used.add(parameter)
                parameter.grad = None
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total if parameter in used else None
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def ranks_that_use_different_blocks_train_alike(rank, world):
    rows = thinned(in_world(world, (2, 3), PROGRAMS, WHOLE, WAYS), 2)
    for program, of_program in groupby(rows, key=lambda row: row[0]):
        expected = trained_alone(program, world)
        for _, sharding, (together, call) in of_program:
            case = f"{program.__name__} {sharding} {together} {call is again}"
            model = built(together, sharding=sharding)
            model.call = call or model.call
            optimizer, schedule = adamw(model), context(model).reductions
            for step in range(4):
                model.path = path_of(rank, step)
                before, backwards = schedule.started, context(model).backward.num_ended
                program(model, model, lambda micro, step=step: inputs(10 * step + micro, rank))
                backwards = context(model).backward.num_ended - backwards
                assert schedule.started - before == backwards * (6 // together + 1), case
                optimizer.step()
                optimizer.zero_grad()
            for name, value in weights(model).items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, c=case, n=name: f"{c} {n}: {m}"
                )


def so_does_ddp_with_unused_parameters(rank, world):
    """The measure itself: gradients of one step, and of microbatches of which only the last one communicates."""
    for sharding, microbatches in pairwise(WHOLE, (1, 3), together=1):
        plain, model = built(), built(2, sharding=sharding)
        wrapped = DistributedDataParallel(plain, find_unused_parameters=True)
        for micro in range(microbatches):
            plain.path = model.path = path_of(rank, 7 + micro)
            last = micro == microbatches - 1
            with (
                torch.enable_grad() if last else no_sync(model),
                torch.enable_grad() if last else wrapped.no_sync(),
            ):
                loss_of(model, inputs(micro, rank)).backward()
                loss_of(wrapped, inputs(micro, rank)).backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            found = torch.zeros_like(other) if parameter.grad is None else parameter.grad.full_tensor()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def a_rank_may_use_no_block_at_all(rank, world):
    for sharding in WHOLE:
        model, plain = built(2, sharding=sharding), built()
        optimizer = adamw(model)
        expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            model.path = path_of(0, step) if rank == 0 else []
            with gather_root(model):
                loss = loss_of(model, inputs(step, rank))
            watch_backward(model, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for other in range(world):
                plain.path = path_of(0, step) if other == 0 else []
                (loss_of(plain, inputs(step, other)) / world).backward()
            expected.step()
            expected.zero_grad()
        for name, value in weights(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-5, atol=1e-6)


CASES = (
    ranks_that_use_different_blocks_train_alike,
    so_does_ddp_with_unused_parameters,
    a_rank_may_use_no_block_at_all,
)
WORLDS = {2: CASES, 3: CASES[:1]}


@by_world(WORLDS)
def test_different_blocks(world, case):
    check(WORLDS, world, case)
