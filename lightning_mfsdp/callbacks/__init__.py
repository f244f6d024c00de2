"""What watches or adjusts training from outside."""

from lightning_mfsdp.callbacks.model_summary import ShardedModelSummary
from lightning_mfsdp.callbacks.nan_gradients import NaNGradientReporter, NonFiniteGradientError
from lightning_mfsdp.callbacks.throughput import ShardedThroughputMonitor

__all__ = ["NaNGradientReporter", "NonFiniteGradientError", "ShardedModelSummary", "ShardedThroughputMonitor"]
