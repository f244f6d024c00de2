"""What a benchmark compares: the limit and this package. The peers are in peers.py.

Everywhere the same decoder, bf16 compute, float32 main weights, fused AdamW.

`limit` communicates nothing: forward and backward of the whole bf16 model and 1/N of the optimizer's work. No engine can be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.decoder import PRESETS, Decoder, DecoderConfig

if TYPE_CHECKING:
    from lightning_mfsdp import MixedPrecisionPolicy


MICROBATCH = {"tiny": 2, "300m": 4, "1b": 2, "8b": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine is run with.

    Attributes:
        size: Name of a decoder preset.
        layers: Number of blocks; 0: the preset's.
        seq: Tokens in a row; 0: the preset's.
        rows: Rows of a microbatch; 0: as many as the size has in `MICROBATCH`.
        compiled: `torch.compile` each block.
        reduce_dtype: Gradients on the wire.
        clip: Largest gradient norm, or 0 for no clipping.
        seed: Of the initial weights.
        recipe: Of FP8, in the engines that compute in it.
        state_dtype: Of AdamW's moments.
        float8: What computes the linear layers of blocks in FP8: "own" (lightning_mfsdp.float8), or torchao by a recipe's name.
            Empty: they compute in bf16.
    """

    size: str
    layers: int = 0
    seq: int = 0
    rows: int = 0
    compiled: bool = False
    reduce_dtype: torch.dtype = torch.float32
    clip: float = 0.0
    seed: int = 0
    recipe: str = "current"
    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    float8: str = ""

    @property
    def config(self) -> DecoderConfig:
        """The sizes of the model."""
        preset = PRESETS[self.size]
        return replace(preset, layers=self.layers or preset.layers, seq=self.seq or preset.seq)

    @property
    def microbatch(self) -> int:
        """How many rows it has."""
        return self.rows or MICROBATCH[self.size]


def _backward(loss: Tensor) -> None:
    loss.backward()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model ready to train.

    Attributes:
        forward: Token ids `[B, S]` to logits `[B, S, V]`.
        step: Clips, updates and clears gradients.
        backward: Of a loss.
        no_sync: Context in which a backward need not communicate gradients.
        capture: Makes a whole step a CUDA graph; `None`: the engine cannot.
    """

    forward: Callable[[Tensor], Tensor]
    step: Callable[[], None]
    backward: Callable[[Tensor], None] = _backward
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    capture: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]] | None = None


def build(options: Options, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with the same numbers in every engine."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        model = Decoder(options.config)
    model = model.to(dtype)
    if options.float8 == "own":
        from lightning_mfsdp.float8 import replace_linear_layers

        replace_linear_layers(model.blocks)
    elif options.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(options.float8)
        convert_to_float8_training(model.blocks, config=config)
    return model


def adamw(parameters: Any, options: Options | None = None) -> torch.optim.Optimizer:
    """The optimizer of every engine; without warm-up a higher rate makes the 8B model's losses chaotic, which compares nothing."""
    if options is not None and options.state_dtype != "float32":
        from lightning_mfsdp.optim import AdamW

        lean = {"store_param_remainders": True, "use_decoupled_grad": True}  # of weights in bfloat16
        return AdamW(parameters, lr=1e-5, weight_decay=0.1, state_dtype=options.state_dtype, **lean)
    return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.1, fused=True)


def compile_blocks(model: Decoder, options: Options) -> None:
    """`torch.compile` each block, if asked for."""
    if options.compiled:
        for block in model.blocks:
            block.compile()


def limit(options: Options, device: torch.device) -> Engine:
    """No communication at all."""
    model = build(options, device, torch.bfloat16)
    compile_blocks(model, options)
    return limit_of(model, model, device, options)


