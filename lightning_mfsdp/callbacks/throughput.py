"""ShardedThroughputMonitor: Lightning's throughput, measured against the peak of the dtype that this run computes in."""

from __future__ import annotations

import torch

from lightning_mfsdp._lightning_api import LightningModule, ThroughputMonitor, Trainer, get_available_flops
from lightning_mfsdp.trainer.precision import MFSDPPrecision

__all__ = ["ShardedThroughputMonitor"]


class ShardedThroughputMonitor(ThroughputMonitor):
    """Lightning's `ThroughputMonitor`, whose utilization (`device/mfu`) is right under `MFSDPStrategy`.

    Lightning's knows only its own precision plugins and assumes float32 for others, whose peak is lower than bfloat16's. Arguments and
    metrics are Lightning's; under other strategies it is the same. With a context axis, batches are counted once for the ranks that divide
    them; `device/flops_per_sec` is that of these ranks together.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the peak of the device for the dtype of matrix products."""
        super().setup(trainer, pl_module, stage)
        precision = trainer.precision_plugin
        if isinstance(precision, MFSDPPrecision):
            # FP8 has the peak of 8-bit integers, the only 8-bit entry of Lightning's table.
            dtype = precision.compute_dtype if precision.fp8 is None else torch.int8
            self.available_flops = get_available_flops(trainer.strategy.root_device, dtype)
            place = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
            divided_by = trainer.world_size // place["num_replicas"]  # ranks that compute one batch together
            for throughput in self._throughputs.values():
                throughput.world_size = place["num_replicas"]
                throughput.available_flops = self.available_flops and self.available_flops * divided_by
