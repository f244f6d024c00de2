"""Every field of MixedPrecisionPolicy does what it says; test_errors.py has those that are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    sharded_parameters,
    units,
    unshard,
)
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.gradients import Gradients
from tests.engine.cases import Problems, device_type, run_cases
from tests.engine.int8_codec import Int8Codec, parameter_of
from tests.helpers.optimizer_state import state_of_rows
from tests.helpers.pairwise import in_turn, pairwise

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DIM, ROWS = 6, 12


class Probe(nn.Module):
    """Remembers the dtypes its forward saw."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 9, dtype=dtype)
        self.norm = nn.LayerNorm(9, dtype=dtype)
        self.down = nn.Linear(9, 1, dtype=dtype)
        self.seen: dict[str, torch.dtype] = {}
        for name, child in self.named_children():
            child.register_forward_hook(partial(self.note, name))

    def note(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen |= {
            f"{name}.input": args[0].dtype,
            f"{name}.weight": module.weight.dtype,
            f"{name}.output": output.dtype,
        }

    def forward(self, x: Tensor, scale: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        self.seen |= {"x": x.dtype} | ({"scale": scale.dtype, "ids": ids.dtype} if scale is not None else {})
        return self.down(torch.tanh(self.norm(self.up(x)))).flatten()


class WireTap(TorchDispatchMode):
    """Notes dtype and kind of every collective that carries gradients or weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d") and any(kind in name for kind in ("reduce", "alltoall", "gather")):
            kind = next(kind for kind in ("reduce_scatter", "allreduce", "alltoall", "gather") if kind in name)
            dtype = next(tensor.dtype for tensor in flat_tensors(args))
            if (kind, dtype) != ("allreduce", torch.uint8):  # which parameters were used
                self.seen.append((kind, dtype))
        return func(*args, **(kwargs or {}))


def flat_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)


def inputs(step: int = 0, rows: int = ROWS, dim: int = DIM) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(step))


def sharded(policy: MixedPrecisionPolicy, strategy: str = "optim_grads_params", dtype: torch.dtype = F32) -> Probe:
    torch.manual_seed(0)
    return fully_shard(Probe(dtype), policy=policy, sharding=strategy)


def one_process(dtype: torch.dtype = F32) -> Probe:
    torch.manual_seed(0)
    return Probe(dtype)


def rows_of(reference: nn.Module, view, attribute: str = "grad") -> Tensor:
    parameter = dict(reference.named_parameters())[view.name]
    value = parameter.grad if attribute == "grad" else parameter.detach()
    return value[view.rows.start : view.rows.stop]


# -- dtypes ------------------------------------------------------------------------------------------------------------

# (module dtype, policy, forward dtype, main weight, dtypes on the wire: weights, gradients)
DTYPES: dict[
    str, tuple[torch.dtype, MixedPrecisionPolicy, tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]]
] = {
    "default": (F32, MixedPrecisionPolicy(), (F32, F32, F32, F32)),
    "bf16 compute": (F32, MixedPrecisionPolicy(compute_dtype=BF16), (BF16, F32, BF16, F32)),
    "bf16 compute, gradients as main weights": (
        F32,
        MixedPrecisionPolicy(compute_dtype=BF16, main_grads_dtype=None),
        (BF16, F32, BF16, F32),
    ),
    "bf16 module, fp32 main weights": (BF16, MixedPrecisionPolicy(), (BF16, F32, BF16, F32)),
    "bf16 module is its own main weight": (BF16, MixedPrecisionPolicy(main_params_dtype=None), (BF16, BF16, BF16, F32)),
    "all bf16": (BF16, MixedPrecisionPolicy(main_params_dtype=BF16, main_grads_dtype=BF16), (BF16, BF16, BF16, BF16)),
    "bf16 main gradients": (F32, MixedPrecisionPolicy(main_grads_dtype=BF16), (F32, F32, F32, BF16)),
    "bf16 on the wire": (F32, MixedPrecisionPolicy(grad_comm_dtype=BF16), (F32, F32, F32, BF16)),
    "fp32 on the wire, bf16 kept": (
        F32,
        MixedPrecisionPolicy(main_grads_dtype=BF16, grad_comm_dtype=F32),
        (F32, F32, F32, F32),
    ),
    "bf16 gradients, summed over ranks in fp32": (
        F32,
        MixedPrecisionPolicy(compute_dtype=BF16, grad_comm_dtype=BF16, high_precision_reduce=True),
        (BF16, F32, BF16, BF16),
    ),
    "bf16 gradients everywhere, summed over ranks in fp32": (
        F32,
        MixedPrecisionPolicy(compute_dtype=BF16, main_grads_dtype=BF16, high_precision_reduce=True),
        (BF16, F32, BF16, BF16),
    ),
    "bf16 main weights, bf16 wire, fp32 kept": (
        BF16,
        MixedPrecisionPolicy(main_params_dtype=None, grad_comm_dtype=BF16),
        (BF16, BF16, BF16, BF16),
    ),
    "bf16 main weights, bf16 wire, sums and gradients in fp32": (
        BF16,
        MixedPrecisionPolicy(main_params_dtype=BF16, grad_comm_dtype=BF16, high_precision_reduce=True),
        (BF16, BF16, BF16, BF16),
    ),
    "all bf16, summed over ranks in fp32": (
        BF16,
        MixedPrecisionPolicy(main_params_dtype=BF16, main_grads_dtype=BF16, high_precision_reduce=True),
        (BF16, BF16, BF16, BF16),
    ),
    "double": (F64, MixedPrecisionPolicy(main_params_dtype=F64, main_grads_dtype=F64), (F64, F64, F64, F64)),
    "float main weights of a bf16 compute": (
        BF16,
        MixedPrecisionPolicy(compute_dtype=F32),
        (F32, F32, F32, F32),
    ),
}


def dtypes(name: str, strategy: str, rank: int, world: int) -> None:
    problems = Problems()
    module_dtype, policy, (compute, main, weight_wire, grad_wire) = DTYPES[name]
    model, reference = sharded(policy, strategy, module_dtype), one_process(module_dtype).to(F64)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    low = BF16 in (compute, main, grad_wire, policy.main_grads_dtype, module_dtype)
    rtol, atol = (0.1, 0.03) if low else (1e-4, 1e-5)
    wires = []
    for step in range(3):
        x = inputs(step).to(compute)
        with WireTap() as tap:
            model(x.chunk(world)[rank]).double().square().mean().backward()
        wires += tap.seen
        reference(x.double()).square().mean().backward()
        problems.expect(model.seen["up.weight"] is compute and model.seen["x"] is compute, f"forward saw {model.seen}")
        for view in sharded_parameters(model):
            problems.expect(
                view.dtype is main and view.main.dtype is main, f"{view.name}: main weight {view.main.dtype}"
            )
            problems.expect(view.compute_dtype is compute, f"{view.name}: compute {view.compute_dtype}")
            if view.main.numel():
                problems.expect(view.grad.dtype is main, f"{view.name}: optimizer's gradient {view.grad.dtype}")
                problems.close(view.grad, rows_of(reference, view), f"step {step} gradient {view.name}", rtol, atol)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    with unshard(model):
        for key, value in model.named_parameters():
            problems.expect(value.dtype is main, f"unshard shows {value.dtype}")
            problems.close(value, dict(reference.named_parameters())[key], f"weight {key}", rtol, atol)
    reductions = {dtype for kind, dtype in wires if kind != "gather"}
    gathers = {dtype for kind, dtype in wires if kind == "gather"}
    problems.expect(reductions == {grad_wire}, f"gradients on the wire: {reductions}")
    expected = set() if strategy == "no_shard" else {weight_wire}
    if policy.high_precision_reduce:
        expected |= {grad_wire} if strategy in ("no_shard", "optim") else set()  # what each rank has summed goes to all
    problems.expect(gathers == expected, f"weights on the wire: {gathers}")
    problems.finish()


def buckets(strategy: str, rank: int, world: int) -> None:
    """A low-precision wire has memory of its own only around the reduction; gradients that wait stay in fp32."""
    policy, problems = MixedPrecisionPolicy(grad_comm_dtype=BF16), Problems()
    torch.manual_seed(0)
    model = fully_shard(Probe(), policy=policy, sharding=strategy, storage="dynamic")
    plain = fully_shard(Probe(), sharding=strategy, storage="dynamic")
    with no_sync(model), no_sync(plain):
        for module in (model, plain):
            module(inputs().chunk(world)[rank]).square().mean().backward()
    for module in (model, plain):
        module(inputs(1).chunk(world)[rank]).square().mean().backward()
    got, wanted = (units(module)[0].gradient_bytes for module in (model, plain))
    problems.expect(got == wanted, f"persistent gradient memory: {got} bytes with a bf16 wire, {wanted} without")
    for view, other in zip(sharded_parameters(model), sharded_parameters(plain), strict=True):
        problems.expect(view.grad is None or view.grad.dtype is F32, f"{view.name}: {view.dtype}")
        problems.expect(other.grad is None or other.grad.dtype is F32, f"{other.name}: {other.dtype}")
    problems.finish()


def compute_shard(strategy: str, rank: int, world: int) -> None:
    """Cast for every gather or kept beside the main weight: the same numbers to the bit, other memory."""
    problems, found = Problems(), []
    for keep in (False, True):
        model = sharded(MixedPrecisionPolicy(compute_dtype=BF16, keep_compute_shard=keep), strategy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            model(inputs(step).chunk(world)[rank]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((units(model)[0].held_bytes, [view.main for view in sharded_parameters(model)]))
    (without, cast), (beside, kept) = found
    problems.expect((without == 0) == (strategy == "optim_grads_params"), f"{without} bytes held where nothing is kept")
    problems.expect(beside > 0, f"{beside} bytes held where the shard is kept")
    problems.expect(all(torch.equal(*pair) for pair in zip(cast, kept, strict=True)), "main weights differ")
    problems.finish()


def table_in_the_docs() -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs/precision.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    first = next(index for index, row in enumerate(rows) if row[0] == "`main_params_dtype`" and len(row) > 4)
    return [row for row in rows[first + 2 :] if len(row) == len(rows[first])]


def policy_of(main: str, grads: str, comm: str, precise: str) -> MixedPrecisionPolicy:
    """A row of the table."""
    return MixedPrecisionPolicy(
        compute_dtype=BF16,
        main_params_dtype=getattr(torch, main),
        main_grads_dtype=getattr(torch, grads),
        grad_comm_dtype=None if comm == "None" else getattr(torch, comm),
        high_precision_reduce=precise == "True",
    )


def bytes_of_the_docs(rank: int, world: int) -> None:
    """Each row of the table: what a step holds and moves for one parameter, and that it learns as one process does."""
    problems = Problems()
    for *given, main_bytes, moments_bytes, gradient_bytes, weight_wire, gradient_wire in table_in_the_docs():
        policy = policy_of(*given)
        expected = (main_bytes, moments_bytes, gradient_bytes, weight_wire, gradient_wire)
        torch.manual_seed(0)
        model, reference = nn.Linear(24, 24 * world, bias=False), nn.Linear(24, 24 * world, bias=False)
        reference.load_state_dict(model.state_dict())
        count = model.weight.numel()
        fully_shard(model, policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        losses: list[tuple[float, float]] = []
        for step in range(4):
            x = inputs(step, 4 * world, 24)
            with WireTap() as tap:
                loss = model(x.chunk(world)[rank]).float().square().mean()
                loss.backward()
            found = units(model)[0].gradient_bytes
            dist.all_reduce(loss := loss.detach() / world)
            whole = reference(x).square().mean()
            whole.backward()
            losses.append((loss.item(), whole.item()))
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        view = sharded_parameters(model)[0]
        state = state_of_rows(optimizer)[view.local]
        moments = sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq"))
        wires = {kind == "gather": dtype.itemsize for kind, dtype in tap.seen}
        measured = [*(size * world / count for size in (view.main.nbytes, moments, found)), wires[True], wires[False]]
        problems.expect(measured == [float(value) for value in expected], f"{policy}: measured {measured}")
        far = max(abs(ours - others) / others for ours, others in losses)
        problems.expect(far < 0.02, f"{policy}: losses {losses}")
        problems.expect(losses[-1][0] < losses[0][0], f"{policy}: losses {losses}")
    problems.finish()


def small_updates_survive(rank: int, world: int) -> None:
    """fp32 main weights of a bf16 module keep updates that bf16 would lose; a native main weight loses them."""
    moved = {}
    for name, main in (("fp32", F32), ("native", None)):
        model = sharded(MixedPrecisionPolicy(main_params_dtype=main), dtype=BF16)
        with unshard(model):
            before = model.up.weight.detach().clone()
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        for _ in range(3):
            model(inputs().to(BF16).chunk(world)[rank]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with unshard(model):
            moved[name] = (model.up.weight.double() - before.double()).abs().max().item()
    assert moved["fp32"] > 0
    assert moved["native"] == 0


# -- what stays in fp32, what is cast ----------------------------------------------------------------------------------


def fp32_modules(wanted: object, dtype: torch.dtype, compute: torch.dtype | None, rank: int, world: int) -> None:
    problems = Problems()
    model = sharded(MixedPrecisionPolicy(compute_dtype=compute, fp32_modules=(wanted,)), dtype=dtype)
    x = inputs().to(BF16)
    model(x.chunk(world)[rank]).float().square().mean().backward()
    seen = model.seen
    problems.expect(seen["norm.weight"] is F32 and seen["norm.input"] is F32, f"the norm saw {seen}")
    problems.expect(seen["up.weight"] is BF16 and seen["down.weight"] is BF16, f"the linears saw {seen}")
    problems.expect(seen["down.input"] is BF16, f"the norm's output was not cast back: {seen}")
    reference = one_process(dtype).to(F32)
    reference(x.float()).square().mean().backward()
    for view in sharded_parameters(model):
        if view.main.numel():
            problems.close(view.grad, rows_of(reference, view), view.name, rtol=0.1, atol=0.03)
    problems.finish()


def input_casts(rank: int, world: int) -> None:
    problems = Problems()
    for cast, expected in ((True, BF16), (False, F32)):
        model = fully_shard(Probe(), policy=MixedPrecisionPolicy(compute_dtype=BF16, cast_forward_inputs=cast))
        x, batch = inputs(), {"scale": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64)}
        with torch.autocast(device_type(), BF16):
            model(x, **batch)
        problems.expect(model.seen["x"] is expected, f"cast={cast}: x is {model.seen['x']}")
        problems.expect(model.seen["scale"] is expected, f"cast={cast}: a keyword is {model.seen['scale']}")
        problems.expect(model.seen["ids"] is torch.int64, "integers were cast")
        problems.expect(x.dtype is F32 and batch["scale"].dtype is F32, "the caller's tensors changed")
    problems.finish()


# -- reduction ---------------------------------------------------------------------------------------------------------


def reduce_factor(strategy: str, grad_reduce: str | float, comm: torch.dtype | None, rank: int, world: int) -> None:
    problems, policy = Problems(), MixedPrecisionPolicy(grad_reduce=grad_reduce, grad_comm_dtype=comm)
    model, reference = sharded(policy, strategy), one_process()
    for step in range(3):  # accumulated: the factor applies once to each
        with no_sync(model) if step == 1 else nullcontext():
            model(inputs(step).chunk(world)[rank]).square().sum().backward()
        reference(inputs(step)).square().sum().backward()
    divisor = {"mean": world, "sum": 1.0}.get(grad_reduce, grad_reduce)
    tolerance = (0.02, 0.5) if comm is BF16 else (1e-4, 1e-5)
    for view in sharded_parameters(model):
        if view.main.numel():
            problems.close(view.grad, rows_of(reference, view) / divisor, view.name, *tolerance)
    problems.finish()


def per_token_loss(strategy: str, rank: int, world: int) -> None:
    """Ranks with different numbers of tokens: each divides by the global count, "sum" adds up to the mean over all tokens."""
    problems, model, reference = Problems(), sharded(MixedPrecisionPolicy(grad_reduce="sum"), strategy), one_process()
    x, target = inputs(), torch.linspace(-1, 1, ROWS)
    counts = [1, 3, 8][:world] if world == 3 else [1, 11]
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    F.mse_loss(reference(x), target).backward()
    (F.mse_loss(model(x[mine]), target[mine], reduction="sum") / ROWS).backward()
    for view in sharded_parameters(model):
        if view.main.numel():
            problems.close(view.grad, rows_of(reference, view), view.name)
    problems.finish()


class Given(nn.Module):
    """The gradient of `weight` is exactly the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 24))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def high_precision(strategy: str, factor: str | float, rank: int, world: int) -> None:
    """The sum is the fp32 sum of the bf16 values: exact where it stays fp32, one rounding where it travels again."""
    problems = Problems()
    pieces = [torch.randn(40, 24, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    divisor = {"mean": world, "sum": 1}.get(factor, factor)
    exact = torch.stack([piece.to(BF16).double() for piece in pieces]).sum(0) / divisor
    errors = {}
    for precise in (True, False):
        policy = MixedPrecisionPolicy(grad_comm_dtype=BF16, high_precision_reduce=precise, grad_reduce=factor)
        model = fully_shard(Given(), policy=policy, sharding=strategy)
        with WireTap() as tap:
            model(pieces[rank]).backward()
        (view,) = sharded_parameters(model)
        expected = exact[view.rows.start : view.rows.stop]
        total = torch.zeros((), dtype=F64)
        if view.grad is not None:
            total = (view.grad.double() - expected).abs().sum()
            if precise:
                if strategy == "no_shard":  # but for ties, to the bit: rounded twice, many would differ
                    same = view.grad == expected.float().to(BF16)
                    problems.expect(
                        same.double().mean() > 0.995, f"{int((~same).sum())} of {same.numel()} rounded twice"
                    )
                problems.close(
                    view.grad, expected, "high precision", rtol=2.0**-8 if strategy == "no_shard" else 1e-6, atol=1e-6
                )
        dist.all_reduce(total)
        errors[precise] = total.item()
        problems.expect({dtype for _, dtype in tap.seen} <= {BF16, F32}, f"on the wire: {tap.seen}")
        if precise:
            problems.expect(("alltoall", BF16) in tap.seen, f"on the wire: {tap.seen}")
            problems.expect(not any("reduce" in kind for kind, _ in tap.seen), f"on the wire: {tap.seen}")
    problems.expect(
        errors[True] < errors[False], f"error {errors[True]} with fp32 sums, {errors[False]} with bf16 sums"
    )
    problems.finish()


def crossed(
    title: str, case: Callable[..., None], *values: tuple[object, ...]
) -> dict[str, Callable[[int, int], None]]:
    return {
        f"{title} [{', '.join(map(label, items))}]": partial(case, *items) for items in pairwise(*values, together=1)
    }


def label(item: object) -> str:
    return item.__name__ if isinstance(item, type) else str(item).removeprefix("torch.")


def direct_gradients(rank: int, world: int) -> None:
    """True: weights of linear layers never have a `.grad` of their own in backward; False: they do. More in test_direct.py."""
    take = Gradients._take
    for direct in (True, False):
        model = sharded(MixedPrecisionPolicy(direct_weight_gradients=direct))
        seen: list[int] = []

        def taken(gradients: Gradients, seen: list[int] = seen) -> list[Tensor | None]:
            grads = take(gradients)
            seen.extend(grad.dim() for grad in grads if grad is not None)
            return grads

        with mock.patch.object(Gradients, "_take", taken):
            model(inputs().chunk(world)[rank]).square().mean().backward()
        assert (2 in seen) is not direct, seen
        assert all(view.grad is not None for view in sharded_parameters(model) if view.local.numel())


CASES = {
    "weight gradients are written directly or not": direct_gradients,
    **{
        f"dtypes [{name}, {strategy}]": partial(dtypes, name, strategy)
        for number, name in enumerate(DTYPES)
        for strategy in in_turn(number, STRATEGIES)
    },
    **crossed("a bucket around the reduction only", buckets, STRATEGIES),
    **crossed("the compute shard is cast or kept", compute_shard, STRATEGIES),
    "bytes of the table in the docs": bytes_of_the_docs,
    "small updates survive in fp32 main weights": small_updates_survive,
    **crossed("fp32 modules", fp32_modules, (nn.LayerNorm, "norm", "n*m"), (F32,), (BF16,)),
    **crossed("fp32 modules", fp32_modules, (nn.LayerNorm,), (BF16,), (None, BF16)),
    "inputs are cast if asked": input_casts,
    **crossed("factor", reduce_factor, STRATEGIES, ("mean", "sum", 5.0), (None, BF16)),
    **crossed("per-token loss", per_token_loss, STRATEGIES),
    **crossed("high precision", high_precision, STRATEGIES, ("mean", "sum", 3.0)),
    "high precision [whole gradients, mean]": partial(high_precision, "no_shard", "mean"),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_cases(CASES, 3)


@pytest.mark.parametrize("case", CASES)
def test_a_field_is_honored(outcomes, case):
    assert not outcomes[case], outcomes[case]


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.25], ids=["sum", "mean of three", "number"])
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=label)
def test_a_factor_is_left_to_nccl_where_it_rounds_nothing(dtype, factor):
    """What it cannot do without rounding is done to the gradients before."""
    axis = Axis(name="shard", size=3, rank=0, group=mock.Mock(), averages=True)
    ops = []
    instead = {
        "uses_nccl": lambda *_: True,
        "premul_sum": lambda factor: ("premul", factor),
        "reduce_scatter_flat": lambda piece, source, op, group: ops.append(op),
        "reduce_scatter_coalesced": lambda pieces, sources, op, group: ops.append(op),
        "all_reduce_coalesced": lambda tensors, op, group: ops.append(op),
    }
    each = [torch.ones(6, dtype=dtype) for _ in range(4)]
    with mock.patch.multiple(compat, **instead):
        axis.reduce_scatter([torch.empty(2, dtype=dtype)], each[:1], factor)
        axis.reduce_scatter([torch.empty(2, dtype=dtype)] * 2, each[1:3], factor)
        axis.all_reduce(each[3:], factor)
    is_here = dtype is BF16 and factor == 0.25
    op = {1.0: dist.ReduceOp.SUM, 1 / 3: dist.ReduceOp.AVG}.get(factor, ("premul", factor))
    assert ops == [dist.ReduceOp.SUM if is_here else op] * 3
    assert all(one.eq(factor if is_here else 1.0).all() for one in each)


