"""Mixtures of experts: torch and the engine only."""

from lightning_mfsdp.moe.experts import Dispatcher, GroupedExperts
from lightning_mfsdp.moe.parallel import AllGatherDispatcher, AllToAllDispatcher, expert_parallel, take_over_budget
from lightning_mfsdp.moe.router import LoadStatistics, Routes, TopKRouter
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver

__all__ = [
    "ActivationSaver",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Dispatcher",
    "GroupedExperts",
    "LoadStatistics",
    "OrdinarySaver",
    "Routes",
    "TopKRouter",
    "expert_parallel",
    "take_over_budget",
]
