"""Activation recompute: which activations are computed again in backward instead of being kept."""

from lightning_mfsdp.recompute.apply import apply_recompute, recomputed, remove_recompute
from lightning_mfsdp.recompute.config import Recompute, as_recompute

__all__ = ["Recompute", "apply_recompute", "as_recompute", "recomputed", "remove_recompute"]