def limit_of(model: nn.Module, forward: Callable[[Tensor], Tensor], device: torch.device, options: Options) -> Engine:
    """The limit for a bf16 model."""
    total = sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    shard = torch.zeros(total, device=device, requires_grad=True)
    compute = torch.zeros(total, device=device, dtype=torch.bfloat16)
    shard.grad = torch.zeros_like(shard)
    optimizer = adamw([shard], options)

    def step() -> None:
        optimizer.step()
        compute.copy_(shard.detach())
        for parameter in model.parameters():
            parameter.grad = None

    return Engine(forward=forward, step=step)


def mfsdp(
    options: Options,
    device: torch.device,
    *,
    sharding: str = "optim_grads_params",
    symmetric: bool = False,
    reshard: bool | Literal["auto"] = True,
    joined: bool = True,
    direct: bool | Literal["auto"] = "auto",
    offload: Literal["optimizer"] | None = None,
    keep_sharded: bool = False,
) -> Engine:
    """This package, with small blocks joined as the strategy joins them.

    Args:
        options: Size and dtypes.
        device: This rank's.
        sharding: The strategy.
        symmetric: Gathers on symmetric memory.
        reshard: `reshard_after_forward`; "auto" spends idle memory on skipped gathers.
        joined: Small blocks share a unit; only the 300m preset has some.
        direct: Linear layers write weight gradients into the buckets.
        offload: Main weights and optimizer state rest in host memory.
        keep_sharded: Each microbatch's gradients are reduced, so that they accumulate sharded.
    """
    from lightning_mfsdp import MixedPrecisionPolicy

    model = build(options, device)
    if options.compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    policy = MixedPrecisionPolicy(
        compute_dtype=torch.bfloat16, grad_comm_dtype=options.reduce_dtype, direct_weight_gradients=direct
    )
    return sharded_by_mfsdp(
        model,
        options,
        policy,
        joined=joined,
        sharding=sharding,
        symmetric=symmetric,
        reshard=reshard,
        offload=offload,
        keep_sharded=keep_sharded,
    )


def sharded_by_mfsdp(
    model: Any,
    options: Options,
    policy: MixedPrecisionPolicy,
    *,
    joined: bool = True,
    symmetric: bool = False,
    reshard: bool | Literal["auto"] = True,
    keep_sharded: bool = False,
    **more: Any,
) -> Engine:
    """A model with an embedding, blocks and a head, sharded by this package; `more` is for `fully_shard`."""
    from lightning_mfsdp import capture_step, clip_grad_norm_, fully_shard, fully_shard_optimizer, no_sync
    from lightning_mfsdp.options.unit_selection import join_blocks

    blocks = join_blocks(model, list(model.blocks), "auto" if joined else 1)
    for unit in (model.embedding, *blocks, model.head, model):
        fully_shard(unit, policy=policy, symmetric_memory=symmetric, reshard_after_forward=reshard, **more)
    optimizer = fully_shard_optimizer(adamw(model.parameters(), options))

    def step() -> None:
        if options.clip:
            clip_grad_norm_(model, options.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Engine(
        forward=model,
        step=step,
        no_sync=lambda: no_sync(model, keep_sharded=keep_sharded),
        capture=lambda whole: capture_step(whole, model, optimizer),
    )


ENGINES: dict[str, Callable[[Options, torch.device], Engine]] = {
    "limit": limit,
    "mfsdp": mfsdp,
    "mfsdp-single": partial(mfsdp, joined=False),
    "mfsdp-symm": partial(mfsdp, symmetric=True),
    "mfsdp-symm-usual": partial(mfsdp, symmetric=True, direct=False),
    "mfsdp-symm-auto": partial(mfsdp, symmetric=True, reshard="auto"),
    "mfsdp-symm-auto-sharded": partial(mfsdp, symmetric=True, reshard="auto", keep_sharded=True),
    "mfsdp-offload": partial(mfsdp, offload="optimizer"),
    "mfsdp-zero2": partial(mfsdp, sharding="optim_grads"),
}
