"""Recompute on GPUs: bits, bytes, copies to host memory, CUDA graphs, compiled layers, and Transformer Engine's modules."""

from __future__ import annotations

import gc
import tempfile
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_mfsdp import MFSDPStrategy, MixedPrecisionPolicy, Recompute, apply_recompute, fully_shard
from lightning_mfsdp.moe import GroupedExperts, TopKRouter
from lightning_mfsdp.recompute import plan_recompute, record_step
from lightning_mfsdp.te import library
from tests.engine.cases import run_cases
from tests.gpu.test_te import EngineAgain, batches, needs_engine
from tests.helpers.chain import context as context_of
from tests.helpers.distributed import needs_gpus
from tests.lightning.models import full_state, make_trainer, seeded
from tests.recompute.counting import Counting
from tests.recompute.models import DIM as NARROW
from tests.recompute.test_arguments import Flattens
from tests.te import fake_engine
from tests.te.test_training import fp8, scales, trainer_for

DIM = 1024
ROWS = 4096
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
CONFIGS = {
    "each layer": Recompute(),
    "pairs": Recompute(num_layers=2),
    "all": Recompute(num_layers=6),
    "first three": Recompute(method="block", num_layers=3),
    "products kept": Recompute(method="selective", save_ops=["matmul"]),
    "parts": Recompute(method="selective", modules=["layers.*.up"]),
    "on the host": Recompute(offload=True),
    "pairs on the host": Recompute(num_layers=2, offload=True),
}

one_gpu = needs_gpus(1)


