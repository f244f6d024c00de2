"""held_memory: what the engine itself has of a rank's memory for a sharded module: weights, gradients and full-size buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_mfsdp.engine.core.inspect import context_of, units_in

__all__ = ["HeldMemory", "held_memory"]


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """This rank's memory at one moment, in bytes. Padding is included.

    Attributes:
        main: Main weights on the device, by dtype.
        host: Main weights in host memory (`offload="optimizer"`).
        compute: Compute weights that stay in memory in addition to main weights, by dtype.
        gathered: Memory for unsharded weights, in use or reserved for them.
        gradients: Reduced gradients.
        buckets: Gradients that are being reduced, or wait whole for a later microbatch.
    """

    main: Mapping[torch.dtype, int]
    host: int
    compute: Mapping[torch.dtype, int]
    gathered: int
    gradients: int
    buckets: int

    @property
    def on_device(self) -> int:
        """All but `host`."""
        return sum(self.main.values()) + sum(self.compute.values()) + self.gathered + self.gradients + self.buckets


def held_memory(module: nn.Module) -> HeldMemory:
    """What this rank holds for a sharded module now. No communication, and nothing waits for the device.

    Raises:
        ShardingError: Nothing in it is sharded, or its parts belong to several roots.
    """
    context = context_of(module)
    main, compute = Counter[torch.dtype](), Counter[torch.dtype]()
    host = gradients = buckets = 0
    for unit in units_in(module):
        for group in unit.groups:
            if group.host_buffer is not None:
                host += group.main.size_bytes
            else:
                main[group.spec.main_dtype] += group.main.size_bytes
            compute[group.spec.storage_dtype] += group.weights.extra_bytes
            gradients += group.gradients.allocated_bytes - group.gradients.bucket_bytes
            buckets += group.gradients.bucket_bytes
    return HeldMemory(
        main=+main,
        host=host,
        compute=+compute,
        gathered=context.lane.pool.allocated_bytes,
        gradients=gradients,
        buckets=buckets,
    )
