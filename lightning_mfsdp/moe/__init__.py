"""Mixtures of experts: torch and the engine only."""

from lightning_mfsdp.moe.experts import Dispatcher, GroupedExperts
from lightning_mfsdp.moe.huggingface import ExpertLayer, ExpertsReport, enable_grouped_experts
from lightning_mfsdp.moe.parallel import AllGatherDispatcher, AllToAllDispatcher, expert_parallel, take_over_budget
from lightning_mfsdp.moe.router import LoadStatistics, Routes, TopKRouter
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver, SavesActivations

__all__ = [
    "ActivationSaver",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "Dispatcher",
    "ExpertLayer",
    "ExpertsReport",
    "GroupedExperts",
    "LoadStatistics",
    "OrdinarySaver",
    "Routes",
    "SavesActivations",
    "TopKRouter",
    "enable_grouped_experts",
    "expert_parallel",
    "take_over_budget",
]
