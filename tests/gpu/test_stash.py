"""The paged stash on GPUs: kernels against the reference, bit by bit; graphs with changing counts; no waiting; memory follows live rows."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, capture_step, fully_shard, fully_shard_optimizer, unshard
from lightning_mfsdp.callbacks import PagedStash
from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.activations import ACTIVATIONS, ActivationName
from lightning_mfsdp.moe.stash import StashConfig, reference
from lightning_mfsdp.moe.stash.pages import HEADER, PoolSize, Tier
from lightning_mfsdp.moe.stash.stash import ops_for
from tests.engine.cases import run_cases
from tests.gpu.waiting import nothing_waits
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import full_state, make_trainer
from tests.moe.page_cases import DTYPES, History, available, in_pages, make_pool, run_history
from tests.moe.test_stash import assert_ranks_acted_alike, one_rank_overflows
from tests.moe.toy_experts import ToyModel, batch, build

DIM = 64
TOKENS = 512
POOL_TENSORS = ("rows", "host_rows", "free", "host_free", "counters")


def poison(megabytes: int = 256) -> None:
    """Memory that is allocated next holds NaN in every float."""
    blocks = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(megabytes)]
    del blocks


def models(layers: int = 4, slack: int = 1) -> tuple[ToyModel, ToyModel]:
    """The same twice: one for a stash, one without."""
    return build(layers, DIM, slack).cuda(), build(layers, DIM, slack).cuda()


def tokens(index: int) -> Tensor:
    return batch(index, TOKENS, DIM).cuda()


def recorded(model: ToyModel, **options: Any) -> Any:
    stash = model.stash_with(StashConfig(**{"page_rows": 16, "overflow": "skip", "device_factor": 1.5, **options}))
    model.loss(tokens(0)).backward()
    model.zero_grad()
    assert stash.end_step()
    return stash


def assert_equal(found: list[Tensor], wanted: list[Tensor], what: str = "") -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), what


def assert_all_free(stash: Any) -> None:
    for pool in stash._pools.values():
        free, host_free = available(pool)
        assert sorted(free) == list(range(pool.size.pages))
        assert sorted(host_free) == list(range(pool.size.host_pages))


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels_equal_the_reference(rank: int, world: int) -> None:
    """The same history on both: everything that came back, and everything that lies in the pool, poison included."""
    kernels = ops_for(torch.device("cuda"))
    widths, sizes = (1, 33, 1030), (PoolSize(20, 9), PoolSize(11), PoolSize(), PoolSize(1, 1))
    for dtype, width, size in itertools.product(DTYPES, widths, sizes):
        pools = make_pool(dtype, width, 4, size), make_pool(dtype, width, 4, size, "cuda")
        outcomes = [
            run_history(History(ops, pool, pool.rows.device.type), dtype, steps=50, seed=width, check_each=False)
            for ops, pool in zip((reference, kernels), pools, strict=True)
        ]
        for one, other in zip(*outcomes, strict=True):
            assert torch.equal(one, other.cpu()), (dtype, width, size)
        for name in POOL_TENSORS:
            one, other = (getattr(pool, name) for pool in pools)
            assert torch.equal(one, other.cpu()), (dtype, width, size, name)


def many_pages_at_once(rank: int, world: int) -> None:
    """More pages in a tensor than a bookkeeping block holds, more columns than a tile, offsets beyond 32 bits."""
    kernels = ops_for(torch.device("cuda"))
    for width, page_rows, pages in ((2880, 16, 1500), (40_000, 64, 900)):
        pool = make_pool(torch.bfloat16, width, page_rows, PoolSize(pages), "cuda")
        pool.counters[:2] += 3 * pages + pages // 2
        capacity, live = page_rows * (pages - 20), page_rows * (pages - 100) - 5
        rows = torch.randn(capacity, width, device="cuda").bfloat16()
        header = torch.empty(HEADER, dtype=torch.int64, device="cuda")
        table = torch.empty(pages, dtype=torch.int64, device="cuda")
        kernels.place(pool, header, table, torch.tensor(live, device="cuda"), capacity)
        kernels.copy_in(pool, header, table, pool.kind.rows_of(rows))
        found = torch.full_like(rows, float("nan"))
        kernels.copy_out(pool, header, table, pool.kind.rows_of(found))
        kernels.give_back(pool, header, table)
        assert torch.equal(found[:live], rows[:live])
        assert not found[live:].any()
        assert sorted(available(pool)[0]) == list(range(pages))
        assert len(set(table[: pages - 100].tolist())) == pages - 100


# -- training ----------------------------------------------------------------------------------------------------------


def gradients_equal_those_without_a_stash(rank: int, world: int) -> None:
    """All modes, with and without spilling to pinned memory, in poisoned memory."""
    for overflow, host in itertools.product(("keep", "skip", "rerun"), (False, True)):
        model, plain = models(layers=5, slack=2)
        factors = {"device_factor": 0.3, "host_factor": 6.0} if host else {"device_factor": 6.0}
        stash = recorded(model, overflow=overflow, **factors)
        spilled = 0
        for step, together in enumerate((1, 2, 3, 1)):
            for one in (model, plain):
                poison()
                losses = [one.loss(tokens(10 * step + index)) for index in range(together)]
                for loss in losses:
                    loss.backward()
            assert_equal(model.gradients(), plain.gradients(), f"{overflow}, host {host}, step {step}")
            assert not stash.overflowed()
            assert not stash.end_step()
            assert_all_free(stash)
            statistics = stash.statistics(wait=True)
            assert statistics.overflowed == 0
            spilled += statistics.spilled
        assert (spilled > 0) == host


def too_few_pages(rank: int, world: int) -> None:
    for overflow in ("keep", "skip"):
        model, plain = models(layers=6)
        stash = recorded(model, overflow=overflow, device_factor=0.3)
        plain.loss(tokens(1)).backward()
        wanted = plain.gradients()
        poison()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.loss(tokens(1)).backward()
        found = model.gradients()
        if overflow == "keep":
            assert_equal(found, wanted)
            assert sum("found no pages and stay where they are" in str(one.message) for one in caught) == 1
        else:
            assert all(gradient.isfinite().all() for gradient in found)
        assert stash.overflowed() == (overflow == "skip")
        assert stash.end_step(), "pages are enlarged"
        model.loss(tokens(1)).backward()
        assert_equal(model.gradients(), wanted)
        assert not stash.overflowed()
        assert not stash.end_step()
        loss = model.loss(tokens(2))
        stash.abort()
        assert_all_free(stash)
        with pytest.raises(EngineStateError, match="belong to a step that was abandoned"):
            loss.backward()


def a_step_waits_for_nothing(rank: int, world: int) -> None:
    for overflow in ("keep", "skip", "rerun"):
        model, _ = models()
        stash = recorded(model, overflow=overflow, host_factor=1.0)
        for step in range(4):
            given = tokens(step)
            with nothing_waits() if step > 1 else warnings.catch_warnings():
                loss = model.loss(given)
                stash.submit_overflow()
                loss.backward()
                assert not stash.overflowed()
                stash.end_step()
            model.zero_grad()


def memory_follows_live_rows(rank: int, world: int) -> None:
    """At least 80 % of what dead rows took at the peak of ordinary saves is saved."""
    peaks, statistics = {}, None
    for stashed in (False, True):
        model = build(layers=24, dim=256, slack=4).cuda()
        stash = model.stash_with(StashConfig(overflow="skip")) if stashed else None
        given = batch(0, 2048, 256).cuda()
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model.loss(given).backward()
            model.zero_grad()
            if stash is not None:
                stash.overflowed()
                stash.end_step()
                statistics = stash.statistics(wait=True)
        peaks[stashed] = torch.cuda.max_memory_allocated()
        del model, stash
    dead = statistics.ordinary_bytes * (1 - statistics.live_rows / statistics.capacity_rows)
    assert statistics.live_rows < statistics.capacity_rows / 4
    assert peaks[False] - peaks[True] > 0.8 * dead, (peaks, dead, statistics)


# -- graphs ------------------------------------------------------------------------------------------------------------


def replays_with_changing_counts(rank: int, world: int) -> None:
    """Two microbatches in a graph, from no live row to all, with a host tier, against eager steps without a stash."""
    model, plain = models(layers=4)
    stash = recorded(model, device_factor=3.0, host_factor=1.0)
    given = tokens(0)
    stream = torch.cuda.Stream()

    def step() -> None:
        for part in (given, given.flip(0)):
            model.loss(part).backward()

    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
            assert not stash.overflowed()
            stash.end_step()
        model.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    live = []
    for index, threshold in enumerate((0.0, 9.0, -9.0, 0.7, -0.4, 0.0)):
        for one in (model, plain):
            for experts in one.experts:
                experts.threshold.fill_(threshold)
        given.copy_(tokens(index))
        poison()
        graph.replay()
        for part in (given, given.flip(0)):
            plain.loss(part).backward()
        assert_equal([one.grad for one in model.parameters()], plain.gradients(), f"threshold {threshold}")
        assert not stash.overflowed()
        assert not stash.end_step()
        assert_all_free(stash)
        live.append(stash.statistics(wait=True).live_rows)
    assert live[1] == 0
    assert live[2] == 2 * 2 * 3 * TOKENS, "the last layer of each forward stays where it is"
    assert len(set(live)) > 4


def layers_are_graphs_of_their_own(rank: int, world: int) -> None:
    """What is between them runs as ever; forward and backward of each are two graphs, with counts that change."""
    model, plain = models(layers=3)
    stash = recorded(model, device_factor=6.0, own_stream=False)
    inputs = tuple((tokens(0).requires_grad_(),) for _ in model.experts)
    torch.cuda.make_graphed_callables(tuple(model.experts), inputs)
    stash.overflowed()
    assert not stash.end_step()
    live = []
    for index, threshold in enumerate((0.0, 9.0, -9.0, 0.4)):
        for one in (model, plain):
            for experts in one.experts:
                experts.threshold.fill_(threshold)
        poison()
        for one in (model, plain):
            one.loss(tokens(index)).backward()
        assert_equal(model.gradients(), plain.gradients(), f"threshold {threshold}")
        assert not stash.overflowed()
        assert not stash.end_step()
        assert_all_free(stash)
        live.append(stash.statistics(wait=True).live_rows)
    assert live[1] == 0
    assert live[2] == 2 * 3 * TOKENS, "each goes into pages: its graph does not know what follows"


def keep_is_refused_in_a_graph(rank: int, world: int) -> None:
    model, _ = models()
    stash = recorded(model, overflow="keep")
    given = tokens(0)
    with (
        pytest.raises(EngineStateError, match=r"experts\.0 is recorded in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        model.loss(given)
    model.loss(given).backward()
    assert not stash.end_step()
    assert_all_free(stash)


def a_recording_that_failed_leaves_no_trace(rank: int, world: int) -> None:
    """What it saved never ran, so there is nothing to give back."""
    model, plain = models()
    stash = recorded(model)
    given = tokens(1)
    with (
        torch.cuda.stream(torch.cuda.current_stream()),  # a broken recording leaves its own stream behind
        pytest.raises(RuntimeError, match="captur"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        model.loss(given).item()
    assert not stash.overflowed()
    assert not stash.end_step()
    for one in (model, plain):
        one.loss(given).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert_all_free(stash)


def a_captured_step_passes_over_an_overflow(rank: int, world: int) -> None:
    """The optimizer is in the graph too. Step 8 finds too few pages; without a stash it is left out by hand."""
    outcomes = []
    for stashed in (False, True):
        model = build(4, DIM).cuda()
        stash = model.stash_with(StashConfig(page_rows=16, overflow="skip", device_factor=2.0)) if stashed else None
        fully_shard(model)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))

        def step(given: Tensor, model=model, stash=stash, optimizer=optimizer) -> Tensor:
            loss = model.loss(given)
            loss.backward()
            if stash is not None:
                optimizer.found_inf = stash.overflow_on_device()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run, losses, captures = step, [], 0
        for index in range(16):
            if stash is not None and index in (0, 9):
                run = capture_step(step, model, optimizer)
            for experts in model.experts:
                experts.threshold.fill_(-9.0 if index == 8 else (0.5, 0.4, 0.6)[index % 3])
            if stash is None and index == 8:
                losses.append(model.loss(tokens(index)).detach())
                continue
            losses.append(run(tokens(index)))
            if stash is not None:
                captures += run.is_captured
                assert stash.overflowed() == (index == 8)
                assert stash.end_step() == (index in (0, 8))
        assert captures == (8 if stashed else 0), "steps 4 to 8, and from 13 on"
        with unshard(model):
            outcomes.append((torch.stack(losses), [weight.detach().clone() for weight in model.parameters()]))
    (losses, weights), (wanted_losses, wanted) = outcomes
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-4, atol=1e-5)
    for one, other in zip(weights, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class GraphedModule(LightningModule):
    """A step without Python that matters; how many rows are live is decided outside."""

    thresholds = (0.5, 0.45, 0.6, 0.5, 0.5, 0.4, 0.5, 0.6, -9.0, 0.5, 0.4, 0.6)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = ToyModel(layers=4, dim=DIM, slack=2)
        self.runs = 0

    def on_train_batch_start(self, given: Tensor, batch_idx: int) -> None:
        for experts in self.model.experts:
            experts.threshold.fill_(self.thresholds[batch_idx])

    def training_step(self, given: Tensor, batch_idx: int) -> Tensor:
        self.runs += 1
        return self.model.loss(given)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, world: int, *, graph: bool, stash: PagedStash | None) -> GraphedModule:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            accelerator="cuda",
            strategy=MFSDPStrategy(cuda_graph=graph),
            callbacks=[] if stash is None else [stash],
        )
        module = GraphedModule()
        given = [batch(world * index + rank, TOKENS, DIM) for index in range(len(module.thresholds))]
        trainer.fit(module, DataLoader(given, batch_size=None))
    return module


def a_trainer_replays_skips_and_records_again(rank: int, world: int) -> None:
    """Step 8 needs far more pages than were recorded: without a graph and with one it is left out, then there are more."""
    stashes = [PagedStash(page_rows=16, overflow="skip", device_factor=2.0) for _ in range(2)]
    outcomes = []
    for graph, stash in zip((False, True), stashes, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = fit(rank, world, graph=graph, stash=stash)
        told = [str(one.message) for one in caught if "PagedStash" in str(one.message)]
        assert len(told) == (rank == 0), told
        assert all("step 8 on some rank" in one for one in told)
        assert stash.skipped == 1
        outcomes.append((module.runs, full_state(module)))
    (eager_runs, eager), (graph_runs, graphed) = outcomes
    assert eager_runs == len(GraphedModule.thresholds)
    assert graph_runs == 6, "4 ordinary steps, the recording, and another after the pages moved"
    first, second = (stash.statistics for stash in stashes)
    assert (first.saves, first.overflowed, first.ordinary_bytes) == (2 * 3, 0, second.ordinary_bytes)
    assert (first.saves, first.capacity_rows) == (second.saves, second.capacity_rows)
    assert second.live_rows == pytest.approx(first.live_rows, rel=0.02)
    for name, value in eager.items():
        torch.testing.assert_close(graphed[name], value, rtol=1e-4, atol=1e-5, msg=name)
    with pytest.raises(ValueError, match=r"overflow=\"keep\"\) with cuda_graph=True"):
        fit(rank, world, graph=True, stash=PagedStash())


CASES = {
    case.__name__: case
    for case in (
        kernels_equal_the_reference,
        many_pages_at_once,
        gradients_equal_those_without_a_stash,
        too_few_pages,
        a_step_waits_for_nothing,
        memory_follows_live_rows,
        replays_with_changing_counts,
        layers_are_graphs_of_their_own,
        keep_is_refused_in_a_graph,
        a_recording_that_failed_leaves_no_trace,
        a_captured_step_passes_over_an_overflow,
        a_trainer_replays_skips_and_records_again,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """All cases in one process."""
    return run_cases(CASES, 1, backend="nccl")


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("case", CASES)
def test_on_one_gpu(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_backward_kernel_reads_rows_in_pages(activation: ActivationName, dtype: torch.dtype) -> None:
    """It computes what it computes of a tensor; where rows found no pages, what it computes of zeros."""
    kind, rows = ACTIVATIONS[activation], 150
    for columns, page_rows, live in itertools.product((33, 768, 1030), (1, 16, 64), (0, 1, 101, 128, 150)):
        projected, grad, probabilities = (
            torch.randn(rows, width, device="cuda").to(dtype) for width in (columns * kind.width, columns, 1)
        )
        for one in (projected, grad, probabilities):
            one[live:] = float("nan")
        others = probabilities.flatten(), grad, torch.tensor(live, device="cuda")
        nowhere = in_pages(projected, live, page_rows, tier=Tier.NOWHERE)
        for paged, dense in (
            (in_pages(projected, live, page_rows), projected),
            (nowhere, torch.zeros_like(projected)),
        ):
            wanted = kind.backward(dense, *others)
            poison(8)
            with nothing_waits():
                found = kind.backward(paged, *others)
                whole = paged.whole()
            for one, other in zip(found, wanted, strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one[:live], other[:live]), (columns, page_rows, live)
                assert one[:live].isfinite().all()
            assert torch.equal(whole[:live], dense[:live])
            assert not whole[live:].any()


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_one_of_two_gpus_runs_out_of_pages() -> None:
    assert_ranks_acted_alike(run_distributed(one_rank_overflows, 2, "cuda", backend="nccl"))
    name = "a_trainer_replays_skips_and_records_again"
    assert run_cases({name: CASES[name]}, 2, backend="nccl") == {name: ""}
