"""Where `MixedPrecisionPolicy` was: checkpoints of modules that have one among their hyperparameters name this file."""

from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy"]
