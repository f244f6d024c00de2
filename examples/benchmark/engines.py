"""The engines a benchmark compares, each as (forward, step): same decoder, bf16 compute, float32 main weights, fused AdamW.

`limit` communicates nothing: forward and backward of the whole bf16 model and 1/N of the optimizer's work. No engine can be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.decoder import PRESETS, Decoder


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine is run with.

    Attributes:
        size: Name of a decoder preset.
        compiled: `torch.compile` each block.
        reduce_dtype: Gradients on the wire.
        clip: Largest gradient norm, or 0 for no clipping.
        seed: Of the initial weights.
    """

    size: str
    compiled: bool = False
    reduce_dtype: torch.dtype = torch.float32
    clip: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model ready to train: `forward(ids) -> logits` and `step()`, which also clips and clears gradients."""

    forward: Callable[[Tensor], Tensor]
    step: Callable[[], None]


def build(options: Options, device: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with the same numbers in every engine."""
    torch.manual_seed(options.seed)
    with torch.device(device):
        model = Decoder(PRESETS[options.size])
    return model.to(dtype)


def adamw(parameters: object) -> torch.optim.AdamW:
    """The optimizer of every engine."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)  # type: ignore[arg-type]


def limit(options: Options, device: torch.device) -> Engine:
    """No communication at all."""
    model = build(options, device, torch.bfloat16)
    _compile_modules(model, options)
    total = sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    shard = torch.zeros(total, device=device, requires_grad=True)
    compute = torch.zeros(total, device=device, dtype=torch.bfloat16)
    shard.grad = torch.zeros_like(shard)
    optimizer = adamw([shard])

    def step() -> None:
        optimizer.step()
        compute.copy_(shard.detach())
        for parameter in model.parameters():
            parameter.grad = None

    return Engine(forward=model, step=step)


def ddp(options: Options, device: torch.device) -> Engine:
    """DistributedDataParallel under autocast."""
    model = build(options, device)
    _compile_modules(model, options)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return wrapped(ids)

    return Engine(forward=forward, step=_stepper(model, adamw(model.parameters()), options))


def fsdp2(options: Options, device: torch.device, *, tuned: bool = False) -> Engine:
    """Torch's `fully_shard`. Tuned: embedding and head as units of their own, explicit prefetch two deep."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(options, device)
    _compile_modules(model, options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=options.reduce_dtype)
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    if tuned:
        fully_shard(model.embedding, mp_policy=policy)
        fully_shard(model.head, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if tuned:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    return Engine(forward=model, step=_stepper(model, adamw(model.parameters()), options))


def fsdp2_tuned(options: Options, device: torch.device) -> Engine:
    """FSDP2 as its experts run it."""
    return fsdp2(options, device, tuned=True)


def mfsdp(options: Options, device: torch.device, *, sharding: str = "optim_grads_params") -> Engine:
    """This package."""
    from lightning_mfsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer

    model = build(options, device)
    if options.compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=options.reduce_dtype)
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, policy=policy, sharding=sharding)
    optimizer = fully_shard_optimizer(adamw(model.parameters()))

    def step() -> None:
        if options.clip:
            clip_grad_norm_(model, options.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Engine(forward=model, step=step)


def mfsdp_zero2(options: Options, device: torch.device) -> Engine:
    """This package with whole weights."""
    return mfsdp(options, device, sharding="optim_grads")


ENGINES: dict[str, Callable[[Options, torch.device], Engine]] = {
    "limit": limit,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-tuned": fsdp2_tuned,
    "mfsdp": mfsdp,
    "mfsdp-zero2": mfsdp_zero2,
}


def _compile_modules(model: Decoder, options: Options) -> None:
    if options.compiled:
        for block in model.blocks:
            block.compile()


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Callable[[], None]:
    def step() -> None:
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
