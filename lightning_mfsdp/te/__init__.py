"""FP8 by Transformer Engine: the only folder that uses the library, which it loads when a run needs it."""

from lightning_mfsdp.te.checks import refuse_prepared
from lightning_mfsdp.te.codec import weight_codecs
from lightning_mfsdp.te.compute import Fp8Compute
from lightning_mfsdp.te.library import (
    autocast_snapshot,
    checkpoint,
    has_engine_modules,
    keep_scales_in_backward,
    quantizes_now,
    scales_are_delayed,
)
from lightning_mfsdp.te.options import Fp8Options
from lightning_mfsdp.te.recipes import enter_around
from lightning_mfsdp.te.weight_gradients import fuse_weight_gradients

__all__ = [
    "Fp8Compute",
    "Fp8Options",
    "autocast_snapshot",
    "checkpoint",
    "enter_around",
    "fuse_weight_gradients",
    "has_engine_modules",
    "keep_scales_in_backward",
    "quantizes_now",
    "refuse_prepared",
    "scales_are_delayed",
    "weight_codecs",
]