class Layer(nn.Module):
    """Large enough that kernels and copies outlast the host, so that a missing wait shows."""

    def __init__(self, dim: int = DIM, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Stack(nn.Module):
    def __init__(self, layers: int = 6, dim: int = DIM, **sizes: Any) -> None:
        super().__init__()
        self.dim = dim
        self.inputs = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim, **sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(config: Recompute | None, **sizes: Any) -> Stack:
    torch.manual_seed(0)
    model = Stack(**sizes).cuda()
    if config is not None:
        apply_recompute(model, config)
    for layer in model.layers:
        fully_shard(layer, policy=BF16)
    return fully_shard(model, policy=BF16)


def steps(model: Stack, count: int = 3, rows: int = ROWS) -> list[Tensor]:
    """Losses, and the gradients after the last step."""
    torch.manual_seed(1)
    x = torch.randn(rows, model.dim, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    losses = []
    for _ in range(count):
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses + [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]  # type: ignore[attr-defined]


def assert_same(found: list[Tensor], expected: list[Tensor], case: str) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), case


def peak(model: Stack, rows: int = ROWS) -> int:
    """Of a step after two that made slots and work spaces."""
    steps(model, 2, rows)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    steps(model, 1, rows)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def kept(model: Stack, rows: int) -> int:
    """From forward to backward, after a step that made slots and work spaces."""
    steps(model, 1, rows)
    x = torch.randn(rows, model.dim, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss = model(x).float().mean()
    found = torch.cuda.memory_allocated() - before
    loss.backward()
    return found


# -- without Transformer Engine ----------------------------------------------------------------------------------------


def equal_to_the_bit(rank: int, world: int) -> None:
    """With dropout on the device."""
    expected = steps(sharded(None))
    for name, config in CONFIGS.items():
        assert_same(steps(sharded(config)), expected, name)


def random_numbers_go_on(rank: int, world: int) -> None:
    states = []
    for config in (None, Recompute(), Recompute(num_layers=3)):
        steps(sharded(config))
        states.append(torch.cuda.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


class Attends(nn.Module):
    """Attention with dropout inside of its kernel, and dropout after it."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.inputs, self.down, self.backend = nn.Linear(256, 3 * 256), nn.Linear(256, 256), backend

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unflatten(-1, (3, 4, 64)).movedim(-3, 0).transpose(-3, -2)
        with sdpa_kernel(self.backend):
            heads = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        return x + F.dropout(self.down(heads.transpose(-3, -2).flatten(-2)), 0.1)


class Counted(Counting):
    """Attention kernels, not their backward."""

    def __init__(self) -> None:
        kernels = torch.ops.aten
        super().__init__(
            kernels._scaled_dot_product_flash_attention.default, kernels._scaled_dot_product_efficient_attention.default
        )


def attention_that_draws_is_kept(rank: int, world: int) -> None:
    """It runs once, and dropout after it gets the numbers it had. Short sequences: longer ones' gradients are sums in any order."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        found, states = [], []
        for config in (Recompute(method="none"), Recompute(method="selective", save_ops=["attention"])):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(256, 256), *(Attends(backend) for _ in range(3))).to("cuda", torch.bfloat16)
            apply_recompute(model, config)
            x = torch.randn(8, 64, 256, device="cuda", dtype=torch.bfloat16)
            with Counted() as counting:
                loss = model(x).float().square().mean()
                loss.backward()
            assert counting.count == 3, (backend, config, counting.count)
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            found.append([loss.detach(), *gradients])
            states.append(torch.cuda.get_rng_state())
        assert_same(found[1], found[0], str(backend))
        assert torch.equal(*states), backend


def less_memory(rank: int, world: int) -> None:
    """By as much as the layers keep: three wide tensors and two narrow ones, in bfloat16, of which the narrow input stays.

    Weights are small: where gradients weigh more than inputs, the peak is at the end of the backward, when no input is left.
    """
    dim, rows = 256, 16 * ROWS
    narrow = 2 * rows * dim
    found = {name: peak(sharded(config, dim=dim), rows) for name, config in {"none": None, **CONFIGS}.items()}
    assert found["none"] > found["first three"] > found["each layer"] > found["on the host"], found
    assert found["none"] > found["products kept"] > found["each layer"], found
    assert found["none"] - found["each layer"] > 5 * 2 * 4 * narrow, found
    # On the device: the input of the layer that is computed again, and the next one's, which comes.
    assert found["each layer"] - found["on the host"] > 3 * narrow, found
    waiting = {name: kept(sharded(CONFIGS[name], dim=dim), rows) for name in ("each layer", "on the host")}
    # The last of six may still be leaving.
    assert waiting["each layer"] - waiting["on the host"] > 4.5 * narrow, waiting


def copies_wait_for_one_another(rank: int, world: int) -> None:
    """Many steps in a row, with memory that others overwrite as soon as it is free."""
    plain, model = sharded(None, layers=12), sharded(Recompute(offload=True), layers=12)
    scratch = []
    for _ in range(3):
        expected, found = steps(plain, 2), steps(model, 2)
        scratch = [torch.full((ROWS, DIM), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(12)]
        assert_same(found, expected, "offload")
        scratch.clear()
    assert not any(group.weights.present for unit in context_of(model).units for group in unit.groups)


def inputs_on_the_host_lie_as_they_lay(rank: int, world: int) -> None:
    """A layer that takes columns one after the other, by a view."""
    found = []
    for config in (Recompute(method="none"), Recompute(offload=True)):
        torch.manual_seed(0)
        model = nn.Sequential(Flattens(), Flattens(), Flattens()).cuda()
        apply_recompute(model, config)
        model(torch.randn(NARROW, 4, device="cuda").t()).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert_same(found[1], found[0], "strides")


def an_input_that_is_written_in_place(rank: int, world: int) -> None:
    class Writes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inputs(x)
            for layer in self.layers:
                y = layer(x)
                x.add_(1.0)
                x = y
            return x

    model = Writes().cuda()
    apply_recompute(model, Recompute(offload=True))
    with pytest.raises(RuntimeError, match=r"layers\.0: its input was written in place after its forward"):
        model(torch.randn(ROWS, DIM, device="cuda"))


def compiled(rank: int, world: int) -> None:
    """By Inductor: compiled code that is computed again gives what it gave."""
    found = []
    for config in (None, Recompute(), Recompute(num_layers=2)):
        torch.compiler.reset()
        model = seeded(Net)
        strategy = MFSDPStrategy(units=["Layer"], compile=True, recompute=config)
        fit(model, world, strategy)
        found.append(model.losses)
    for losses in found[1:]:
        assert_same(losses, found[0], "compiled")


def planned(rank: int, world: int) -> None:
    """The peak for each number of layers is what the allocator says, within 5 %.

    With all of them computed again it may be too high by one tensor besides: checkpointing lets go of each as soon as it is read, autograd
    when the node that read it is done, which may allocate in between (the sum for a bias does).
    """
    model, rows = sharded(None, layers=8), 4 * ROWS
    steps(model, 2, rows)
    model.zero_grad()
    x = torch.randn(rows, DIM, device="cuda")
    gc.collect()  # other cases' remains are not this step's
    with record_step(model) as recorder:
        model(x).float().square().mean().backward()
    del x
    plan = plan_recompute(recorder.record, 2**40)
    assert plan.rows[0].peak_bytes > 1.5 * plan.rows[-1].peak_bytes, "activations are most of it"
    measured = []
    for row in plan.rows:
        if row.num_layers:
            apply_recompute(model, Recompute(method="block", num_layers=row.num_layers))
        measured.append(peak(model, rows))
    one_tensor = max(size for layer in recorder.record.layers for size in layer.saved.values())
    for row, found in zip(plan.rows, measured, strict=True):
        above = row.peak_bytes - found
        most = 0.05 * found + one_tensor * (row.num_layers == len(model.layers))
        assert -0.05 * found <= above <= most, (row, found, measured)
    assert plan.rows[-1].extra_seconds > 0


class Expert(nn.Module):
    """Sizes that are multiplied in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.router = TopKRouter(hidden_size=256, num_experts=8, top_k=2, init_std=0.5)
        self.experts = GroupedExperts(num_experts=8, hidden_size=256, intermediate_size=512)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        routes = self.router(hidden)
        return x + self.experts(hidden, routes.expert_index, routes.probabilities) + routes.loss


def experts(rank: int, world: int) -> None:
    found = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), *(Expert() for _ in range(3))).to("cuda", torch.bfloat16)
        apply_recompute(model, config)
        torch.manual_seed(3)
        x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        loads = [layer.router.load.clone() for layer in model[1:]]
        found.append([*loads, *(parameter.grad for parameter in model.parameters())])
    for one in found[1:]:
        assert_same(one, found[0], "experts")  # type: ignore[arg-type]


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


class Net(EngineAgain):
    """Layers of a stack in a LightningModule; recompute comes from the strategy alone."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(256, dropout) for _ in range(4))


class Recorded(Net):
    """Its step leaves nothing behind, so that it can be recorded."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit(model: Net, world: int, strategy: MFSDPStrategy, count: int = 10) -> list[str]:
    """Returns what was warned of."""
    trainer = make_trainer(
        tempfile.gettempdir(), world, accelerator="cuda", strategy=strategy, precision="bf16-mixed", max_steps=count
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, batches(0, world, count))
    return [str(one.message) for one in caught if "cuda_graph" in str(one.message)]


def replayed(rank: int, world: int) -> None:
    """Graphs with recompute inside leave the weights of graphs without."""
    states = []
    for config in (None, Recompute(), Recompute(num_layers=2), Recompute(method="selective", save_ops=["matmul"])):
        model = seeded(Recorded)
        strategy = MFSDPStrategy(units=["Layer"], cuda_graph=True, recompute=config)
        seen: list[bool] = []
        with mock.patch.object(
            Net, "on_train_batch_end", lambda *_, s=strategy, seen=seen: seen.append(s.graphed_step.replayed)
        ):
            assert fit(model, world, strategy) == []
        assert seen[-1], "replayed"
        states.append(full_state(model))
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name], value), name


def dropout_in_a_graph(rank: int, world: int) -> None:
    """Is refused with a reason, and training goes on as it is. Where nothing draws, the same model is recorded."""
    for config, refused in ((Recompute(), True), (Recompute(method="selective", modules=["blocks.*.up"]), False)):
        model = seeded(Recorded, dropout=0.1)
        strategy = MFSDPStrategy(units=["Layer"], cuda_graph=True, recompute=config)
        messages = fit(model, world, strategy)
        assert bool(messages) == refused, messages
        assert not refused or "draws random numbers (dropout)" in messages[0]
        assert all(bool(value.isfinite().all()) for value in full_state(model).values())


# -- Transformer Engine ------------------------------------------------------------------------------------------------


def same_under(recipe: str, rank: int, world: int) -> None:
    """Losses, weights and scales, computed again by the library's own function, and by that alone."""
    te = library.load("pytorch")
    configs = {"each": Recompute(), "host": Recompute(offload=True)}
    if recipe != "delayed":
        configs["pairs"] = Recompute(num_layers=2)
    found: dict[str, Any] = {}
    for name, config in {"none": None, **configs}.items():
        model = seeded(EngineAgain)  # its own recompute is off
        with mock.patch.object(te, "checkpoint", wraps=te.checkpoint) as again:
            options = {"strategy_options": {"recompute": config}, "accelerator": "cuda", "max_steps": 4}
            trainer_for(world, fp8(recipe), **options).fit(model, batches(rank, world, 4))
        assert again.call_count == (0 if config is None else 3 * 4)
        found[name] = {"losses": torch.stack(model.losses), **full_state(model), **scales(model)}
    for name in configs:
        for key, value in found["none"].items():
            assert torch.equal(found[name][key], value), (name, key)


def delayed_scales_in_chunks_are_refused(rank: int, world: int) -> None:
    options = {"strategy_options": {"recompute": Recompute(num_layers=2)}, "accelerator": "cuda", "max_steps": 1}
    with pytest.raises(RuntimeError, match="keeps the scales of one region at a time"):
        trainer_for(world, fp8("delayed"), **options).fit(seeded(EngineAgain), batches(rank, world, 1))


def high_precision_stays_so(rank: int, world: int) -> None:
    """Layers that FP8 leaves alone, beside others that it does not."""
    states = []
    for config in (None, Recompute()):
        model = seeded(EngineAgain)
        precision = fp8("current", keep_high_precision=["blocks.1"], overrides={"blocks.2": "block"})
        options = {"strategy_options": {"recompute": config}, "accelerator": "cuda", "max_steps": 4}
        trainer_for(world, precision, **options).fit(model, batches(rank, world, 4))
        states.append(full_state(model))
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


PLAIN = {
    "equal to the bit": equal_to_the_bit,
    "random numbers": random_numbers_go_on,
    "attention that draws": attention_that_draws_is_kept,
    "less memory": less_memory,
    "copies": copies_wait_for_one_another,
    "strides": inputs_on_the_host_lie_as_they_lay,
    "written in place": an_input_that_is_written_in_place,
    "compiled": compiled,
    "planned": planned,
    "experts": experts,
    "replayed": replayed,
    "dropout in a graph": dropout_in_a_graph,
}
ENGINE = {
    **{f"same under {recipe}": partial(same_under, recipe) for recipe in ("current", "block", "delayed")},
    "delayed scales in chunks": delayed_scales_in_chunks_are_refused,
    "high precision": high_precision_stays_so,
}


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return run_cases(PLAIN, 1, backend="nccl")


@pytest.fixture(scope="module")
def engine() -> dict[str, str]:
    return run_cases(ENGINE, 1, backend="nccl")


@pytest.mark.gpu
@one_gpu
@pytest.mark.parametrize("case", PLAIN)
def test_recompute_on_one_gpu(plain: dict[str, str], case: str) -> None:
    assert not plain[case], plain[case]


@pytest.mark.gpu
@needs_engine()
@pytest.mark.parametrize("case", ENGINE)
def test_recompute_of_library_modules(engine: dict[str, str], case: str) -> None:
    assert not engine[case], engine[case]


@pytest.mark.gpu
@needs_engine()
def test_the_library_has_what_the_small_engine_has() -> None:
    manager = library.load("pytorch.quantization").FP8GlobalStateManager
    for name in ("is_fp8_enabled", "get_fp8_recipe", "get_fp8_group"):
        assert callable(getattr(manager, name))
        assert callable(getattr(fake_engine.FP8GlobalStateManager, name))
