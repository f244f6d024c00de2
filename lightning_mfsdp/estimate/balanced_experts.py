"""Experts divided among ranks, as if all of them were chosen equally often: which ones a router chooses is unknown without values."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_mfsdp.moe.experts import GroupedExperts
from lightning_mfsdp.moe.huggingface import DIVIDED, DividedExperts
from lightning_mfsdp.moe.parallel import AllToAllDispatcher

__all__ = ["balance_experts"]


class _BalancedDispatcher(AllToAllDispatcher):
    """Sends equally many rows to each rank."""

    def _rows_by_rank(self, owner: Tensor) -> tuple[list[int], list[int]]:
        count, ranks = owner.numel(), self.axis.size
        rows = [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]
        return rows, rows


def balance_experts(module: nn.Module) -> None:
    """Have layers of experts inside that send tokens to other ranks send equally many to each."""
    for part in module.modules():
        layer = part if isinstance(part, GroupedExperts) else vars(part).get(DIVIDED)
        if isinstance(layer, (GroupedExperts, DividedExperts)) and type(layer.dispatcher) is AllToAllDispatcher:
            layer.dispatcher = _BalancedDispatcher(layer.dispatcher.axis)
