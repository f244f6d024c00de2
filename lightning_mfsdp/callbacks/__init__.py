"""Callbacks that watch or adjust training."""

from lightning_mfsdp.callbacks.ema import ShardedEMA
from lightning_mfsdp.callbacks.finetuning import ShardedBackboneFinetuning, ShardedFinetuning
from lightning_mfsdp.callbacks.memory_report import MemoryReport
from lightning_mfsdp.callbacks.model_summary import ShardedModelSummary
from lightning_mfsdp.callbacks.nan_gradients import NaNGradientReporter, NonFiniteGradientError
from lightning_mfsdp.callbacks.norm_monitor import NormMonitor
from lightning_mfsdp.callbacks.paged_stash import PagedStash
from lightning_mfsdp.callbacks.recompute import ActivationRecompute
from lightning_mfsdp.callbacks.step_profile import StepProfile
from lightning_mfsdp.callbacks.throughput import ShardedThroughputMonitor

__all__ = [
    "ActivationRecompute",
    "MemoryReport",
    "NaNGradientReporter",
    "NonFiniteGradientError",
    "NormMonitor",
    "PagedStash",
    "ShardedBackboneFinetuning",
    "ShardedEMA",
    "ShardedFinetuning",
    "ShardedModelSummary",
    "ShardedThroughputMonitor",
    "StepProfile",
]
