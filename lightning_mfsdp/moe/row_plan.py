"""RowPlan: which rows the experts compute, and where the results go. All of it stays on the device.

Every token chooses several experts, and each such choice is a row. Rows are sorted by expert into a buffer whose length is known
beforehand; the choices that belong to no expert here come last. So the rows to compute are a prefix of the buffer:

    buffer      | expert 0 | expert 1 |  ...  | last expert |  dead rows  ...  |
                0        ends[0]    ends[1]           ends[-1] = live         rows

The last row is always dead, so that choices without a result have a row to point to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RowPlan", "combined", "gathered", "plan_rows"]

_ROUND_ROWS_TO = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlan:
    """Of T tokens with K choices each, for E experts.

    Attributes:
        choice: Which of the `T * K` choices a row is, int64 `[rows]`; any valid one for dead rows.
        token: The token of that choice, int64 `[rows]`.
        position: Row of each choice, int64 `[T, K]`; the last row where it has none.
        ends: Where the rows of each expert end, int32 `[E]`.
        live: How many rows are computed, int64, 0-D.
        wanted: How many were requested, int64, 0-D. Those of the last experts are dropped if it is more than the buffer holds.
        over_budget: Whether it is, bool, 0-D.
    """

    choice: Tensor
    token: Tensor
    position: Tensor
    ends: Tensor
    live: Tensor
    wanted: Tensor
    over_budget: Tensor

    @property
    def rows(self) -> int:
        """Length of the buffer."""
        return self.token.shape[0]


def plan_rows(expert_index: Tensor, num_experts: int, budget: int) -> RowPlan:
    """Sort choices by expert, without waiting for the device.

    Args:
        expert_index: Integers `[T, K]`; values outside `[0, num_experts)` are not computed here. At least one choice.
        num_experts: E.
        budget: Rows that may be live.
    """
    choices = expert_index.reshape(-1)
    total, device = choices.numel(), choices.device
    rows = -(-(budget + 1) // _ROUND_ROWS_TO) * _ROUND_ROWS_TO
    is_ours = (choices >= 0) & (choices < num_experts)
    ordered, choice = torch.where(is_ours, choices, num_experts).sort(stable=True)
    wanted = torch.searchsorted(ordered, torch.arange(num_experts, device=device, dtype=ordered.dtype), right=True)
    ends = wanted.clamp(max=budget)
    live = ends[-1]
    position = torch.empty_like(choice).scatter_(0, choice, torch.arange(total, device=device))
    position = torch.where(position < live, position, rows - 1)
    choice = F.pad(choice, (0, max(0, rows - total)))[:rows]
    return RowPlan(
        choice=choice,
        token=choice // expert_index.shape[1],
        position=position.view(expert_index.shape),
        ends=ends.to(torch.int32),
        live=live,
        wanted=wanted[-1],
        over_budget=wanted[-1] > budget,
    )


def gathered(values: Tensor, token: Tensor, live: Tensor) -> Tensor:
    """The row of each choice's token, `[rows, width]` of `values` `[T, width]`. On CUDA dead rows cost nothing and are undefined."""
    if values.is_cuda:
        from lightning_mfsdp.moe.gather_kernel import gather_live_rows

        return gather_live_rows(values, token, live)
    return values.index_select(0, token)


def combined(values: Tensor, position: Tensor) -> Tensor:
    """The sum of each token's rows, `[T, width]` of `values` `[rows, width]`; dead rows are not read."""
    return F.embedding_bag(position, values, mode="sum", padding_idx=values.shape[0] - 1)
