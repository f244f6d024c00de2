"""Other engines on the same work, each set up as its own documentation advises. Imported only when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.benchmark.engines import Engine, Options, adamw, build, compile_blocks
from examples.decoder import Block

__all__ = ["PEERS", "fsdp2_of", "megatron_v1_of"]


def plain(options: Options, device: torch.device) -> Engine:
    """PyTorch as it is, under autocast: what one GPU does without any engine."""
    model = build(options, device)
    compile_blocks(model, options)

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(ids)

    return Engine(forward=forward, step=_stepper(model, options))


def ddp(options: Options, device: torch.device) -> Engine:
    """DistributedDataParallel under autocast."""
    model = build(options, device)
    compile_blocks(model, options)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return wrapped(ids)

    return Engine(forward=forward, step=_stepper(model, options), no_sync=wrapped.no_sync)


def fsdp2(
    options: Options,
    device: torch.device,
    *,
    tuned: bool = False,
    symmetric: bool = False,
    blocks_per_unit: int = 1,
    offload: bool = False,
    always_synced: bool = False,
) -> Engine:
    """Torch's `fully_shard`.

    Args:
        options: Size and dtypes.
        device: This rank's.
        tuned: Embedding and head as units of their own, explicit prefetch two deep.
        symmetric: Gathers and reductions on symmetric memory.
        blocks_per_unit: So many blocks as one unit.
        offload: Parameters, gradients and state in pinned host memory; the CPU runs the same fused optimizer.
        always_synced: Each microbatch's gradients are reduced, so that they accumulate sharded.
    """
    model = build(options, device)
    compile_blocks(model, options)
    engine = fsdp2_of(
        model, options, tuned=tuned, symmetric=symmetric, blocks_per_unit=blocks_per_unit, offload=offload
    )
    return replace(engine, no_sync=nullcontext) if always_synced else engine


def fsdp2_of(
    model: Any,
    options: Options,
    *,
    tuned: bool = False,
    symmetric: bool = False,
    blocks_per_unit: int = 1,
    offload: bool = False,
) -> Engine:
    """A model with an embedding, blocks and a head, sharded by torch's `fully_shard`."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=options.reduce_dtype)
    where = CPUOffloadPolicy(pin_memory=True) if offload else OffloadPolicy()
    if offload:  # the optimizer runs on the CPU, and torchrun leaves each process one thread
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    blocks = list(model.blocks)
    for start in range(0, len(blocks), blocks_per_unit):
        members = blocks[start : start + blocks_per_unit]
        fully_shard(members if len(members) > 1 else members[0], mp_policy=policy, offload_policy=where)
    if tuned:
        fully_shard(model.embedding, mp_policy=policy, offload_policy=where)
        fully_shard(model.head, mp_policy=policy, offload_policy=where)
    fully_shard(model, mp_policy=policy, offload_policy=where)
    if tuned:
        heads = blocks[::blocks_per_unit]
        for index, head in enumerate(heads):
            head.set_modules_to_forward_prefetch(heads[index + 1 : index + 3])
            head.set_modules_to_backward_prefetch(heads[max(0, index - 2) : index][::-1])
    if symmetric:
        model.set_force_sum_reduction_for_comms(True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()

    @contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return Engine(forward=model, step=_stepper(model, options), no_sync=no_sync)


def megatron_v1(options: Options, device: torch.device) -> Engine:
    """megatron-fsdp 0.6, its documented `fully_shard`; compiled blocks are not supported by it."""
    return megatron_v1_of(build(options, device, torch.bfloat16), options, [Block])


def megatron_v1_of(model: nn.Module, options: Options, unit_classes: list[type[nn.Module]]) -> Engine:
    """A bf16 model, sharded by megatron-fsdp's `fully_shard`."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=options.reduce_dtype
    )
    wrapped, optimizer = fully_shard(
        model,
        adamw(model.parameters(), options),
        fsdp_unit_modules=unit_classes,
        zero_dp_strategy=3,
        mixed_precision_policy=policy,
        sync_model_each_microbatch=True,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(forward=wrapped, step=step)


def megatron_v2(options: Options, device: torch.device) -> Engine:
    """megatron-fsdp 0.6, its experimental second version; reduces in the dtype of the gradients, bf16."""
    from megatron_fsdp import MixedPrecisionPolicy
    from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer

    model = build(options, device, torch.bfloat16)
    compile_blocks(model, options)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    placements = Placements(dp_axes=["dp"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, placements=placements, mixed_precision_policy=policy)
    optimizer = adamw(model.parameters(), options)
    fully_shard_optimizer(optimizer)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(forward=model, step=step)


def deepspeed_zero3(options: Options, device: torch.device) -> Engine:
    """DeepSpeed ZeRO-3 with bf16 and torch's fused AdamW."""
    import deepspeed

    model = build(options, device, torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": options.clip,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e5,
        },
        "communication_data_type": "fp32" if options.reduce_dtype is torch.float32 else "bf16",
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters(), options), config=config)
    return Engine(forward=engine, step=engine.step, backward=engine.backward)


PEERS: dict[str, Callable[[Options, torch.device], Engine]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-tuned": partial(fsdp2, tuned=True),
    "fsdp2-tuned-joined": partial(fsdp2, tuned=True, blocks_per_unit=3),
    "fsdp2-tuned-symm": partial(fsdp2, tuned=True, symmetric=True),
    "fsdp2-tuned-sharded": partial(fsdp2, tuned=True, always_synced=True),
    "fsdp2-offload": partial(fsdp2, tuned=True, offload=True),
    "megatron-v1": megatron_v1,
    "megatron-v2": megatron_v2,
    "deepspeed": deepspeed_zero3,
}


def _stepper(model: nn.Module, options: Options) -> Callable[[], None]:
    optimizer = adamw(model.parameters(), options)

    def step() -> None:
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
