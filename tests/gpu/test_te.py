"""Transformer Engine itself on GPUs: recipes near bfloat16, layers replaced, recompute, checkpoints, scales over ranks."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from examples import grpo_logprobs
from examples.decoder import DecoderConfig
from examples.lightning_decoder import LightningDecoder, TextDataModule, generate
from lightning_mfsdp.base.alignment import ALIGNMENTS
from lightning_mfsdp.base.initialize import materialize
from lightning_mfsdp.te import Fp8Compute, Fp8Options, library
from lightning_mfsdp.te.recipes import RECIPES
from tests.engine.cases import run_cases
from tests.engine.internals import owner_of
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, seeded
from tests.te import fake_engine
from tests.te.test_training import ROWS, Net, fp8, resumed, scales, trainer_for

DIM = 256
HOPPER = ("delayed", "current", "block")


@cache
def missing() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            library.load("pytorch")
        except RuntimeError as error:
            return str(error)
    return ""


def needs_engine() -> Callable[..., Any]:
    """A GPU, and the library."""
    none = not torch.cuda.is_available()
    return pytest.mark.skipif(none or bool(missing()), reason="needs a CUDA device" if none else missing())


class TorchAgain(Net):
    """Its blocks are computed again by `torch.utils.checkpoint`, or are not."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute, dim=DIM)


class EngineAgain(TorchAgain):
    """By the library's own function."""

    def again(self, block: nn.Module, x: Tensor) -> Tensor:
        again: Tensor = library.load("pytorch").checkpoint(block, x, use_reentrant=False)
        return again


def batches(rank: int, world: int, steps: int) -> DataLoader[Any]:
    """A task that can be learned; other rows on each rank, larger ones on later ranks."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS * steps, 16, generator=generator) * (1 + rank)
    return DataLoader(TensorDataset(x, x.argmax(1)), ROWS)


def trained(
    rank: int, world: int, precision: Any, build: type[Net] = TorchAgain, steps: int = 4, **model: Any
) -> tuple[Net, Any]:
    made = seeded(build, **model)
    trainer = trainer_for(world, precision, accelerator="cuda", max_steps=steps)
    trainer.fit(made, batches(rank, world, steps))
    return made, trainer


# -- one GPU -----------------------------------------------------------------------------------------------------------


def near_bfloat16(recipe: str, rank: int, world: int) -> None:
    """The same data and start: the losses begin as those of bfloat16 and end near them, and they are other numbers."""
    steps = 60
    reference, _ = trained(rank, world, "bf16-mixed", steps=steps)
    model, trainer = trained(rank, world, fp8(recipe), steps=steps)
    assert model.head.fp8
    assert model.head.fp8_meta["fp8_group"] is trainer.strategy.device_mesh.get_group()
    expected, losses = torch.stack(reference.losses).float(), torch.stack(model.losses).float()
    assert not torch.equal(losses, expected)
    assert losses[-10:].mean() < 0.7 * losses[:10].mean()
    torch.testing.assert_close(losses[:8], expected[:8], rtol=0.1, atol=0.1)
    torch.testing.assert_close(losses[-20:].mean(), expected[-20:].mean(), rtol=0.3, atol=0.0)


def replaced_layers_compute_alike(rank: int, world: int) -> None:
    """In bfloat16, with FP8 off: outputs and gradients of new layers are those of torch.nn up to rounding."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(48, 144),
        nn.LayerNorm(144),
        nn.Linear(144, 64, bias=False),
        nn.RMSNorm(64, eps=1e-5),
        nn.Linear(64, 16),
    ).cuda()
    x = torch.randn(4, 16, 48, device="cuda")

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = plain(leaf)
        y.float().square().mean().backward()
        found = [y.detach(), leaf.grad, *(parameter.grad for parameter in plain.parameters())]
        plain.zero_grad()
        return [tensor.float() for tensor in found]  # type: ignore[union-attr]

    expected = run()
    # Kept, because dropping is for weights in the dtype of the products, as sharded ones are.
    Fp8Compute(Fp8Options(replace_layers=True, keep_quantized=True)).prepare(plain, dist.group.WORLD)
    assert not any(type(module).__module__.startswith("torch.nn.modules") for module in plain.children())
    for got, wanted in zip(run(), expected, strict=True):
        assert (got - wanted).norm() < 0.02 * wanted.norm()


