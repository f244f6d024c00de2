"""Activation recompute: which activations are recomputed in backward instead of being saved."""

from lightning_mfsdp.recompute.apply import apply_recompute, recomputed, remove_recompute
from lightning_mfsdp.recompute.config import Recompute, as_recompute
from lightning_mfsdp.recompute.planner import LayerRecord, Part, Plan, PlanRow, StepRecord, plan_recompute
from lightning_mfsdp.recompute.recorder import MemoryCounter, StepRecorder, record_step

__all__ = [
    "LayerRecord",
    "MemoryCounter",
    "Part",
    "Plan",
    "PlanRow",
    "Recompute",
    "StepRecord",
    "StepRecorder",
    "apply_recompute",
    "as_recompute",
    "plan_recompute",
    "recomputed",
    "record_step",
    "remove_recompute",
]
