"""Experts on GPUs: the numbers of the CPU's loop, no word to the host, memory that nobody wrote unread, graphs with changing routes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    capture_step,
    clip_grad_norm_,
    fully_shard_optimizer,
    grad_norm,
    sharded_parameters,
    unshard,
)
from lightning_mfsdp.moe import GroupedExperts, OrdinarySaver, TopKRouter, enable_grouped_experts
from lightning_mfsdp.moe.activations import ACTIVATIONS
from lightning_mfsdp.moe.row_plan import gathered
from lightning_mfsdp.moe.stash import RowStash, StashConfig
from tests.gpu.waiting import nothing_waits
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.moe.models import batch, build, loss_of, sharded
from tests.moe.reference import gradients, looped, routed

SIZES = {"num_experts": 5, "hidden_size": 64, "intermediate_size": 48, "init_std": 0.2}
ACTIVATION = pytest.mark.parametrize("activation", ["swiglu", "gelu"])


def poison() -> None:
    """Memory that the allocator will hand out next holds NaN."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (2**22, 2**20, 2**18, 2**16, 2**14) * 8]
    del blocks


@pytest.mark.gpu
@needs_gpus(1)
def test_gathered_rows_equal_the_reference() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for width in (1, 33, 1024, 2880):
            values = torch.randn(50, width, device="cuda").to(dtype)
            token = torch.randint(0, 50, (96,), device="cuda")
            for given in (values, values.t().contiguous().t()):
                for live in (0, 41, 96):
                    count = torch.tensor(live, device="cuda")
                    poison()
                    with nothing_waits():
                        found = gathered(given, token, count)
                    expected = gathered(values.cpu(), token.cpu(), torch.tensor(live))
                    assert torch.equal(found[:live].cpu(), expected[:live]), (dtype, width, live)
                    assert found.shape == expected.shape
    values, token = torch.randn(8, 1 << 20, device="cuda"), torch.arange(8, device="cuda").repeat(300)
    found = gathered(values, token, torch.tensor(2300, device="cuda"))
    assert torch.equal(found[2296:2300], values[:4]), "offsets beyond 32 bits"


def made(activation: str, **options) -> GroupedExperts:
    torch.manual_seed(1)
    return GroupedExperts(**SIZES, activation=activation, **options).bfloat16().cuda()


def on_gpu(seed: int = 0, tokens: int = 37) -> tuple:
    hidden, index, probabilities = routed(tokens, 2, 5, 64, seed=seed, dtype=torch.float32)
    index[index == 3] = 4  # nobody asks for expert 3
    index[2, 1] = 5  # nobody has it
    return (
        hidden.detach().bfloat16().cuda().requires_grad_(),
        index.cuda(),
        probabilities.detach().cuda().requires_grad_(),
    )


def on_cpu(experts: GroupedExperts, activation: str, hidden, index, probabilities) -> tuple:
    """Output and gradients of the loop over tokens, in float32."""
    inputs = [
        one.detach().float().cpu().requires_grad_() for one in (hidden, probabilities, *experts.stacked_weights())
    ]
    output = looped(inputs[0], index.cpu(), *inputs[1:], activation)
    return output, gradients(output, *inputs)


def close(found: torch.Tensor, expected: torch.Tensor, share: float = 0.02, case: str = "") -> None:
    """Within a share of the largest element: what bfloat16 leaves of sums that cancel."""
    found, expected = found.detach().float().cpu(), expected.detach().float().cpu()
    assert torch.isfinite(found).all()
    difference, largest = (found - expected).abs().max(), expected.abs().max()
    assert difference <= share * largest + 1e-3, f"differs by {difference} of {largest} {case}"


@pytest.mark.gpu
@needs_gpus(1)
@ACTIVATION
def test_experts_equal_the_loop_and_never_wait(activation: str) -> None:
    experts, inputs = made(activation), on_gpu()
    wanted = (inputs[0], inputs[2], experts.weight_in, experts.weight_out)
    gradients(experts(*inputs), *wanted)  # compiles kernels
    poison()
    with nothing_waits():
        output = experts(*inputs)
        found = gradients(output, *wanted)
    expected, expected_gradients = on_cpu(experts, activation, *inputs)
    close(output, expected)
    for one, other in zip(found, expected_gradients, strict=True):
        close(one, other)
    assert not found[2][3].any(), "an expert without rows has a gradient of zero"
    assert experts.live_rows == 73


