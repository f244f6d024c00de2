"""FP8 weights of Transformer Engine, sharded: what one process with the same weights computes, at half of bfloat16's bytes."""

from __future__ import annotations

import copy
import tempfile
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    sharded_parameters,
    unshard,
)
from lightning_mfsdp.te import fuse_weight_gradients, weight_codecs
from lightning_mfsdp.te.quantized_weights import quantize_again
from tests.engine.cases import run_cases
from tests.engine.internals import context_of
from tests.engine.test_codec import watched
from tests.gpu.test_nccl import STRATEGIES
from tests.helpers.distributed import needs_gpus

DIM, ROWS = 256, 64
RECIPES = ("delayed", "current", "block")


def _unavailable() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken build raises any kind
        return f"Transformer Engine cannot be loaded: {type(error).__name__}: {error}"
    return ""


_REASON = _unavailable()
needs_engine = pytest.mark.skipif(bool(_REASON), reason=_REASON or "available")


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    kinds = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }
    return kinds[name]()


class Net(nn.Module):
    """Blocks of two linears, or of others; FP8 weights unless `primary` is off."""

    def __init__(
        self,
        recipe: Any,
        *,
        primary: bool = True,
        fused: bool = False,
        calls: int = 1,
        widths: tuple[int, ...] = (DIM, 2 * DIM, DIM),
        **_: Any,
    ) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
        with te.quantized_model_init(enabled=primary, recipe=recipe, preserve_high_precision_init_val=primary):
            self.blocks = nn.ModuleList(
                nn.Sequential(*(te.Linear(*sizes, **options) for sizes in pairwise(widths))) for _ in range(3)
            )
        self.recipe, self.calls, self.recompute = recipe, calls, False
        self.scale = nn.Parameter(torch.ones(DIM, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=True, recipe=self.recipe):
            for block in self.blocks:
                for _ in range(self.calls):
                    out = te.checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
                    x = x + torch.tanh(out)
        return x * self.scale


def build(seed: int, recipe: Any, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(recipe, **options)


def shard(model: Net, *, keep: bool = False, sharding: str = "optim_grads_params") -> Net:
    policy = MixedPrecisionPolicy(weight_codecs=weight_codecs(keep_transpose_cache=keep))
    for unit in (*model.blocks, model):
        fully_shard(unit, sharding=sharding, policy=policy)
    fuse_weight_gradients(model)
    return model


def batch(number: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randn(ROWS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)


def loss_of(model: nn.Module, number: int, rank: int = 0, world: int = 1) -> Tensor:
    return model(batch(number).chunk(world)[rank].clone().requires_grad_()).float().square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(model: Net, optimizer: Any, steps: range, rank: int = 0, world: int = 1, micro: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for index in range(micro):
            with no_sync(model) if index < micro - 1 else nullcontext():
                loss = loss_of(model, step * micro + index, rank, world)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main_weights(model: nn.Module) -> dict[str, Tensor]:
    with unshard(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def in_one_process(
    recipe: Any, steps: int, micro: int = 1, ranks: int = 1, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Transformer Engine alone: float32 main weights, and its own function for whole weights after each step.

    With several `ranks` it computes what each of them would, one after the other, and takes the mean of their gradients.
    """
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    model = build(0, recipe, **options)
    fused = options.get("fused", False)
    main: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        kept = getattr(parameter, "get_high_precision_init_val", None)
        value = parameter.detach() if kept is None else kept()
        main[name] = nn.Parameter(value.cuda().float().view(parameter.shape))
        if kept is not None and fused:
            parameter.main_grad = torch.zeros_like(main[name])
    optimizer, losses = adamw(main.values()), []
    for step in range(steps):
        for index, rank in product(range(micro), range(ranks)):
            loss = loss_of(model, step * micro + index, rank, ranks)
            loss.backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad.float() / ranks
                    main[name].grad = grad if main[name].grad is None else main[name].grad + grad
                parameter.grad = None
        quantized = {name: p for name, p in model.named_parameters() if name != "scale"}
        for name, parameter in quantized.items():
            if fused:
                main[name].grad = parameter.main_grad.clone()
                parameter.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
        masters = [main[name].detach().view(-1) for name in quantized]
        quantize_master_weights(list(quantized.values()), masters, [0] * len(masters), dist.group.WORLD)
        with torch.no_grad():
            model.scale.copy_(main["scale"])
    return {name: value.detach() for name, value in main.items()}, losses


def same(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    wrong = {name: (found[name] - expected[name]).abs().max().item() for name in found}
    assert not any(wrong.values()), f"{what}: {wrong}"


def one_rank_is_bit_equal(rank: int, world: int) -> None:
    for name, (keep, fused, micro) in product(
        RECIPES, ((False, False, 1), (True, False, 2), (False, True, 1), (False, True, 2))
    ):
        recipe = recipe_of(name)
        expected, losses = in_one_process(recipe, 3, micro, fused=fused)
        model = shard(build(0, recipe, fused=fused), keep=keep)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        what = (name, keep, fused, micro)
        assert train(model, optimizer, range(3), micro=micro) == losses, what
        same(main_weights(model), expected, what)


def shared_modules_write_twice(rank: int, world: int) -> None:
    for name in RECIPES[1:]:
        expected, _ = in_one_process(recipe_of(name), 2, fused=True, calls=2)
        model = shard(build(0, recipe_of(name), fused=True, calls=2))
        train(model, fully_shard_optimizer(adamw(model.parameters())), range(2))
        same(main_weights(model), expected, (name, "two calls"))


def raw_of(weight: Any) -> list[Tensor]:
    blocks = type(weight).__name__ == "Float8BlockwiseQTensor"
    names = ("_rowwise_data", "_rowwise_scale_inv") if blocks else ("_data", "_scale_inv")
    return [getattr(weight, name).clone() for name in names]


def what_forward_reads(model: Net) -> dict[str, tuple[list[Tensor], Any]]:
    """Raw data and scales of each weight while its layer runs, and the scale it was cast with where that was chosen before."""
    seen: dict[str, tuple[list[Tensor], Any]] = {}

    def note(name: str, layer: Any) -> None:
        weight = layer.weight
        scale = getattr(weight._quantizer, "scale", None)
        seen[name] = raw_of(weight), None if scale is None else scale.clone()

    handles = [
        layer.register_forward_pre_hook(lambda layer, _, name=name: note(name, layer))
        for name, layer in model.named_modules()
        if type(layer).__name__ == "Linear"
    ]
    with torch.no_grad():
        model(batch(99))
    for handle in handles:
        handle.remove()
    return seen


def bytes_are_those_of_the_whole_weight(rank: int, world: int) -> None:
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    # Of the uneven widths, ranks would divide a weight within what the library's cast for blocks writes at once.
    for name, sharding, widths in product(RECIPES, STRATEGIES, ((DIM, 2 * DIM, DIM), (DIM, 640, 384, DIM))):
        recipe = recipe_of(name)
        model = shard(build(rank, recipe, widths=widths), sharding=sharding)  # rank 0's numbers win
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(2), rank, world)
        found, main = what_forward_reads(model), main_weights(model)
        whole = build(5, recipe, widths=widths)
        for path, (raw, scale) in found.items():
            weight = whole.get_submodule(path).weight
            if scale is not None:
                weight._quantizer.scale.copy_(scale)
            quantize_master_weights([weight], [main[f"{path}.weight"].view(-1)], [0], dist.group.WORLD)
            for ours, theirs in zip(raw, raw_of(weight), strict=True):
                assert torch.equal(ours, theirs), (name, sharding, widths, path)


def ranks_train_as_one_process_does(rank: int, world: int) -> None:
    """To the bit: each rank's rows are a computation of their own in one process as well."""
    for name, sharding in product(RECIPES[1:], STRATEGIES):
        expected, losses = in_one_process(recipe_of(name), 3, ranks=world)
        model = shard(build(0, recipe_of(name)), sharding=sharding)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        assert train(model, optimizer, range(3), rank, world) == losses[rank::world], (name, sharding)
        same(main_weights(model), expected, (name, sharding))


def numbers_are_those_of_16_bit_weights(rank: int, world: int) -> None:
    """To the bit, in forward and in both products of backward, whether layers keep the copy of a 16-bit weight or round it again."""
    for name in RECIPES[1:]:
        found = []
        for primary, again in ((True, False), (False, False), (False, True)):
            model = shard(build(0, recipe_of(name), primary=primary))
            for layer in model.modules() if again else ():
                assert quantize_again(layer), "this version of the library can"
            losses = train(model, fully_shard_optimizer(adamw(model.parameters())), range(3), rank, world)
            found.append((losses, main_weights(model)))
            if primary:
                rounded_alike(what_forward_reads(model), main_weights(model), build(5, recipe_of(name)))
        for losses, weights in found[1:]:
            assert losses == found[0][0], name
            same(weights, found[0][1], name)


def rounded_alike(seen: dict[str, tuple[list[Tensor], Any]], main: dict[str, Tensor], whole: Net) -> None:
    """What was gathered is what a layer makes of the same weight in bfloat16."""
    for path, ((data, scale), _) in seen.items():
        quantizer = whole.get_submodule(path).weight._quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
        ours, theirs = (data, scale), raw_of(quantizer(main[f"{path}.weight"].to(torch.bfloat16)))
        assert torch.equal(ours[0], theirs[0]), path
        blocks = data.shape[-1] // 128 if scale.dim() == 2 else None  # the others of a row of scales are padding
        assert torch.equal(ours[1][..., :blocks], theirs[1][..., :blocks]), path


def half_the_bytes_and_one_maximum(rank: int, world: int) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for name, sharding in product(RECIPES, STRATEGIES[1:]):
        FP8GlobalStateManager.reset()  # it remembers all models with delayed scaling, and agrees on their numbers after any forward
        seen = {}
        for primary in (True, False):
            model = shard(build(0, recipe_of(name), primary=primary), sharding=sharding)
            optimizer = fully_shard_optimizer(adamw(model.parameters()))
            train(model, optimizer, range(1), rank, world)
            with watched() as seen[primary]:
                train(model, optimizer, range(1, 2), rank, world)
        small, usual = seen[True], seen[False]
        whole = usual["gathered torch.bfloat16"] - small["gathered torch.bfloat16"]  # the root's scale is in both
        assert 2 * small["gathered torch.uint8"] == whole > 0, (name, sharding)
        if name != "delayed":  # agrees on activations' largest numbers as well
            assert small["maxima"] == 1, (name, sharding, small["maxima"])


def transposes_go_unless_kept(rank: int, world: int) -> None:
    for name, keep in product(RECIPES, (False, True)):
        model = shard(build(0, recipe_of(name)), keep=keep)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(2), rank, world)
        loss_of(model, 7, rank, world).backward()
        groups = [group for unit in context_of(model).units for group in unit.groups if group.spec.codec is not None]
        assert len(groups) == 3
        for group in groups:
            assert group.weights.client.size_bytes == 4 * DIM * DIM
            assert group.weights.extra_bytes == 4 * DIM * DIM // world
            for entry in group.entries:
                kept = getattr(entry.full, "_transpose", None) is not None
                kept = kept or getattr(entry.full, "_columnwise_data", None) is not None
                assert kept is keep, (name, keep)


def recomputation_changes_nothing(rank: int, world: int) -> None:
    for name in RECIPES[1:]:
        found = []
        for recompute in (False, True):
            model = shard(build(0, recipe_of(name)))
            model.recompute = recompute
            train(model, fully_shard_optimizer(adamw(model.parameters())), range(3), rank, world)
            found.append(main_weights(model))
        same(found[1], found[0], name)


def resumes_bit_equal(rank: int, world: int) -> None:
    for name in RECIPES[1:]:
        recipe = recipe_of(name)
        model = shard(build(0, recipe))
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(2), rank, world)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(weights_in(model), checkpoint_id=folder[0])
        kept = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(2, 4), rank, world)
        other = shard(build(9, recipe))
        state = weights_in(other)
        dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state, strict=False)
        resumed = fully_shard_optimizer(adamw(other.parameters()))
        resumed.load_state_dict(kept)
        train(other, resumed, range(2, 4), rank, world)
        same(main_weights(other), main_weights(model), name)


def weights_in(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}


def fused_gradients_are_near_and_less_rounded(rank: int, world: int) -> None:
    for name, main in product(RECIPES, (torch.float32, torch.bfloat16)):
        found = []
        for fused in (False, True):
            policy = MixedPrecisionPolicy(weight_codecs=weight_codecs(), grad_comm_dtype=main)
            model = build(0, recipe_of(name), fused=fused)
            for unit in (*model.blocks, model):
                fully_shard(unit, policy=policy)
            assert len(fuse_weight_gradients(model)) == 6 * fused
            for micro, waits in enumerate((True, True, False)):
                with no_sync(model) if waits else nullcontext():
                    loss_of(model, micro, rank, world).backward()
                full = [
                    entry.full for unit in context_of(model).units for group in unit.groups for entry in group.entries
                ]
                assert not any("main_grad" in vars(weight) for weight in full), "a gradient would stay alive"
            found.append([view.grad.clone() for view in sharded_parameters(model) if view.grad is not None])
        for usual, direct in zip(*found, strict=True):
            assert (usual - direct).norm() <= 0.01 * usual.norm(), (name, main)


def a_weight_without_its_first_value_is_refused(rank: int, world: int) -> None:
    import transformer_engine.pytorch as te

    with te.quantized_model_init(recipe=recipe_of("current")):
        layer = te.Linear(DIM, DIM, params_dtype=torch.bfloat16)
    with pytest.raises(ShardingError, match=r"cannot be sharded as it is stored: its value before quantization"):
        fully_shard(layer, policy=MixedPrecisionPolicy(weight_codecs=weight_codecs()))


def values_written_after_building_are_refused_and_rounded_ones_are_not(rank: int, world: int) -> None:
    import transformer_engine.pytorch as te

    policy = MixedPrecisionPolicy(weight_codecs=weight_codecs())
    for name, dtype, std in product(RECIPES, (torch.bfloat16, torch.float32), (1e-7, 0.02, 300.0)):
        options = {"params_dtype": dtype, "init_method": partial(nn.init.normal_, std=std)}
        with te.quantized_model_init(recipe=recipe_of(name), preserve_high_precision_init_val=True):
            layers = [te.Linear(DIM, 2 * DIM, **options) for _ in range(2)]
        fully_shard(layers[0], policy=policy)
        with torch.no_grad():
            layers[1].weight.copy_(torch.full_like(layers[1].weight.dequantize(), 0.5))
        with pytest.raises(ShardingError, match="other values were written into it after it was built"):
            fully_shard(layers[1], policy=policy)


ON_ONE = (
    one_rank_is_bit_equal,
    numbers_are_those_of_16_bit_weights,
    shared_modules_write_twice,
    a_weight_without_its_first_value_is_refused,
    values_written_after_building_are_refused_and_rounded_ones_are_not,
)
ON_TWO = (
    bytes_are_those_of_the_whole_weight,
    ranks_train_as_one_process_does,
    numbers_are_those_of_16_bit_weights,
    half_the_bytes_and_one_maximum,
    transposes_go_unless_kept,
    recomputation_changes_nothing,
    resumes_bit_equal,
    fused_gradients_are_near_and_less_rounded,
)


@cache
def outcomes(world: int) -> dict[str, str]:
    return run_cases({case.__name__: case for case in (ON_ONE, ON_TWO)[world - 1]}, world, backend="nccl")


@pytest.mark.gpu
@needs_engine
@pytest.mark.parametrize("case", [case.__name__ for case in ON_ONE])
def test_one_rank_equals_transformer_engine_alone(case: str) -> None:
    assert not outcomes(1)[case], outcomes(1)[case]


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_engine
@needs_gpus(2)
@pytest.mark.parametrize("case", [case.__name__ for case in ON_TWO])
def test_fp8_weights_on_two_gpus(case: str) -> None:
    assert not outcomes(2)[case], outcomes(2)[case]