def odd_sizes(recipe: str, rank: int, world: int) -> None:
    """Multiples of 16 that are none of 128 are multiplied, forward and backward."""
    model = nn.Sequential(nn.Linear(48, 144), nn.Linear(144, 16)).cuda()
    compute = Fp8Compute(Fp8Options(recipe=recipe, replace_layers=True))
    compute.prepare(model, dist.group.WORLD)
    x = torch.randn(ROWS, 48, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16), compute.forward():
        y = model(x)
    with compute.backward():
        y.float().square().mean().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (x, *model.parameters()))  # type: ignore[union-attr]


def the_table_of_sizes_is_the_librarys(rank: int, world: int) -> None:
    """Tokens by its own function, where it has one; and products of the least sizes, forward and backward, as far as this device can."""
    sizes_for = getattr(library.load("pytorch.quantization"), "get_align_size_for_quantization", None)
    recipes = library.load("common.recipe")
    for name, sizes in ALIGNMENTS.items():
        recipe = getattr(recipes, RECIPES[name])()
        if sizes_for is not None:
            assert sizes_for(recipe) == sizes.tokens, name
        if name not in HOPPER:
            continue
        width = sizes.weights
        model = nn.Sequential(nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width)).cuda()
        compute = Fp8Compute(Fp8Options(recipe=name, replace_layers=True))
        compute.prepare(model, dist.group.WORLD)
        x = torch.randn(sizes.tokens, width, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16), compute.forward():
            y = model(x)
        with compute.backward():
            y.float().square().mean().backward()
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name