@pytest.mark.gpu
@needs_gpus(1)
def test_where_each_call_waits_it_says_so_and_computes_the_same() -> None:
    from tests.moe.test_huggingface import built

    experts, (hidden, index, probabilities) = made("swiglu").float(), on_gpu()
    inputs = (hidden.detach().float().requires_grad_(), index, probabilities)
    with pytest.warns(UserWarning, match="computed one by one, and each call waits for the device: .*torch.float32"):
        output = experts(*inputs)
    close(output, on_cpu(experts, "swiglu", *inputs)[0], 1e-4)
    found: set[torch.dtype] = set()

    class Dtypes(OrdinarySaver):
        def save(self, ctx, tensors, live_rows):
            found.update(one.dtype for one in tensors)
            return tensors

    model = built("Mixtral").cuda()
    enable_grouped_experts(model, Dtypes())
    layer, tokens = model.model.layers[0].mlp.experts, torch.randn(5, 16, device="cuda")
    index = torch.arange(10, device="cuda").view(5, 2) % 4
    with pytest.warns(UserWarning, match="computed one by one, and each call waits for the device: .*torch.float32"):
        wide = layer(tokens, index, torch.ones(5, 2, device="cuda"))
    assert found == {torch.float32}
    found.clear()
    with torch.autocast("cuda", torch.bfloat16):  # a warning would be an error
        close(layer(tokens, index, torch.ones(5, 2, device="cuda")), wide)
    assert found == {torch.bfloat16}


@pytest.mark.gpu
@needs_gpus(1)
def test_a_buffer_that_is_too_short_is_flagged_without_waiting() -> None:
    experts, inputs = made("swiglu", capacity_factor=1.0, over_capacity="drop"), on_gpu()
    wanted = (inputs[0], inputs[2], experts.weight_in, experts.weight_out)
    gradients(experts.compute(*inputs, average_rows=30), *wanted)
    poison()
    with nothing_waits():
        output = experts.compute(*inputs, average_rows=30)
        found = gradients(output, *wanted)
    assert experts.over_budget
    assert experts.live_rows == 30
    kept = inputs[1].flatten().sort(stable=True).indices[:30]
    left = torch.full_like(inputs[1].flatten(), -1).scatter(0, kept, inputs[1].flatten()[kept]).view_as(inputs[1])
    expected, expected_gradients = on_cpu(experts, "swiglu", inputs[0], left, inputs[2])
    close(output, expected)
    for one, other in zip(found, expected_gradients, strict=True):
        close(one, other)


@pytest.mark.gpu
@needs_gpus(1)
@ACTIVATION
@pytest.mark.parametrize("columns", [40, 1408])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation_kernels_equal_the_reference_and_leave_dead_rows_alone(activation, columns, dtype) -> None:
    from lightning_mfsdp.moe.activation_kernels import scaled_activation, scaled_activation_backward

    torch.manual_seed(0)
    reference, live = ACTIVATIONS[activation], torch.tensor(5)
    projected = torch.randn(9, reference.width * columns).to(dtype)
    probabilities, grad = torch.rand(9), torch.randn(9, columns).to(dtype)
    arguments = [one.cuda() for one in (projected, probabilities, grad, live)]
    expected = [
        reference.forward(projected, probabilities, live),
        *reference.backward(projected, probabilities, grad, live),
    ]
    found = [
        scaled_activation(activation, arguments[0], arguments[1], arguments[3]),
        *scaled_activation_backward(activation, *arguments),
    ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:5].cpu(), other[:5])


@pytest.mark.gpu
@needs_gpus(1)
def test_a_router_and_its_experts_are_recorded_and_replayed_with_other_routes() -> None:
    torch.manual_seed(0)
    router = TopKRouter(hidden_size=64, num_experts=5, top_k=2, init_std=0.5, z_loss_weight=0.01).cuda()
    experts = made("swiglu")
    weights = [*router.parameters(), *experts.parameters()]
    static = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)

    def step(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routes = router(hidden)
        output = experts(hidden, routes.expert_index, routes.probabilities)
        loss = output.float().square().sum() + routes.loss
        return output.detach(), routes.expert_index, *torch.autograd.grad(loss, weights)

    biased = TopKRouter(hidden_size=64, num_experts=5, top_k=2, balancing="bias").cuda()
    with nothing_waits():
        biased(static)
        biased.statistics()
        biased.balance()
    assert biased.bias.any()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(static)
    seen = set()
    for seed in range(4):
        static.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) + seed)
        graph.replay()
        found = [one.clone() for one in recorded]
        for one, other in zip(found, step(static), strict=True):
            torch.testing.assert_close(one, other)
        seen.add(tuple(torch.bincount(found[1].flatten(), minlength=5).tolist()))
    assert len(seen) == 4, "the loads of experts differed"


