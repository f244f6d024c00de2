"""Mixtures of experts: torch and the engine only."""

from lightning_mfsdp.moe.experts import Dispatcher, GroupedExperts
from lightning_mfsdp.moe.router import LoadStatistics, Routes, TopKRouter
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver

__all__ = [
    "ActivationSaver",
    "Dispatcher",
    "GroupedExperts",
    "LoadStatistics",
    "OrdinarySaver",
    "Routes",
    "TopKRouter",
]
