"""GroupedExperts: stacked feed-forward experts, computed together and without synchronizing with the host."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.activations import ACTIVATIONS, ActivationName
from lightning_mfsdp.moe.capacity import CapacityWatch, rounded_up
from lightning_mfsdp.moe.function import experts_mlp, no_choices
from lightning_mfsdp.moe.products import product_dtype
from lightning_mfsdp.moe.row_plan import RowPlan, plan_rows
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver

__all__ = ["Dispatcher", "ExpertsOfRank", "GroupedExperts", "uncompiled"]


class ExpertsOfRank(Protocol):
    """What a dispatcher requires of experts that are divided among ranks.

    Attributes:
        num_experts: Over all ranks.
        first_expert: Number of this rank's first one.
    """

    num_experts: int
    first_expert: int

    @property
    def weight_in(self) -> Tensor:
        """A parameter of them."""

    def compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype of the products."""

    def compute(
        self, hidden: Tensor, expert_index: Tensor, probabilities: Tensor, *, average_rows: int | None = None
    ) -> Tensor:
        """See `GroupedExperts.compute`."""


class Dispatcher(Protocol):
    """Brings tokens to the experts of other ranks and results back, see parallel.py."""

    def __call__(self, experts: ExpertsOfRank, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        """Arguments and result are those of `GroupedExperts.forward`."""


class GroupedExperts(nn.Module):
    """E feed-forward experts with stacked weights; every token goes through K of them.

    All experts are computed by grouped matrix products on offsets that stay on the device, so nothing waits for the host, and a call
    can be recorded in a CUDA graph and replayed with other routes. That requires CUDA, bfloat16, and sizes that are multiples of 8;
    elsewhere experts are computed one by one.

    Args:
        num_experts: E, over all ranks.
        hidden_size: H, of tokens.
        intermediate_size: I, inside an expert.
        activation: "swiglu" (gated by SiLU) or "gelu".
        capacity_factor: Under expert parallelism by "all_gather" the buffer of rows holds so many times the average of a rank.
            `None`: the maximum number. Elsewhere buffers hold exactly the needed rows, and this has no effect.
        over_capacity: What happens to rows beyond that. "grow": the call gets a larger buffer, and a warning says which factor would have
            been enough. For that the host waits for the device in each call, unless `capacity_watch` checks. "drop": they are dropped
            and flagged (`over_budget`), without waiting.
        flat_weights: Keep weights as matrices, `[E * rows, columns]`, so that they are sharded by rows of those and not by whole
            experts. For more ranks than experts.
        init_std: Standard deviation of initial weights.
        device: Of the weights.
        dtype: Of the weights.

    Attributes:
        weight_in: `[E, 2 * I, H]`, gate first ("swiglu"), or `[E, I, H]`. Under expert parallelism those of this rank's experts.
        weight_out: `[E, H, I]`.
        live_rows: How many rows the last call computed, int64, 0-D.
        over_budget: Whether any call since the last reset had more rows than its buffer, bool, 0-D. Clear it with `zero_()`.
        capacity: Rows of the last call's buffer; 0 before the first one.
        capacity_watch: An object that checks, before a step, whether rows were dropped, and skips it then
            (`PagedStash`, `RowStash.watch`). Under "grow", calls in training mode then drop rows without waiting.
        saver: Keeps activations for backward.
        first_expert: Number of this rank's first expert.
        dispatcher: `None`, or the one that expert parallelism set.
        buffers_of_each_rank: Which buffers each rank has for itself, see `broadcast_buffers`.

    Raises:
        ValueError: A size or factor out of range, or an unknown activation.
    """

    weight_in: nn.Parameter
    weight_out: nn.Parameter
    live_rows: Tensor
    over_budget: Tensor
    buffers_of_each_rank: ClassVar[frozenset[str]] = frozenset(("live_rows", "over_budget"))

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationName = "swiglu",
        capacity_factor: float | None = None,
        over_capacity: Literal["grow", "drop"] = "grow",
        flat_weights: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"GroupedExperts: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        _check_capacity_factor(capacity_factor)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation = ACTIVATIONS[activation]
        if over_capacity not in ("grow", "drop"):
            raise ValueError(f'GroupedExperts: over_capacity: expected "grow" or "drop", got {over_capacity!r}')
        self.capacity_factor = capacity_factor
        self.over_capacity = over_capacity
        self.capacity_watch: CapacityWatch | None = None
        self._told_factor = 0.0
        self.flat_weights = flat_weights
        self.init_std = init_std
        self.saver: ActivationSaver = OrdinarySaver()
        self.dispatcher: Dispatcher | None = None
        self.first_expert = 0
        self.capacity = 0
        projected = self.activation.width * intermediate_size
        for name, shape in (
            ("weight_in", (num_experts, projected, hidden_size)),
            ("weight_out", (num_experts, hidden_size, intermediate_size)),
        ):
            stored = (shape[0] * shape[1], shape[2]) if flat_weights else shape
            self.register_parameter(name, nn.Parameter(torch.empty(stored, device=device, dtype=dtype)))
        self.register_buffer("live_rows", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("over_budget", torch.zeros((), dtype=torch.bool, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again. Experts of other ranks are drawn too, and discarded: under one seed weights do not depend on ranks."""
        for weight in self.stacked_weights():
            own = iter(weight.detach())
            for expert in range(self.num_experts):
                is_own = 0 <= expert - self.first_expert < len(weight)
                nn.init.normal_(next(own) if is_own else torch.empty_like(weight[0]), std=self.init_std)
        self.live_rows.zero_()
        self.over_budget.zero_()

    @property
    def tensor_plan(self) -> dict[str, str]:
        """How a tensor axis divides them: each expert's inner features. Flat weights stay whole."""
        if self.flat_weights:
            return {}
        first = "packed_colwise" if self.activation.width == 2 else "colwise"
        return {"weight_in": first, "weight_out": "rowwise", "": "moe_tp_experts"}

    def stacked_weights(self) -> tuple[Tensor, Tensor]:
        """`weight_in` and `weight_out` with one matrix for each expert of this rank."""
        if not self.flat_weights:
            return self.weight_in, self.weight_out
        projected = self.activation.width * self.intermediate_size
        return (
            self.weight_in.view(-1, projected, self.hidden_size),
            self.weight_out.view(-1, self.hidden_size, self.intermediate_size),
        )

    def forward(self, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        """The sum over each token's experts of probability times the expert's output for the token.

        Args:
            hidden: Tokens, `[T, H]`.
            expert_index: Which experts each token goes through, integers `[T, K]`. A number outside `[0, E)` means none.
            probabilities: Their weights, `[T, K]`.

        Returns:
            `[T, H]`.

        Raises:
            ValueError: Shapes or dtypes that do not fit.
        """
        self._check(hidden, expert_index, probabilities)
        expert_index = expert_index.long()  # numbers of experts may not fit the dtype of the choices
        if self.dispatcher is not None:
            return uncompiled(self.dispatcher, self, hidden, expert_index, probabilities)
        return self.compute(hidden, expert_index, probabilities)

    def compute(
        self, hidden: Tensor, expert_index: Tensor, probabilities: Tensor, *, average_rows: int | None = None
    ) -> Tensor:
        """As `forward`, by this rank's experts alone.

        Args:
            hidden: `[T, H]`.
            expert_index: `[T, K]`, where 0 is this rank's first expert.
            probabilities: `[T, K]`.
            average_rows: How many choices are this rank's on average. `None`: all.
        """
        weight_in, weight_out = self.stacked_weights()
        dtype = self.compute_dtype(hidden)
        if not expert_index.numel():
            self.capacity = 0
            self.live_rows.zero_()
            return no_choices(hidden.to(dtype), probabilities, weight_in, weight_out)
        plan = self._planned(expert_index, len(weight_in), average_rows)
        self.capacity = plan.rows
        self.live_rows.copy_(plan.live)
        self.over_budget.logical_or_(plan.over_budget)
        weight_in, weight_out, hidden = weight_in.to(dtype), weight_out.to(dtype), hidden.to(dtype)
        return experts_mlp(
            hidden,
            probabilities,
            weight_in,
            weight_out,
            plan=plan,
            activation=self.activation,
            saver=self.saver,
        )

    def compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype of the products: autocast's, otherwise that of the weights."""
        return product_dtype(hidden, self.weight_in)

    def _planned(self, expert_index: Tensor, num_experts: int, average_rows: int | None) -> RowPlan:
        choices = expert_index.numel()
        if self.capacity_factor is None or average_rows is None:
            return plan_rows(expert_index, num_experts, choices)
        budget = min(choices, math.ceil(average_rows * self.capacity_factor))
        plan, watch = plan_rows(expert_index, num_experts, budget), self.capacity_watch
        if budget == choices:
            return plan
        if self.over_capacity == "drop" or (watch is not None and watch.asks(self)):
            if watch is not None:
                watch.note(self, plan.over_budget, plan.wanted.double() / average_rows)
            return plan
        if expert_index.is_cuda and torch.cuda.is_current_stream_capturing():
            raise EngineStateError(
                f"GroupedExperts: capacity_factor={self.capacity_factor} in a recorded step: rows beyond it would get a larger buffer, "
                'which a CUDA graph cannot do; use PagedStash(overflow="rerun"), capacity_factor=None, or over_capacity="drop" to lose them'
            )
        wanted = int(plan.wanted)
        if wanted <= budget:
            return plan
        factor = wanted / average_rows
        if watch is None and factor > self._told_factor:
            self._told_factor = factor
            warnings.warn(
                f"GroupedExperts: {wanted} rows where capacity_factor={self.capacity_factor} has room for {budget}, so this call takes a "
                f"larger buffer; capacity_factor={rounded_up(factor)} would have been enough. Give that to save memory",
                stacklevel=2,
            )
        return plan_rows(expert_index, num_experts, wanted)

    def _check(self, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> None:
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            raise ValueError(
                f"GroupedExperts: hidden: expected tokens of shape [T, {self.hidden_size}], got {tuple(hidden.shape)}; flatten batch and "
                "sequence first"
            )
        is_number = expert_index.dtype is not torch.bool and not expert_index.dtype.is_complex
        is_integer = is_number and not expert_index.is_floating_point()
        if expert_index.dim() != 2 or not is_integer or len(expert_index) != len(hidden):
            raise ValueError(
                f"GroupedExperts: expert_index: expected integers of shape [{len(hidden)}, K], got {tuple(expert_index.shape)} of "
                f"{expert_index.dtype}"
            )
        if probabilities.shape != expert_index.shape or not probabilities.is_floating_point():
            raise ValueError(
                f"GroupedExperts: probabilities: expected the shape of expert_index, {tuple(expert_index.shape)}, and floating-point "
                f"numbers, got {tuple(probabilities.shape)} of {probabilities.dtype}"
            )

    def extra_repr(self) -> str:
        """Sizes, for `print(module)`."""
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.activation.name}, capacity_factor={self.capacity_factor}, over_capacity={self.over_capacity}"
        )


def _call(dispatcher: Dispatcher, *arguments: Any) -> Tensor:
    return dispatcher(*arguments)


# Compilers do not trace communication.
uncompiled: Callable[..., Tensor] = torch.compiler.disable(_call)


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"GroupedExperts: {name}: expected a positive whole number, got {size!r}")


def _check_capacity_factor(capacity_factor: float | None) -> None:
    """Raise a ValueError for a buffer too small for even the average."""
    is_number = isinstance(capacity_factor, (int, float)) and 1 <= capacity_factor < math.inf
    if capacity_factor is not None and not is_number:
        raise ValueError(
            "GroupedExperts: capacity_factor: expected a number of at least 1, or None for all rows there can be, got "
            f"{capacity_factor!r}"
        )