WIDE = {"dim": 64, "intermediate_size": 48}


def same_gradients(rank: int, world: int, ep: int, dispatcher: str) -> None:
    """In float32, against one process with the whole batch."""
    reference = build(**WIDE).cuda()
    loss_of(reference, batch(0).cuda()).backward()
    model = sharded(build(**WIDE).cuda(), world, ep, "cuda", dispatcher=dispatcher)
    loss = loss_of(model, batch(0, rank, world).cuda())
    loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for view in sharded_parameters(model):
        if view.main.numel():
            rows = expected[view.name][view.rows.start : view.rows.stop]
            torch.testing.assert_close(
                view.grad, rows, rtol=1e-3, atol=1e-5, msg=lambda text, view=view: f"{view.name}: {text}"
            )
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    torch.testing.assert_close(grad_norm(model), norm, rtol=1e-3, atol=1e-5)


def train(
    rank: int, world: int, ep: int, *, captured: bool = False, stashed: bool = False, own_stream: bool = True
) -> list[torch.Tensor]:
    """Losses and whole weights of steps in bf16, whose routes change; after the first ones nothing may wait for the device.

    With an eps as large as gradients: AdamW would otherwise make steps of full length of what rounding left of nothing.
    """
    model = build(**WIDE).cuda()
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    model = sharded(model, world, ep, "cuda", policy=policy)
    stash = stash_of(model, own_stream) if stashed else None
    optimizer = fully_shard_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True, capturable=True)
    )

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture_step(step, model, optimizer) if captured else step
    losses = []
    for index in range(10):
        ids = batch(index, rank, world, rows=4 * world).cuda()
        torch.cuda.synchronize()
        if index == 4 and not captured:
            torch.cuda.set_sync_debug_mode("error")
        losses.append(run(ids))
        torch.cuda.set_sync_debug_mode("default")
        if stash is not None:
            assert not stash.overflowed()
            assert stash.end_step() is (index == 0), "pages are allocated after the first step"
    if captured:
        assert run.is_captured, run.failure
    total = torch.stack(losses)
    dist.all_reduce(total)
    with unshard(model):
        return [total / world, *(parameter.detach().clone() for parameter in model.parameters())]


def stash_of(model: torch.nn.Module, own_stream: bool) -> RowStash:
    """For all experts, with room for every route."""
    device = next(model.parameters()).device
    config = StashConfig(page_rows=16, overflow="skip", device_factor=8.0, own_stream=own_stream)
    stash = RowStash(config, device)
    for index, block in enumerate(model.blocks):
        block.experts.saver = stash.saver(f"blocks.{index}.experts")
    return stash


def expert_parallelism(rank: int, world: int) -> None:
    sizes = [ep for ep in (1, 2, 4) if ep <= world]
    for ep in sizes:
        same_gradients(rank, world, ep, "all_gather")
    same_gradients(rank, world, world, "all_to_all")
    expected = train(rank, world, 1)
    for ep in sizes:
        for captured, stashed in product((False, True), (False, True)):
            found = train(rank, world, ep, captured=captured, stashed=stashed)
            for one, other in zip(found, expected, strict=True):
                close(one, other, 0.05, f"{ep=} {captured=} {stashed=}")


def a_stash_changes_no_bit(rank: int, world: int) -> None:
    """Backward reads the same rows in pages, as steps come and replayed, whether copies have a stream of their own or not."""
    for captured in (False, True):
        expected = train(rank, world, 1, captured=captured)
        for own_stream in (True, False):
            found = train(rank, world, 1, captured=captured, stashed=True, own_stream=own_stream)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"{captured=} {own_stream=}"


@pytest.mark.gpu
@needs_gpus(1)
def test_a_stash_changes_no_bit_of_a_mixture() -> None:
    run_distributed(a_stash_changes_no_bit, 1, backend="nccl")


@pytest.mark.gpu
@needs_gpus(1)
def test_a_mixture_trains_and_is_captured_on_one_gpu() -> None:
    run_distributed(expert_parallelism, 1, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_expert_parallelism_on_two_gpus() -> None:
    run_distributed(expert_parallelism, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus4
@needs_gpus(2)
def test_expert_parallelism_on_four_ranks() -> None:
    """On two GPUs as on two hosts of two."""
    run_distributed(expert_parallelism, 4, backend="nccl")