def refused_sizes_fail_in_the_library(rank: int, world: int) -> None:
    """The library lets a multiple of 8 pass in the forward, and its backward cannot multiply it."""
    layer = library.load("pytorch").Linear(32, 24, params_dtype=torch.bfloat16)
    x = torch.randn(ROWS, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with Fp8Compute(Fp8Options()).forward():
        y = layer(x)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        y.sum().backward()


def computed_again(build: type[Net], recipe: str, rank: int, world: int) -> None:
    """Weights after some steps are the same to the bit whether blocks are computed again or not, and scales too."""
    states = []
    for recompute in (False, True):
        model, _ = trained(rank, world, fp8(recipe), build, recompute=recompute)
        states.append(full_state(model) | scales(model))
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def choices_of_layers(rank: int, world: int) -> None:
    model, _ = trained(rank, world, fp8(keep_high_precision=["head", "inputs"], overrides={"blocks.1": "block"}))
    assert type(model.head) is nn.Linear
    recipes = [type(block.linear.fp8_meta["recipe"]).__name__ for block in model.blocks]
    assert recipes == ["Float8CurrentScaling", "Float8BlockScaling", "Float8CurrentScaling"]
    built = nn.ModuleList([library.load("pytorch").Linear(32, 32)])
    compute = Fp8Compute(Fp8Options(keep_high_precision=["0"]))
    compute.prepare(built, dist.group.WORLD)
    with torch.autocast("cuda", torch.bfloat16), compute.forward():
        built[0](torch.randn(ROWS, 32, device="cuda"))
    assert not built[0].fp8


def evaluation_first(rank: int, world: int) -> None:
    """`validate`, in inference mode, makes histories; training goes on with them, and another evaluation leaves them alone."""
    model = seeded(TorchAgain)
    trainer = trainer_for(world, fp8("delayed"), accelerator="cuda", max_steps=2)
    trainer.validate(model, batches(rank, world, 1), verbose=False)
    trainer.fit(model, batches(rank, world, 2))
    before = scales(model)
    assert bool(before["head.scaling_fwd.amax_history"].any())
    trainer.validate(model, batches(rank, world, 1), verbose=False)
    assert all(torch.equal(value, before[name]) for name, value in scales(model).items())


def resumed_to_the_bit(
    recipe: Any, rank: int, world: int, build: type[Net] = TorchAgain, kind: str = "sharded", **precision: Any
) -> None:
    if recipe == "delayed":
        recipe = library.load("common.recipe").DelayedScaling(amax_history_len=4)
    options = {"accelerator": "cuda", "strategy_options": {"state_dict_type": kind}, "precision": precision}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        found = resumed(rank, world, "run", build, recipe, folders[0], **options)
        dist.barrier()
    for name, (state, expected) in found.items():
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(state[key].cpu(), value.cpu()), f"{name}: {key}"


def from_meta(rank: int, world: int) -> None:
    """Modules of the library, which make new parameters when they are reset, and replaced layers."""
    te = library.load("pytorch")
    with torch.device("meta"):
        built = nn.Sequential(te.Linear(32, 32, device="meta"), te.Linear(32, 32, device="meta"), nn.Linear(32, 16))
    built[1].weight = built[0].weight
    built[0].bias.requires_grad_(False)
    Fp8Compute(Fp8Options(replace_layers=True)).prepare(built, dist.group.WORLD)
    materialize(built, torch.device("cuda"))
    assert built[1].weight is built[0].weight
    assert not built[0].bias.requires_grad
    assert all(bool(parameter.isfinite().all()) and parameter.is_cuda for parameter in built.parameters())
    assert built[2].weight.abs().max() < 1.001 * 32**-0.5, "drawn as nn.Linear draws"


def by_string(rank: int, world: int) -> None:
    """Lightning's own string, with the example: built on meta, trained, sampled from."""
    config = DecoderConfig(dim=64, layers=2, heads=2, kv_heads=2, ffn=128, vocab=256, seq=32)
    module = LightningDecoder(config, total_steps=20, warmup_steps=2, meta=True)
    options = {"max_steps": 20, "limit_val_batches": 1, "strategy": "mfsdp"}
    trainer = trainer_for(world, "transformer-engine", accelerator="cuda", **options)
    trainer.fit(module, TextDataModule(32, 8, held_out_windows=16))
    assert trainer.precision == "transformer-engine"
    assert module.decoder.head.fp8  # type: ignore[union-attr]
    assert trainer.callback_metrics["bits_per_byte"] < 7.5
    prompt = torch.zeros(5, dtype=torch.int64, device="cuda")
    assert len(generate(module, prompt, 3, context=32, multiple=16)) == 8


# -- FP8 weights -------------------------------------------------------------------------------------------------------

# Blocks of 128 are whole; and layers as they are in practice.
WEIGHTS = {"replace_layers": True, "fp8_weights": True, "keep_high_precision": ["inputs", "head"]}


class WithFusedAdam(TorchAgain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.fused_adam()

    def fused_adam(self, **options: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = library.load("pytorch.optimizers").FusedAdam(
            self.parameters(), lr=0.01, weight_decay=0.01, **options
        )
        return made


class WithLowMoments(WithFusedAdam):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.fused_adam(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)


class Configured(TorchAgain):
    """Layers of the library, built in `configure_model`: in float32 and in bfloat16, and on meta."""

    def configure_model(self) -> None:
        te = library.load("pytorch")
        kinds = ((torch.float32, "cuda"), (torch.bfloat16, "cuda"), (torch.bfloat16, "meta"))
        torch.manual_seed(7)
        for index, (block, (dtype, device)) in enumerate(zip(self.blocks, kinds, strict=True)):
            if isinstance(block.linear, nn.Linear):
                options = {"params_dtype": dtype, "device": device, "fuse_wgrad_accumulation": index == 1}
                block.linear = te.LayerNormLinear(DIM, DIM, normalization="RMSNorm", **options)


def full_faces(model: nn.Module, kind: str) -> int:
    """How many parameters are quantized ones inside of their units."""
    owned = [owner_of(shown) for shown in model.parameters()]
    return sum(library.is_a(place[1].full, kind) for place in owned if place is not None)


def near(losses: list[Tensor], reference: list[Tensor]) -> None:
    expected, found = torch.stack(reference).float(), torch.stack(losses).float()
    assert found[-10:].mean() < 0.7 * found[:10].mean()
    torch.testing.assert_close(found[:8], expected[:8], rtol=0.1, atol=0.1)
    torch.testing.assert_close(found[-20:].mean(), expected[-20:].mean(), rtol=0.3, atol=0.0)


def weights_near_bfloat16(recipe: str, rank: int, world: int) -> None:
    """Near bfloat16, and nearer to FP8 products of 16-bit weights, which round the same numbers; fused gradients as well."""
    steps = 60
    reference, _ = trained(rank, world, "bf16-mixed", steps=steps)
    usual, _ = trained(rank, world, fp8(recipe, **{**WEIGHTS, "fp8_weights": False}), steps=steps)
    for options in ({}, {"keep_transpose_cache": True}, {"fuse_weight_gradients": True}):
        model, _ = trained(rank, world, fp8(recipe, **WEIGHTS, **options), steps=steps)
        assert full_faces(model, "QuantizedTensor") == 3
        near(model.losses, reference.losses)
        torch.testing.assert_close(
            torch.stack(model.losses[:6]).float(), torch.stack(usual.losses[:6]).float(), rtol=0.02, atol=0.02
        )


def weights_of_modules_that_users_built(recipe: str, rank: int, world: int) -> None:
    options = {"replace_layers": False, "fp8_weights": True}
    usual, _ = trained(rank, world, fp8(recipe, replace_layers=False), Configured, steps=20)
    model, _ = trained(rank, world, fp8(recipe, **options), Configured, steps=20)
    assert full_faces(model, "QuantizedTensor") == 3
    assert full_faces(usual, "QuantizedTensor") == 0
    torch.testing.assert_close(
        torch.stack(model.losses[:6]).float(), torch.stack(usual.losses[:6]).float(), rtol=0.05, atol=0.05
    )


def weights_through_checkpoints(recipe: str, rank: int, world: int) -> None:
    """Resumed to the bit; and what an FP8 run saved is what a bfloat16 run loads, and the other way round."""
    for kind in ("sharded", "full"):
        resumed_to_the_bit(recipe, rank, world, kind=kind, **WEIGHTS)
    for first, second in ((fp8(recipe, **WEIGHTS), "bf16-mixed"), ("bf16-mixed", fp8(recipe, **WEIGHTS))):
        model, saving = trained(rank, world, first)
        other = TorchAgain()
        loading = trainer_for(world, second, accelerator="cuda", max_steps=4)
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            saving.save_checkpoint(f"{folders[0]}/one")
            loading.fit(other, batches(rank, world, 4), ckpt_path=f"{folders[0]}/one")
            dist.barrier()
        expected = full_state(model)
        for name, value in full_state(other).items():
            assert torch.equal(value, expected[name]), name


def policy_gradient(rank: int, world: int) -> None:
    """The example learns what it is rewarded for."""
    module = grpo_logprobs.train(24, prompts=16, accelerator="gpu", devices=world, precision="transformer-engine")
    rewards = torch.stack(module.rewards)
    assert rewards[-5:].mean() > 0.3 > 0.2 > rewards[0]


def no_copies_of_weights(recipe: str, rank: int, world: int) -> None:
    """The same numbers to the bit with and without; between forward and backward two bytes a parameter less."""
    states = []
    for keep in (False, True):
        model, _ = trained(rank, world, fp8(recipe, keep_quantized=keep))
        states.append(full_state(model))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    kept: list[int] = []
    for keep in (False, True):
        layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
        compute = Fp8Compute(Fp8Options(recipe=recipe, replace_layers=True, keep_quantized=keep))
        compute.prepare(layers, dist.group.WORLD)
        x = torch.randn(ROWS, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # the first makes work spaces
            before = torch.cuda.memory_allocated()
            with compute.forward():
                y = layers(x)
            taken = torch.cuda.memory_allocated() - before
            with compute.backward():
                y.sum().backward()
            del y
        kept.append(taken)
    assert kept[1] - kept[0] > 1.5 * 4 * 2048 * 2048, kept


def fused_adam(rank: int, world: int) -> None:
    """Near AdamW, on local rows; with low moments it resumes to the bit."""
    usual, _ = trained(rank, world, fp8("current", **WEIGHTS), steps=20)
    model, trainer = trained(rank, world, fp8("current", **WEIGHTS), WithFusedAdam, steps=20)
    torch.testing.assert_close(
        torch.stack(model.losses[:6]).float(), torch.stack(usual.losses[:6]).float(), rtol=0.02, atol=0.02
    )
    (optimizer,) = trainer.optimizers
    assert not any(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"])
    low, _ = trained(rank, world, fp8("current", **WEIGHTS), WithLowMoments, steps=60)
    assert torch.stack(low.losses[-10:]).mean() < 0.7 * torch.stack(low.losses[:10]).mean()
    for build in (WithFusedAdam, WithLowMoments):
        for kind in ("sharded", "full"):
            resumed_to_the_bit("current", rank, world, build, kind, **WEIGHTS)


ONE = {
    **{f"near bfloat16: {recipe}": partial(near_bfloat16, recipe) for recipe in HOPPER},
    **{f"odd sizes: {recipe}": partial(odd_sizes, recipe) for recipe in HOPPER},
    "replaced layers compute alike": replaced_layers_compute_alike,
    "the table of sizes is the library's": the_table_of_sizes_is_the_librarys,
    "refused sizes fail in the library": refused_sizes_fail_in_the_library,
    **{
        f"computed again by torch: {recipe}": partial(computed_again, TorchAgain, recipe)
        for recipe in ("current", "block")
    },
    **{f"computed again by the library: {recipe}": partial(computed_again, EngineAgain, recipe) for recipe in HOPPER},
    "choices of layers": choices_of_layers,
    "evaluation first": evaluation_first,
    **{f"resumed to the bit: {recipe}": partial(resumed_to_the_bit, recipe) for recipe in HOPPER},
    "from meta": from_meta,
    "by string": by_string,
    **{f"FP8 weights near bfloat16: {recipe}": partial(weights_near_bfloat16, recipe) for recipe in HOPPER},
    **{f"FP8 weights, built: {recipe}": partial(weights_of_modules_that_users_built, recipe) for recipe in HOPPER},
    **{f"FP8 weights in checkpoints: {recipe}": partial(weights_through_checkpoints, recipe) for recipe in HOPPER},
    **{f"no copies: {recipe}": partial(no_copies_of_weights, recipe) for recipe in ("current", "block")},
    "FusedAdam": fused_adam,
    "policy gradient": policy_gradient,
}


@pytest.fixture(scope="module")
def on_one() -> dict[str, str]:
    return run_cases(ONE, 1, backend="nccl")


@pytest.mark.gpu
@needs_engine()
@pytest.mark.parametrize("case", ONE)
def test_on_one_gpu(on_one: dict[str, str], case: str) -> None:
    assert not on_one[case], on_one[case]


@pytest.mark.gpu
@needs_engine()
def test_the_small_engine_of_the_cpu_tests_has_the_names_of_the_library() -> None:
    te, recipes = library.load("pytorch"), library.load("common.recipe")
    for fake, real in ((fake_engine.pytorch, te), (fake_engine.recipes, recipes)):
        for name, made in vars(fake).items():
            theirs = getattr(real, name)
            known = inspect.signature(theirs).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            wanted = {
                parameter.name
                for parameter in inspect.signature(made).parameters.values()
                if parameter.kind.name != "VAR_KEYWORD"
            }
            assert takes_any or wanted <= set(known), f"{name}: {wanted - set(known)}"
    layer = te.Linear(16, 16)
    for name in ("fp8_meta", "init_fp8_meta_tensors", "get_extra_state", "reset_parameters", "need_backward_dw"):
        assert hasattr(layer, name), name
    assert library.is_engine_module(layer)
    assert library.is_engine_module(te.RMSNorm(16))


# -- two GPUs ----------------------------------------------------------------------------------------------------------


def over_ranks(rank: int, world: int) -> dict[str, Any]:
    model, _ = trained(rank, world, fp8("delayed"))
    found = {"scales": scales(model), "state": full_state(model)}
    resumed_to_the_bit("delayed", rank, world)
    resumed_to_the_bit("current", rank, world)
    for recipe in HOPPER:
        weights_near_bfloat16(recipe, rank, world)
        weights_through_checkpoints(recipe, rank, world)
        weights_of_modules_that_users_built(recipe, rank, world)
    fused_adam(rank, world)
    return found


@pytest.mark.gpus2
@needs_engine()
def test_two_ranks_have_one_scale_and_resume_to_the_bit() -> None:
    first, second = run_distributed(over_ranks, 2, backend="nccl")
    for part in ("scales", "state"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(first[part][name], second[part][name]) for name in first[part])
    assert not torch.equal(first["scales"]["inputs.scaling_fwd.scale"], torch.ones(3))
