"""No stream of the engine touches memory that another one may still use: seen on a CPU, by counting (tests/helpers/stream_checker.py)."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import lightning_mfsdp.engine as engine
from lightning_mfsdp import Recompute, apply_recompute
from lightning_mfsdp.engine import MixedPrecisionPolicy, clip_grad_norm_, no_sync, reduce_pending, unshard
from tests.engine import test_codec as quantized
from tests.engine.int8_codec import Int8Codec
from tests.engine.internals import streamed_step
from tests.helpers.chain import STRATEGIES, adamw, inputs, loss_of, sharded_chain, train
from tests.helpers.nights import thinned
from tests.helpers.stream_checker import STEP, CheckedStreams, Checker, checked_streams, place_of

RANKS = 4
RECORD = Path(__file__).parents[1] / "data" / "issued.txt"
STEPS = range(4)  # slots are planned after the first, and used from the second on
WIDE = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Four ranks of which only this one is there: collectives are issued and move nothing."""
    dist.init_process_group("fake", rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


def mesh_of(outer: int) -> object:
    return init_device_mesh("cpu", (outer, RANKS // outer), mesh_dim_names=("outer", "shard"))


# -- programs --------------------------------------------------------------------------------------------------------------


def steps(**options: object) -> None:
    model = sharded_chain(**options)
    train(model, adamw(model), STEPS)


def two_axes(*, keep_sharded: bool = True, **options: object) -> None:
    model = sharded_chain(mesh=mesh_of(2), **options)
    optimizer = adamw(model)
    for step in STEPS:
        with no_sync(model, keep_sharded=True) if keep_sharded else nullcontext():
            loss_of(model, inputs(step)).backward()
        loss_of(model, inputs(step, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def replaced_on_two_axes(**options: object) -> None:
    """Some `.grad` is replaced while gradients wait for the outer axis."""
    model = sharded_chain(mesh=mesh_of(2), policy=WIDE, **options)
    optimizer = adamw(model)
    for step in STEPS:
        with no_sync(model, keep_sharded=True):
            loss_of(model, inputs(step)).backward()
        for layer in model.layers:
            layer.bias.grad = torch.zeros_like(layer.bias)
        loss_of(model, inputs(step, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation() -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    for step in STEPS:
        with no_sync(model):
            loss_of(model, inputs(step)).backward()
        loss_of(model, inputs(step, 1)).backward()
        loss_of(model, inputs(step, 2)).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def recomputed(*, reentrant: bool) -> None:
    model = sharded_chain()
    model.wrap = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
    optimizer = adamw(model)
    for step in STEPS:
        loss_of(model, inputs(step).requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()


def recomputed_from_other_bytes() -> None:
    """Of a codec that keeps other bytes for forward than for backward, those of the forward are gathered in the backward, too."""
    model = quantized.build(planes=2)
    apply_recompute(model, Recompute(modules=["blocks.*"]))
    quantized.shard(model, Int8Codec(planes=2))
    quantized.train(model, adamw(model), STEPS)


def two_graphs() -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    for step in STEPS:
        first, second = loss_of(model, inputs(step)), loss_of(model, inputs(step, 1))
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation_between() -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    for step in STEPS:
        loss = loss_of(model, inputs(step))
        with torch.no_grad():
            loss_of(model, inputs(step, 1))
            with unshard(model):
                model.out.weight.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def failures(mesh: int = 1) -> None:
    model = sharded_chain(mesh=mesh_of(mesh) if mesh > 1 else None)
    optimizer = adamw(model)
    train(model, optimizer, STEPS)

    def fail(_: Tensor) -> None:
        raise InterruptedError

    for layer in range(3):
        x = inputs(layer).requires_grad_()
        seen: list[Tensor] = []
        model.layers[layer].register_forward_hook(lambda _, __, y, seen=seen: seen.append(y))
        loss = loss_of(model, x)
        seen[0].register_hook(fail)
        with pytest.raises(InterruptedError):
            loss.backward()
        optimizer.zero_grad()
    train(model, optimizer, STEPS)


def written_weights() -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    for step in STEPS:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        train(model, optimizer, [step])
        model.layers[0].weight.full_tensor()


def dropped() -> None:
    """Nobody waits for what a forward has gathered ahead."""
    for step in STEPS:
        model = sharded_chain(seed=step)
        train(model, adamw(model), [0, 1])
        model.layers[0](inputs(step))
        del model
        gc.collect()
        for _ in range(20):
            torch.zeros(1 << step)


def offloaded() -> None:
    """In chunks of one layer each, so that staging areas take turns."""
    with mock.patch.object(streamed_step, "_TOGETHER_BYTES", 1):
        model = sharded_chain(layers=6, offload="optimizer")
        train(model, adamw(model), STEPS)


def wide_and_pending() -> None:
    """What waits for the outer axis is reduced without a backward."""
    model = sharded_chain(mesh=mesh_of(2), policy=WIDE)
    optimizer = adamw(model)
    for step in STEPS:
        with no_sync(model, keep_sharded=True):
            loss_of(model, inputs(step)).backward()
        reduce_pending(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def unused_on_two_axes() -> None:
    """The host reads what other ranks report."""
    model = sharded_chain(mesh=mesh_of(2), sharding="optim_grads")
    model.wrap = lambda layer, x: x if layer is model.layers[1] else layer(x)
    train(model, adamw(model), STEPS)


PROGRAMS: dict[str, Callable[[], None]] = {
    **{f"{sharding}, float32": partial(steps, sharding=sharding) for sharding in STRATEGIES},
    **{f"{sharding}, bfloat16": partial(steps, sharding=sharding, policy=BF16) for sharding in STRATEGIES},
    "without compute shards": partial(steps, policy=replace(BF16, keep_compute_shard=False)),
    "dynamic": partial(steps, storage="dynamic"),
    "unsharded between forward and backward": partial(steps, reshard_after_forward=False),
    "offloaded": offloaded,
    "HSDP": two_axes,
    "HFSDP": partial(two_axes, outer_sharding="optim"),
    "HFSDP, bfloat16": partial(two_axes, outer_sharding="optim", policy=BF16),
    "HSDP, added in the next microbatch": partial(two_axes, keep_sharded=False),
    "HFSDP, gradients in bfloat16": partial(two_axes, outer_sharding="optim", policy=WIDE),
    "HSDP, whole gradients": partial(two_axes, sharding="no_shard"),
    "HSDP, summed in float32": partial(two_axes, policy=replace(WIDE, high_precision_reduce=True)),
    "HSDP, unused parameters": unused_on_two_axes,
    "gradients replaced on two axes": replaced_on_two_axes,
    "HSDP, failures": partial(failures, mesh=2),
    "reduced without a backward": wide_and_pending,
    "accumulation": accumulation,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed, reentrant": partial(recomputed, reentrant=True),
    "recomputed from other bytes": recomputed_from_other_bytes,
    "two graphs": two_graphs,
    "evaluation between": evaluation_between,
    "failures": failures,
    "written weights": written_weights,
    "dropped": dropped,
}


@cache
def ran(name: str, left_out: str = "") -> Checker:
    with checked_streams(left_out) as checker:
        PROGRAMS[name]()
    return checker


@pytest.mark.parametrize("name", PROGRAMS)
def test_streams_wait_for_each_other(name):
    assert not ran(name).problems


def described(name: str) -> str:
    """What a program issues from step to step; what repeats is said once."""
    lines, before = [f"## {name}"], None
    for number, issued in enumerate(steps_of(ran(name).issued)):
        lines += [f"step {number}: as before"] if issued == before else [f"step {number}:", *issued]
        before = issued
    return "\n".join(lines)


def steps_of(issued: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in issued:
        if line == STEP:
            found.append([])
        else:
            found[-1].append(f"    {line}")
    return found


RECORDED = (
    *(f"{sharding}, float32" for sharding in STRATEGIES),
    *("HSDP", "HFSDP, bfloat16", "accumulation", "recomputed", "recomputed, reentrant", "two graphs"),
    *("evaluation between", "failures"),
)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_issued_is_what_is_on_record(name):
    """Order, bytes and streams. Who changes the record (`python tests/engine/test_streams.py`) says in the commit why."""
    assert described(name) in RECORD.read_text().split("\n\n")


# Their units are not reduced in the order of the chain.
BROKEN = ("HSDP, unused parameters", "HSDP, failures")


def unit_in(line: str) -> str:
    return line.rpartition("(reduce ")[2].rstrip(")")


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if name.startswith(("HSDP", "HFSDP")) and name not in BROKEN]
)
def test_each_axis_reduces_a_unit_while_the_other_axis_reduces_another(name):
    """The outer axis reduces a unit after the shard axis did, in the same order, and the shard axis goes on with the next one meanwhile."""
    checker, units, together = ran(name), 0, 0
    before, end = "", 0  # the unit that the outer axis reduced last, and where that ends on its stream
    for line, known in zip(checker.issued, checker.known_before, strict=True):
        if "(reduce " not in line or " 10 bytes" in line:  # those are of which parameters were used
            continue
        unit = unit_in(line)
        if line.startswith("reduce: "):
            latest = unit
            together += known.get("outer", 0) < end
        else:
            assert line.startswith("outer: ")
            assert unit == latest, "both axes have one order"
            units += unit != before
            before, end = unit, known.get("outer", 0) + 1
    backwards = units // 5
    assert together >= 4 * backwards, f"the shard axis began {together} of {units} units while the outer axis was busy"


def waits_in_the_code() -> set[str]:
    """Every `streams.wait(...)` of the engine."""
    return {
        place_of(path, node.lineno)
        for path in Path(engine.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).lstrip("_").endswith("streams.wait")
    }


def test_no_wait_can_be_left_out():
    places: dict[str, list[str]] = {}
    for name in PROGRAMS:
        for place in ran(name).waits:
            places.setdefault(place, []).append(name)
    needless = [
        place
        for place in thinned(sorted(places), 4)
        if not any(ran(name, place).problems for name in reversed(places[place]))
    ]
    assert not needless
    assert set(places) == waits_in_the_code()


def test_a_dropped_model_whose_streams_do_not_wait_is_noticed(monkeypatch):
    monkeypatch.setattr(CheckedStreams, "join_when_gone", lambda self, owner: None)
    with checked_streams() as checker:
        dropped()
    assert checker.problems


# -- the checker itself ----------------------------------------------------------------------------------------------------


def checked(program: Callable[[CheckedStreams], object]) -> list[str]:
    with checked_streams() as checker:
        program(checker.streams())
    return list(checker.problems)


def read_too_early(streams: CheckedStreams, *, waits: bool) -> None:
    x = torch.zeros(4)
    if waits:
        streams.wait(streams.record(), "gather")
    with streams.on("gather"):
        x + 1


def write_too_early(streams: CheckedStreams, *, waits: bool) -> None:
    x = torch.zeros(4)
    streams.wait(streams.record(), "gather")
    with streams.on("gather"):
        x.view(2, 2)[1].sum()
        done = streams.record()
    x[:2].add_(1)  # other bytes
    if waits:
        streams.wait(done)
    x[3:].add_(1)


def freed_too_early(streams: CheckedStreams, *, waits: bool) -> None:
    x = torch.zeros(4)
    streams.wait(streams.record(), "gather")
    with streams.on("gather"):
        x.add_(1)
        done = streams.record()
    del x
    if waits:
        streams.wait(done)
    torch.zeros(4)


def resized_too_early(streams: CheckedStreams, *, waits: bool) -> None:
    with streams.on("gather"):
        x = torch.zeros(4)
        ready = streams.record()
    streams.wait(ready)
    y = x + 1
    done = streams.record()
    x.untyped_storage().resize_(0)
    with streams.on("gather"):
        if waits:
            streams.wait(done, "gather")
        torch.zeros(4)
    assert y.sum() == 4


@pytest.mark.parametrize("program", [read_too_early, write_too_early, freed_too_early, resized_too_early])
def test_the_checker_finds_what_is_not_ordered_and_nothing_else(program):
    assert checked(partial(program, waits=False))
    assert not checked(partial(program, waits=True))


def main() -> None:
    """Write the record anew."""
    dist.init_process_group("fake", rank=1, world_size=RANKS)
    RECORD.write_text("\n\n".join(map(described, RECORDED)))


if __name__ == "__main__":
    main()
