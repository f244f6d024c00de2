"""Optimizers that are not elementwise, for sharded parameters: they gather rows themselves."""

from lightning_mfsdp.optim.muon import Muon

__all__ = ["Muon"]