def test_every_field_has_a_test_here():
    source = Path(__file__).read_text()
    assert [field.name for field in fields(MixedPrecisionPolicy) if f"{field.name}=" not in source] == []


def test_the_table_in_the_docs_has_every_combination_that_is_not_refused():
    """A wire of the dtype that gradients are kept in is the default, and has its row there."""
    names = ("float32", "bfloat16")
    wanted = []
    for main, grads, comm, precise in product(names, names, ("None", *names), ("False", "True")):
        wire = grads if comm == "None" else comm
        if precise == "True" and wire == "float32":
            with pytest.raises(ShardingError, match="it sends low precision and sums in float32"):
                policy_of(main, grads, comm, precise)
        elif comm != grads:
            policy_of(main, grads, comm, precise)
            wanted.append([main, grads, comm, precise])
    assert [row[:4] for row in table_in_the_docs()] == wanted


def test_the_first_codec_that_knows_a_parameter_has_it():
    """What it does with it is in test_codec.py."""
    codecs = Int8Codec(), Int8Codec()
    policy = MixedPrecisionPolicy(weight_codecs=codecs)
    assert policy.codec_for(parameter_of(torch.ones(2, 2))) is codecs[0]
    assert policy.codec_for(nn.Parameter(torch.ones(2, 2))) is None


def test_gradients_may_be_float16_where_losses_are_scaled():
    """Which they are with float16 compute; `None` is that of a module which was built in it."""
    for compute in (torch.float16, None):
        for field in ("main_grads_dtype", "grad_comm_dtype"):
            assert (
                getattr(MixedPrecisionPolicy(compute_dtype=compute, **{field: torch.float16}), field) is torch.float16
            )


def test_a_policy_cannot_change():
    with pytest.raises(FrozenInstanceError):
        MixedPrecisionPolicy().compute_dtype = BF16
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy()
    assert hash(MixedPrecisionPolicy()) == hash(MixedPrecisionPolicy())


def test_a_policy_in_older_checkpoints_is_found():
    old = b"clightning_mfsdp.engine.policy\nMixedPrecisionPolicy\n."  # as `pickle` named it before files were moved
    assert pickle.loads(old) is MixedPrecisionPolicy
