"""Engines on the decoder of te_decoder.py, in bfloat16 and in FP8. Transformer Engine is imported when one of them is asked for.

Everywhere the same modules, the same recipe (`--recipe`), float32 main weights that start from the same bfloat16 numbers, and fused AdamW.

    limit-te, limit-te-fp8     no communication, 1/N of the optimizer's work
    mfsdp-te-bf16              this package, bfloat16 products
    mfsdp-te-fp8               FP8 products of bfloat16 weights, which are gathered in 2 bytes
    mfsdp-te-fp8-weights       FP8 weights, gathered in 1 byte
    ...-fused                  modules write gradients of weights themselves
    ...-symm                   gathers on symmetric memory
    ...-keep                   transposes of FP8 weights, or 8-bit copies of bfloat16 ones, are kept
    fsdp2-te-..., megatron-te-...  the peers
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmark.engines import Engine, Options, limit_of, sharded_by_mfsdp
from examples.benchmark.peers import fsdp2_of, megatron_v1_of
from examples.benchmark.te_decoder import TeBlock, TeDecoder

__all__ = ["TE_ENGINES", "decoder", "mfsdp_te"]


def _te() -> Any:
    import transformer_engine.pytorch as te

    return te


def _recipe(options: Options) -> Any:
    from lightning_mfsdp.te import Fp8Compute, Fp8Options

    return Fp8Compute(Fp8Options(recipe=options.recipe)).recipe


def decoder(
    te: Any, options: Options, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, fused: bool = False
) -> TeDecoder:
    """The model with the same numbers in every engine.

    Raises:
        SystemExit: Compiled blocks were asked for.
    """
    if options.compiled:
        raise SystemExit("Error: modules of Transformer Engine are measured as they are, without --compile")
    torch.manual_seed(options.seed)
    model = TeDecoder(te, options.config, device, fused=fused)
    return model if dtype is torch.bfloat16 else model.to(dtype)


def _computing(
    te: Any, options: Options, *, fp8: bool, group: dist.ProcessGroup | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a forward."""
    if not fp8:
        return nullcontext
    recipe = _recipe(options)
    return lambda: te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)


def _inside(context: Callable[[], AbstractContextManager[Any]], model: Any) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        with context():
            return model(ids)

    return forward


def limit_te(options: Options, device: torch.device, *, fp8: bool = False) -> Engine:
    """No communication at all."""
    te = _te()
    model = decoder(te, options, device)
    return limit_of(model, _inside(_computing(te, options, fp8=fp8), model), device, options)


def mfsdp_te(
    options: Options,
    device: torch.device,
    *,
    fp8: bool = False,
    weights: bool = False,
    fused: bool = False,
    symmetric: bool = False,
    keep: bool = False,
    keep_sharded: bool = False,
    te: Any = None,
) -> Engine:
    """This package.

    Args:
        options: Size and dtypes.
        device: This rank's.
        fp8: Products in FP8.
        weights: FP8 weights.
        fused: Modules write gradients of their weights themselves.
        symmetric: Gathers on symmetric memory.
        keep: Transposes of FP8 weights stay until these change; 8-bit copies of bfloat16 weights stay until the backward.
        keep_sharded: Each microbatch's gradients are reduced, so that they accumulate sharded.
        te: `transformer_engine.pytorch`.
    """
    from lightning_mfsdp import MixedPrecisionPolicy
    from lightning_mfsdp.te import Fp8Compute, Fp8Options, fuse_weight_gradients

    te = te or _te()
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=options.reduce_dtype)
    if not fp8:
        model = decoder(te, options, device, fused=fused)
        engine = sharded_by_mfsdp(model, options, policy, symmetric=symmetric, keep_sharded=keep_sharded)
        fuse_weight_gradients(model)
        return engine
    compute = Fp8Compute(
        Fp8Options(
            recipe=options.recipe,
            fp8_weights=weights,
            keep_transpose_cache=keep and weights,
            keep_quantized=keep and not weights,
        )
    )
    with compute.building():
        model = decoder(te, options, device, fused=fused)
    compute.prepare(model, dist.group.WORLD)
    engine = sharded_by_mfsdp(model, options, compute.policy(policy), symmetric=symmetric, keep_sharded=keep_sharded)
    fuse_weight_gradients(model)

    def backward(loss: Tensor) -> None:
        with compute.backward():
            loss.backward()

    return Engine(forward=_inside(compute.forward, model), step=engine.step, backward=backward, no_sync=engine.no_sync)


def fsdp2_te(options: Options, device: torch.device, *, fp8: bool) -> Engine:
    """Torch's `fully_shard`, embedding and head as units of their own, explicit prefetch; float32 parameters, gathered in bfloat16."""
    te = _te()
    model = decoder(te, options, device, dtype=torch.float32)
    engine = fsdp2_of(model, options, tuned=True)
    context = _computing(te, options, fp8=fp8, group=dist.group.WORLD)
    return Engine(forward=_inside(context, engine.forward), step=engine.step, no_sync=engine.no_sync)


def megatron_te(options: Options, device: torch.device, *, fp8: bool, weights: bool = False) -> Engine:
    """megatron-fsdp, its documented `fully_shard`; with `weights`, on a model that was built with FP8 weights."""
    te = _te()
    initial = (
        te.quantized_model_init(enabled=True, recipe=_recipe(options), preserve_high_precision_init_val=True)
        if weights
        else nullcontext()
    )
    with initial:
        model = decoder(te, options, device)
    engine = megatron_v1_of(model, options, [TeBlock])
    context = _computing(te, options, fp8=fp8, group=dist.group.WORLD)
    return Engine(forward=_inside(context, engine.forward), step=engine.step)


TE_ENGINES: dict[str, Callable[[Options, torch.device], Engine]] = {
    "limit-te": limit_te,
    "limit-te-fp8": partial(limit_te, fp8=True),
    "mfsdp-te-bf16": mfsdp_te,
    "mfsdp-te-bf16-fused": partial(mfsdp_te, fused=True),
    "mfsdp-te-bf16-symm": partial(mfsdp_te, symmetric=True),
    "mfsdp-te-fp8": partial(mfsdp_te, fp8=True),
    "mfsdp-te-fp8-keep": partial(mfsdp_te, fp8=True, keep=True),
    "mfsdp-te-fp8-symm": partial(mfsdp_te, fp8=True, symmetric=True),
    "mfsdp-te-fp8-weights": partial(mfsdp_te, fp8=True, weights=True),
    "mfsdp-te-fp8-weights-keep": partial(mfsdp_te, fp8=True, weights=True, keep=True),
    "mfsdp-te-fp8-weights-fused": partial(mfsdp_te, fp8=True, weights=True, fused=True),
    "mfsdp-te-fp8-weights-fused-symm": partial(mfsdp_te, fp8=True, weights=True, fused=True, symmetric=True),
    "mfsdp-te-fp8-weights-fused-symm-sharded": partial(
        mfsdp_te, fp8=True, weights=True, fused=True, symmetric=True, keep_sharded=True
    ),
    "fsdp2-te-bf16": partial(fsdp2_te, fp8=False),
    "fsdp2-te-fp8": partial(fsdp2_te, fp8=True),
    "megatron-te-bf16": partial(megatron_te, fp8=False),
    "megatron-te-fp8": partial(megatron_te, fp8=True),
    "megatron-te-fp8-weights": partial(megatron_te, fp8=True, weights=True),
}
