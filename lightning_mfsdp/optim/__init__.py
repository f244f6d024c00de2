"""Optimizers for sharded parameters: Muon gathers the rows that it needs, AdamW keeps its state in bfloat16."""

from lightning_mfsdp.optim.adamw import AdamW
from lightning_mfsdp.optim.muon import Muon

__all__ = ["AdamW", "Muon"]
