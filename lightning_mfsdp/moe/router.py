"""TopKRouter: which experts a token goes through, with what weight, and how the load is kept even.

Scores are float32 regardless of the model's dtype. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ChoiceKeeper", "LoadStatistics", "Routes", "TopKRouter"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """What a router decided for T tokens.

    Attributes:
        expert_index: Experts by falling score, int64 `[T, K]`.
        probabilities: Their weights, float32 `[T, K]`.
        loss: The term of balancing and z-loss to add to the loss, weighted already; float32, 0-D, zero without either.
    """

    expert_index: Tensor
    probabilities: Tensor
    loss: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadStatistics:
    """How choices were distributed over experts since the last count. Tensors on the device: fit for `self.log`, no waiting.

    Attributes:
        share: Of each expert in all choices, float32 `[E]`; zero before the first.
        most: The largest share over the mean: 1 where load is even, E where one expert has it all; 0-D.
        least: The smallest share over the mean; 0-D.
        unused: How many experts no token chose; 0-D.
    """

    share: Tensor
    most: Tensor
    least: Tensor
    unused: Tensor


class ChoiceKeeper(Protocol):
    """Stores choices, so that a forward that is recomputed in backward routes tokens the same way."""

    def keep(self, choose: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """The next choice, `choose()` the first time and the same tensor again, and whether it was made already."""


class TopKRouter(nn.Module):
    """Chooses the K best of E experts for each token. Of equal scores the expert with the lower number wins, on every device.

    Args:
        hidden_size: H, of tokens.
        num_experts: E.
        top_k: K.
        scores: "softmax" over experts, or "sigmoid" of each by itself.
        normalize: Divide the K scores by their sum.
        scale: Of the probabilities, after that.
        balancing: "auxiliary": a loss that grows with uneven load. "bias": a number for each expert, added to its score for the choice
            alone and moved by `balance()` against the load. `None`: neither.
        auxiliary_weight: Of the auxiliary loss.
        bias_step: How far `balance()` moves a bias.
        z_loss_weight: Of the mean square of the logarithm of the summed exponentials: keeps logits small. 0 for none.

    Attributes:
        weight: `[E, H]`.
        bias: float32 `[E]` whatever the module is converted to, a buffer; zero without bias-based balancing.
        load: Choices of each expert in training since `balance()`, int64 `[E]`, a buffer.
        choice_keeper: Called for each choice; `None` if nothing is recomputed.
        buffers_of_each_rank: Which buffers each rank has for itself, see `broadcast_buffers`.

    Raises:
        ValueError: A size or option out of range.

    Source:
        Auxiliary loss: Switch Transformers (Fedus and others, 2021). Bias: DeepSeek-V3. z-loss: ST-MoE (Zoph and others, 2022).
    """

    bias: Tensor
    load: Tensor
    buffers_of_each_rank: ClassVar[frozenset[str]] = frozenset(("load",))

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        balancing: Literal["auxiliary", "bias"] | None = "auxiliary",
        auxiliary_weight: float = 0.01,
        bias_step: float = 1e-3,
        z_loss_weight: float = 0.0,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
        _check_weights(auxiliary_weight=auxiliary_weight, bias_step=bias_step, z_loss_weight=z_loss_weight)
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f'TopKRouter: scores: expected "softmax" or "sigmoid", got {scores!r}')
        if balancing not in ("auxiliary", "bias", None):
            raise ValueError(f'TopKRouter: balancing: expected "auxiliary", "bias" or None, got {balancing!r}')
        self.hidden_size, self.num_experts, self.top_k, self.scores = hidden_size, num_experts, top_k, scores
        self.normalize, self.scale, self.balancing = normalize, scale, balancing
        self.auxiliary_weight, self.bias_step, self.z_loss_weight = auxiliary_weight, bias_step, z_loss_weight
        self.init_std = init_std
        self.choice_keeper: ChoiceKeeper | None = None
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(num_experts, device=device, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight again, and reset bias and load."""
        nn.init.normal_(self.weight, std=self.init_std)
        self.bias.zero_()
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """The bias moves with the module, but stays in float32: its steps would be lost in 16 bits."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype is not torch.float32:
            self.bias = bias.to(self.bias.device)
        return self

    def forward(self, hidden: Tensor) -> Routes:
        """Routes for tokens `[T, H]`.

        Raises:
            ValueError: Tokens of another shape.
        """
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            raise ValueError(
                f"TopKRouter: hidden: expected tokens of shape [T, {self.hidden_size}], got {tuple(hidden.shape)}; flatten batch and "
                "sequence first"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.weight.float())
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        index, is_again = self._choose(scores.detach())
        chosen = scores.gather(-1, index)
        if self.normalize:
            chosen = _normalized(chosen)
        counts = self._count(index, note=self.training and not is_again)
        return Routes(expert_index=index, probabilities=chosen * self.scale, loss=self._loss(logits, scores, counts))

    def _choose(self, scores: Tensor) -> tuple[Tensor, bool]:
        """Experts of each token, and whether they were chosen already."""

        def choose() -> Tensor:
            ranked = scores + self.bias if self.balancing == "bias" else scores
            return ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]

        return (choose(), False) if self.choice_keeper is None else self.choice_keeper.keep(choose)

    def _count(self, index: Tensor, *, note: bool) -> Tensor:
        """Choices of each expert, int64 `[E]`; added to `load` if requested."""
        choices = index.reshape(-1)
        counts = torch.zeros_like(self.load).scatter_add_(0, choices, torch.ones_like(choices))
        if note:
            self.load.add_(counts)
        return counts

    def _loss(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        loss = logits.new_zeros(())
        tokens = max(1, len(logits))
        if self.balancing == "auxiliary":
            shares = _normalized(scores) if self.scores == "sigmoid" else scores
            fraction = counts.float() / (tokens * self.top_k)
            loss = loss + self.auxiliary_weight * self.num_experts * (fraction * shares.sum(0) / tokens).sum()
        if self.z_loss_weight:
            loss = loss + self.z_loss_weight * logits.logsumexp(-1).square().sum() / tokens
        return loss

    @torch.no_grad()
    def balance(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the biases one step against the load and reset the count. Call it once for each optimizer step, on all ranks.

        Args:
            group: Ranks that route different tokens. `None`: all.
        """
        if self.balancing == "bias":
            load = self.load.float()
            if dist.is_initialized() and dist.get_world_size(group) > 1:
                dist.all_reduce(load, group=group)
            self.bias.add_((load.mean() - load).sign(), alpha=self.bias_step)
        self.load.zero_()

    @torch.no_grad()
    def statistics(self) -> LoadStatistics:
        """Of this rank's choices in training since `balance()` was last called."""
        share = self.load.float() / self.load.sum().clamp(min=1)
        relative = share * self.num_experts
        return LoadStatistics(
            share=share, most=relative.max(), least=relative.min(), unused=(self.load == 0).sum().float()
        )


def _normalized(scores: Tensor) -> Tensor:
    """Divided by their sum, `[T, any]`. Sigmoids may all be zero."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"TopKRouter: {name}: expected a positive whole number, got {size!r}")
    if sizes["top_k"] > sizes["num_experts"]:
        raise ValueError(f"TopKRouter: top_k: expected 1 to num_experts={sizes['num_experts']}, got {sizes['top_k']}")


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"TopKRouter: {name}: expected a number of at least 0, got {weight!r}")
