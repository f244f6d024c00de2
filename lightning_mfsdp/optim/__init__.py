"""Optimizers that are not elementwise, for sharded parameters: they bring rows together themselves."""

from lightning_mfsdp.optim.muon import Muon

__all__ = ["Muon"]
