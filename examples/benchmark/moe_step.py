"""Training steps of a decoder with mixtures of experts.

Experts are divided among ranks and activations saved in several ways; or everything is sharded, by this package or by FSDP2. Every way
trains the same weights on the same random tokens, so losses agree.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from examples.benchmark.engines import Engine, Options, adamw, sharded_by_mfsdp
from examples.benchmark.logprobs import Clock, forget
from examples.benchmark.moe_rows import Row, Sizes
from examples.benchmark.peers import fsdp2_of
from examples.decoder import Decoder, DecoderConfig, next_token_loss
from lightning_mfsdp import MixedPrecisionPolicy, capture_step, fully_shard, fully_shard_optimizer
from lightning_mfsdp.moe import GroupedExperts, TopKRouter, expert_parallel, take_over_budget
from lightning_mfsdp.moe.stash import RowStash, StashConfig

__all__ = ["ENGINES", "STASHES", "WAYS", "measure_experts", "measure_sharded"]

BATCHES = 4
# Recorded over all batches, so that pages are enough for each.
STASHES: dict[str, dict[str, Any]] = {
    "stash": {"overflow": "skip"},
    "stash keep": {"overflow": "keep"},
    "stash with host": {"overflow": "skip", "device_factor": 0.3, "host_factor": 1.0},
}
WAYS = ("ordinary", *STASHES, "recompute")


class Mixture(nn.Module):
    """A router and its experts, in the place of a feed-forward layer.

    Args:
        sizes: Of the model.
        capacity_factor: Of the experts.
        idle: Choices of no expert that are added to each token's, for longer buffers than so few ranks could fill.
        recompute: Save the layer's input alone, and compute experts again in backward.
    """

    def __init__(self, sizes: Sizes, capacity_factor: float | None, idle: int, *, recompute: bool) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size=sizes.dim, num_experts=sizes.experts, top_k=sizes.top_k, balancing=None)
        self.experts = GroupedExperts(
            num_experts=sizes.experts,
            hidden_size=sizes.dim,
            intermediate_size=sizes.width,
            capacity_factor=capacity_factor,
            over_capacity="drop",
        )
        self.idle, self.recompute = idle, recompute

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, of shape [B, S, D], to the same shape."""
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        index = F.pad(routes.expert_index, (0, self.idle), value=-1)
        inputs = (tokens, index, F.pad(routes.probabilities, (0, self.idle)))
        if self.recompute:
            output = checkpoint(self.experts, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            output = self.experts(*inputs)
        return output.view_as(x)


def buffers(capacity: float, ranks: int, top_k: int) -> tuple[float | None, int]:
    """Capacity factor and idle choices that make buffers `capacity` times as long as what lives in them on average.

    A rank of n gets at most n times the average. Where that is less than asked for, choices of nobody fill the buffer: to experts, and
    to what is saved, they are like those of other ranks.
    """
    if capacity == 0:
        return None, 0
    reached = min(capacity, ranks)
    return (None if ranks == 1 else reached), round(top_k * (capacity / reached - 1))


def build(sizes: Sizes, device: torch.device, mixture: Callable[[], nn.Module]) -> Decoder:
    """The decoder, with the same numbers whatever is done to it."""
    torch.manual_seed(0)
    config = DecoderConfig(
        dim=sizes.dim,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        ffn=1,
        vocab=sizes.vocab,
        seq=sizes.seq,
    )
    with torch.device(device):
        model = Decoder(config)
        for block in model.blocks:
            block.feed_forward = mixture()
    return model


def policy_on(device: torch.device) -> MixedPrecisionPolicy:
    """bf16 on GPUs; the CPU has no grouped products to try it with."""
    return MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def tokens_of(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """This rank's batches, `[B, S + 1]` each."""
    generator = torch.Generator(device).manual_seed(1234 + dist.get_rank())
    shape = (BATCHES, sizes.batch, sizes.seq + 1)
    return list(torch.randint(0, sizes.vocab, shape, generator=generator, device=device))


def loss_of(forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Of the next token."""
    return next_token_loss(forward(ids[:, :-1]), ids[:, 1:])


class Memory:
    """Of the device since `forget`, in GiB; zero on the CPU, which does not count."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> float:
        """Allocated at this moment."""
        return torch.cuda.memory_allocated() / 2**30 if self._on_gpu else 0.0

    def most(self) -> dict[str, float]:
        """The most that was allocated and reserved, on the rank where it was most."""
        if not self._on_gpu:
            return {"peak_gib": 0.0, "reserved_gib": 0.0}
        most = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        peak, reserved = most.tolist()
        return {"peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30}


def timed(step: Callable[[Tensor], Tensor], data: list[Tensor], row: Row, device: torch.device) -> dict[str, Any]:
    """Times of steps, the losses of some, and the most memory since `forget`."""
    clock, host, losses = Clock(device), [], []
    dist.barrier()
    clock.stamp()
    for number in range(row.steps):
        start = time.perf_counter()
        losses.append(step(data[number % len(data)]))
        host.append(time.perf_counter() - start)
        clock.stamp()
    times = clock.between()
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    return {
        "step_ms": median(times),
        "slowest_ms": max(times),
        "host_ms": median(host) * 1e3,
        "tokens_per_s": row.sizes.tokens / median(times) * 1e3,
        "losses": [round(loss / dist.get_world_size(), 4) for loss in curve.tolist()],
        **Memory(device).most(),
    }


# -- experts divided among all ranks -----------------------------------------------------------------------------------


class Training:
    """A model whose experts are divided among all ranks, its optimizer, and a stash if the row has one."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.device = row, device
        world = dist.get_world_size()
        factor, idle = buffers(row.capacity, world, row.sizes.top_k)
        mixture = partial(Mixture, row.sizes, factor, idle, recompute=row.name == "recompute")
        self.model = self._sharded(build(row.sizes, device, mixture), world)
        self.optimizer = fully_shard_optimizer(adamw(self.model.parameters()))
        self.stash: RowStash | None = None
        if row.name in STASHES:
            options = {"device_factor": row.device_factor, **STASHES[row.name]}
            config = StashConfig(recorded_steps=BATCHES, sizing="maximum", **options)
            self.stash = RowStash(config, device)
            for name, part in self.model.named_modules():
                if isinstance(part, GroupedExperts):
                    part.saver = self.stash.saver(name)
        self.growths = 0

    def _sharded(self, model: Decoder, world: int) -> Decoder:
        dense = init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        experts = init_device_mesh(self.device.type, (1, world), mesh_dim_names=("shard", "expert"))
        policy = policy_on(self.device)
        for block in model.blocks:
            layer = expert_parallel(block.feed_forward.experts, experts, dispatcher="all_gather")
            fully_shard(layer, experts, policy=replace(policy, cast_forward_inputs=False))  # probabilities stay float32
            fully_shard(block, dense, policy=policy)
        for part in (model.embedding, model.head, model):
            fully_shard(part, dense, policy=policy)
        return model

    @property
    def asks(self) -> bool:
        """Whether somebody has to be asked before a step of the optimizer."""
        return self.stash is not None and self.stash.config.overflow != "keep"

    def eager(self, ids: Tensor) -> Tensor:
        """A step."""
        loss = loss_of(self.model, ids)
        if self.stash is not None and self.asks:
            self.stash.submit_overflow()
        loss.backward()
        if self.stash is None or not self.asks or not self.stash.overflowed():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.growths += self.end()
        return loss.detach()

    def recordable(self, ids: Tensor) -> Tensor:
        """A step that asks nobody on the host."""
        loss = loss_of(self.model, ids)
        loss.backward()
        if self.stash is not None:
            self.optimizer.found_inf = self.stash.overflow_on_device()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def end(self) -> bool:
        """Between two steps; whether pages have moved."""
        if self.stash is None:
            return False
        if self.asks:
            self.stash.overflowed()
        return self.stash.end_step()

    def measured(self, data: list[Tensor]) -> dict[str, Any]:
        """Steps as they are."""
        for number in range(self.row.warmup):
            self.eager(data[number % BATCHES])
        self.growths = 0  # that pages were allocated at all counts as one
        forget(self.device)
        for number in range(2):  # the allocator has to ask the driver anew
            self.eager(data[number])
        found = timed(self.eager, data, self.row, self.device)
        found |= self.held(data[0]) | self.counted()
        if self.device.type == "cuda":
            found["host_syncs"] = self.host_syncs(data)
        return found

    def held(self, ids: Tensor) -> dict[str, float]:
        """What a forward leaves for its backward, beside the pages."""
        memory = Memory(self.device)
        before = memory.now()
        loss = loss_of(self.model, ids)
        held = memory.now() - before
        self.unstepped(loss)
        return {"held_gib": held}

    def unstepped(self, loss: Tensor) -> None:
        """Backward of a step that changes no weight."""
        loss.backward()
        self.optimizer.zero_grad()
        self.end()

    def counted(self) -> dict[str, Any]:
        """What experts and stash counted last, on this rank."""
        experts = [part for part in self.model.modules() if isinstance(part, GroupedExperts)]
        found: dict[str, Any] = {
            "over_budget": bool(take_over_budget(self.model)),
            "live_rows": int(experts[0].live_rows),
            "capacity_rows": experts[0].capacity,
            "growths": self.growths,
        }
        statistics = self.stash.statistics(wait=True) if self.stash is not None else None
        if statistics is not None:
            found["stash"] = {**asdict(statistics), "live_share": statistics.live_rows / statistics.capacity_rows}
        return found

    def host_syncs(self, data: list[Tensor]) -> int:
        """Operations of two steps in which the host waits for the device, as far as torch finds them."""
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for ids in data[:2]:
                    self.eager(ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(one.message) for one in caught)

    def traced(self, ids: Tensor, path: Path) -> None:
        """Write the pages in use over a step as JSON."""
        if self.stash is None:
            return
        self.stash.start_trace()
        self.unstepped(loss_of(self.model, ids))
        noted = self.stash.stop_trace()
        rows = [
            {**asdict(one), "kind": {"width": one.kind.width, "itemsize": one.kind.dtype.itemsize}} for one in noted
        ]
        if dist.get_rank() == 0:
            path.write_text(json.dumps(rows))

    def captured(self, data: list[Tensor], capture: Callable[..., Any]) -> Any:
        """The step in a graph that uses the pages as they are now."""
        for _ in range(3):
            moved = False
            run = capture(self.recordable, self.model, self.optimizer, warmup=3)
            for number in range(4):
                if number == 3:
                    forget(self.device)  # this call records
                run(data[number])
                moved = self.end()
            if run.failure:
                raise RuntimeError(f"the step was not recorded: {run.failure}")
            if run.is_captured and not moved:
                return run
        raise RuntimeError("pages were enlarged whenever the step had been recorded; raise --device-factor")

    def recorded(self, data: list[Tensor], capture: Callable[..., Any]) -> dict[str, Any]:
        """Steps as one CUDA graph each."""
        run = self.captured(data, capture)

        def replay(ids: Tensor) -> Tensor:
            loss = run(ids)
            if self.end():
                raise RuntimeError("pages were enlarged in a timed step, so the graph is stale; raise --device-factor")
            return loss

        found = timed(replay, data, self.row, self.device)
        return {**found, **self.counted(), "pool_gib": run.pool_bytes / 2**30}


def measure_experts(
    row: Row, device: torch.device, capture: Callable[..., Any] = capture_step
) -> Iterator[dict[str, Any]]:
    """Steps as they are, then recorded; `capture` records."""
    training, data = Training(row, device), tokens_of(row.sizes, device)
    yield {"recorded": False, **training.measured(data)}
    if row.trace:
        training.traced(data[0], Path(row.trace))
    if row.graph:
        yield {"recorded": True, **training.recorded(data, capture)}


# -- everything sharded ------------------------------------------------------------------------------------------------


def _mfsdp(model: Decoder, options: Options, device: torch.device, *, symmetric: bool = False) -> Engine:
    return sharded_by_mfsdp(model, options, policy_on(device), symmetric=symmetric)


def _fsdp2(model: Decoder, options: Options, device: torch.device, *, tuned: bool = False) -> Engine:
    return fsdp2_of(model, options, tuned=tuned)


ENGINES: dict[str, Callable[[Decoder, Options, torch.device], Engine]] = {
    "mfsdp": _mfsdp,
    "mfsdp-symm": partial(_mfsdp, symmetric=True),
    "fsdp2": _fsdp2,
    "fsdp2-tuned": partial(_fsdp2, tuned=True),
}


def measure_sharded(row: Row, device: torch.device) -> dict[str, Any]:
    """Steps of an engine; every rank has tokens of its own, and computes with all experts."""
    model = build(row.sizes, device, partial(Mixture, row.sizes, None, 0, recompute=False))
    engine = ENGINES[row.name](model, Options(size=row.size), device)
    data = tokens_of(row.sizes, device)

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(engine.forward, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    for number in range(row.warmup):
        step(data[number % BATCHES])
    forget(device)
    for number in range(2):
        step(data[number])
    return timed(step, data, row, device)
