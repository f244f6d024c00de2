"""Multi-token prediction: layers behind a model that predict tokens beyond the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2).

With `k` from 1 to the depth D, position `i` and tokens `t`:

    state[0][i]   the model's own hidden state, from which its head predicts t[i + 1]
    state[k][i] = norm(layer(projection([norm(state[k - 1][i]); norm(embedding(t[i + k]))])))
    head(state[k][i])   the logits of t[i + k + 1]

Embedding and head are those of the model and stay there: the predictor gets the embedding's output for the tokens, and calls
the head that is passed to it. So their parameters have one name each, whether tied or not, and one unit that gathers them.

Every depth has as many positions as the model. What would be beyond the end of a sample is zero, and its target is ignored, so that the
number of tokens suits FP8 at every depth and shapes never change.

Shapes: B rows, S positions, H width, D depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.recompute import Recompute
from lightning_mfsdp.recompute.region import Region

__all__ = [
    "DraftCounts",
    "MultiTokenPredictor",
    "PredictorLayer",
    "RecomputeFunction",
    "count_drafts",
    "documents_from_lengths",
    "documents_from_positions",
    "shifted_targets",
]

RecomputeFunction: TypeAlias = Callable[..., Tensor]
"""Calls `function(*args, **kwargs)`, saves only its inputs, and calls it again in backward: `recompute(function, *args, **kwargs)`."""


class PredictorLayer(nn.Module):
    """One depth: norms, projection, the layer, and the norm before the head. It is one unit, and one region to recompute.

    Args:
        width: H.
        layer: Builds the layer.
        norm: Builds a norm of a width.
        recompute: Calls what must be recomputed in backward; True: as `Recompute()` does; `None`: everything is saved.
        is_shared: Whether it is called for several depths.
    """

    def __init__(
        self,
        width: int,
        layer: Callable[[], nn.Module],
        norm: Callable[[int], nn.Module],
        recompute: RecomputeFunction | Literal[True] | None = None,
        is_shared: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_norm = norm(width)
        self.embedding_norm = norm(width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.layer = layer()
        self.norm = norm(width)
        self.recompute = recompute
        self.is_shared = is_shared
        self._make_region()

    def _make_region(self) -> None:
        # No early stop: the layer may hold collectives (experts on other ranks), and all ranks must reach the same ones.
        made = partial(Region, "MultiTokenPredictor", self, Recompute(), function=self._states, stops_early=False)
        self._region: Region | None = made(is_shared=self.is_shared) if self.recompute is True else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy recomputes itself, not this layer."""
        return {**self.__dict__, "_region": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_region()

    @property
    def recomputes_itself(self) -> bool:
        """Whether it is recomputed already; `Recompute` checks this. Hugging Face's switch has another name, and does not affect it."""
        return self.recompute is not None

    def forward(self, hidden: Tensor, embedding: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The next states `[B, S, H]`.

        Args:
            hidden: States of the previous depth `[B, S, H]`.
            embedding: Embedding of the token that each position is shown `[B, S, H]`.
            *args: Passed to the layer, after its input.
            **kwargs: Passed to the layer.

        Raises:
            ValueError: The layer does not return one tensor of the shape of its input.
        """
        # Inside of the unit, so that its weights are gathered once for both: the gradients and what is recomputed.
        if self.recompute is None or not torch.is_grad_enabled():
            return self._states(hidden, embedding, *args, **kwargs)
        again: Callable[..., Tensor] = self._region or partial(cast(RecomputeFunction, self.recompute), self._states)
        return again(hidden, embedding, *args, **kwargs)

    def _states(self, hidden: Tensor, embedding: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedding)), dim=-1)
        states = self.layer(self.projection(both), *args, **kwargs)
        if not isinstance(states, Tensor) or states.shape != hidden.shape:
            found = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ValueError(
                f"MultiTokenPredictor: {type(self.layer).__name__} returned {found}; expected one tensor of the shape of its input, "
                f"{tuple(hidden.shape)}. Wrap a layer that returns more than that"
            )
        normed: Tensor = self.norm(states)
        return normed


class MultiTokenPredictor(nn.Module):
    """Predicts tokens 2 to D + 1 after each position, for a denser training signal and for drafts when generating.

    Under the strategy's automatic choice each of its layers is a unit. Call it inside the forward (or training_step) of the model that
    owns embedding and head.

    Args:
        width: H.
        layer: Builds one transformer layer, called as `layer(x, *args, **kwargs)` with arguments of `forward`. It must be causal.
        depth: D, how many tokens beyond the next one are predicted.
        shared: One layer is used for all depths; False: each has its own.
        norm: Builds a norm of a width; `None`: `nn.RMSNorm` with eps 1e-5.
        loss_weight: Of the mean of all depths' losses, as lambda in the paper (0.3, later 0.1); or D weights, one for each depth.
        recompute: True: layers are recomputed in backward as `Recompute()` does it, by Transformer Engine's own checkpoint where its
            modules quantize. A function recomputes in its own way.
        ignore_index: Label of what is not learned.

    Attributes:
        layers: `PredictorLayer`s, D of them, or one if shared.
        loss_weights: One for each depth. May be assigned between steps, like `loss_weight`.

    Raises:
        ValueError: A number out of its range, or another number of weights than depths, also when assigned.
        TypeError: `recompute` is neither True, False nor a function.
    """

    # As in models of Hugging Face: classes not to split. The automatic choice makes a unit of each, also of a single one.
    _no_split_modules = ("PredictorLayer",)

    def __init__(
        self,
        width: int,
        layer: Callable[[], nn.Module],
        *,
        depth: int = 1,
        shared: bool = False,
        norm: Callable[[int], nn.Module] | None = None,
        loss_weight: float | Sequence[float] = 0.3,
        recompute: bool | RecomputeFunction = False,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"MultiTokenPredictor: depth={depth}: expected at least one token beyond the next one")
        if not (isinstance(recompute, bool) or callable(recompute)):
            raise TypeError(f"MultiTokenPredictor: recompute={recompute!r}: expected True, False or a function")
        self.depth = depth
        self.loss_weights = loss_weight
        self.ignore_index = ignore_index
        norm = norm or partial(nn.RMSNorm, eps=1e-5)
        make = partial(PredictorLayer, width, layer, norm, recompute or None, is_shared=shared and depth > 1)
        self.layers = nn.ModuleList(make() for _ in range(1 if shared else depth))

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Weights of the losses, one for each depth."""
        return self._loss_weights

    @loss_weights.setter
    def loss_weights(self, weights: float | Sequence[float]) -> None:
        self._loss_weights = _loss_weights(weights, self.depth)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, *args: Any, documents: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """States of all depths `[D, B, S, H]`, ready for the head. Gradients flow to `hidden` and to `embeddings`.

        Args:
            hidden: The model's own states, as its head sees them `[B, S, H]`.
            embeddings: The model's embedding of its input tokens `[B, S, H]`.
            *args: Passed to each layer, after its input, the same at every depth: rotary tables, masks.
            documents: Which sample each position is of `[B, S]`, integers, from `documents_from_positions` or
                `documents_from_lengths`; `None`: each row is one sample.
            **kwargs: Passed to each layer.

        Raises:
            ValueError: Shapes that do not fit.
        """
        if hidden.dim() != 3 or hidden.shape != embeddings.shape:
            raise ValueError(
                f"MultiTokenPredictor: expected hidden states and embeddings of one shape [B, S, H], got {tuple(hidden.shape)} and "
                f"{tuple(embeddings.shape)}"
            )
        _check_documents(documents, hidden.shape[:2])
        states, state = [], hidden
        for index in range(self.depth):
            layer = self.layers[index % len(self.layers)]
            state = layer(state, _later(embeddings, index + 1, documents, 0), *args, **kwargs)
            states.append(state)
        return torch.stack(states)

    def losses(
        self,
        states: Tensor,
        labels: Tensor,
        head: Callable[[Tensor, Tensor], Tensor],
        documents: Tensor | None = None,
    ) -> Tensor:
        """The loss of each depth `[D]`, without weights.

        Args:
            states: From `forward` `[D, B, S, H]`.
            labels: Those of the model: the token that comes next in the same sample, or `ignore_index` `[B, S]`.
            head: Maps states `[B, S, H]` and targets `[B, S]` to their mean loss, 0-D, over targets that are not `ignore_index`, and to 0
                if none is. A `LinearLossHead` does. It is called once for each depth.
            documents: As in `forward`.

        Raises:
            ValueError: Shapes that do not fit.
        """
        targets = shifted_targets(labels, self.depth, documents, self.ignore_index)
        if states.shape[:-1] != targets.shape:
            raise ValueError(
                f"MultiTokenPredictor.losses: expected states [D, B, S, H] of {self.depth} depths and labels [B, S], got "
                f"{tuple(states.shape)} and {tuple(labels.shape)}"
            )
        return torch.stack([head(*pair) for pair in zip(states, targets, strict=True)])

    def weighted(self, losses: Tensor) -> Tensor:
        """The term to add to the model's own loss, 0-D, from `losses` `[D]`.

        Raises:
            ValueError: Another number of losses.
        """
        if losses.shape != (self.depth,):
            raise ValueError(
                f"MultiTokenPredictor.weighted: expected the losses of {self.depth} depths [D], got shape {tuple(losses.shape)}"
            )
        weighted = [weight * loss for weight, loss in zip(self.loss_weights, losses, strict=True)]
        return torch.stack(weighted).sum()


def _loss_weights(given: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """One for each depth.

    Raises:
        ValueError: Another number of them, a negative one, or one that is not a number.
    """
    weights: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else (given,) * depth
    if len(weights) != depth or not all(
        isinstance(weight, Real) and 0 <= float(weight) < math.inf for weight in weights
    ):
        raise ValueError(
            f"MultiTokenPredictor: loss_weight={given!r}: expected a number that is not negative, or {depth} of them, one for each depth"
        )
    return weights if isinstance(given, Sequence) else tuple(weight / depth for weight in weights)


# -- which token belongs to which sample -------------------------------------------------------------------------------


def documents_from_positions(position_ids: Tensor) -> Tensor:
    """Numbers of samples `[B, S]` from positions `[B, S]`: another one begins where a position does not follow the previous one."""
    begins = position_ids.diff(dim=-1, prepend=position_ids[..., :1]) != 1
    return begins.cumsum(-1)


def documents_from_lengths(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Numbers of samples `[1, N]` of a packed batch.

    Args:
        cu_seqlens: Where each sample begins, and N at the end, as `AlignedCollator` returns it.
        num_tokens: N.

    Raises:
        ValueError: It does not go from 0 to N (checked on the CPU only).
    """
    if cu_seqlens.device.type == "cpu" and (cu_seqlens.dim() != 1 or cu_seqlens[[0, -1]].tolist() != [0, num_tokens]):
        raise ValueError(
            f"documents_from_lengths: cu_seqlens={cu_seqlens.tolist()}: expected 0, where each other sample begins, and the number of "
            f"tokens, {num_tokens}"
        )
    places = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)[None]


def shifted_targets(labels: Tensor, depth: int, documents: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The targets of each depth `[D, B, S]`: at depth k and position i the label of i + k, if that is of the same sample.

    Args:
        labels: The token that comes next in the same sample, or `ignore_index` `[B, S]`.
        depth: D.
        documents: Which sample each position is of `[B, S]`; `None`: each row is one.
        ignore_index: Target beyond the end of a sample.

    Raises:
        ValueError: Shapes that do not fit.
    """
    if labels.dim() != 2:
        raise ValueError(f"shifted_targets: expected labels [B, S], got {tuple(labels.shape)}")
    _check_documents(documents, labels.shape)
    return torch.stack([_later(labels, index + 1, documents, ignore_index) for index in range(depth)])


def _check_documents(documents: Tensor | None, shape: torch.Size) -> None:
    if documents is not None and (documents.shape != shape or documents.is_floating_point()):
        raise ValueError(
            f"documents: expected the number of each position's sample, integers of shape {tuple(shape)}, got {documents.dtype} of shape "
            f"{tuple(documents.shape)}. documents_from_positions and documents_from_lengths make them"
        )


def _later(values: Tensor, count: int, documents: Tensor | None, filler: float) -> Tensor:
    """Values `[B, S, ...]` of `count` positions later; `filler` where that is no longer the same sample."""
    missing = min(count, values.shape[1])
    padding = (0, 0) * (values.dim() - 2) + (0, missing)
    moved = F.pad(values[:, missing:], padding, value=filler)
    if documents is None:
        return moved
    ends = F.pad(documents[:, missing:] != documents[:, : documents.shape[1] - missing], (0, missing), value=True)
    return moved.masked_fill(ends.view(*ends.shape, *(1,) * (values.dim() - 2)), filler)


# -- drafts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """How often drafts were right, by depth: int64 tensors `[D]`, to be summed over batches and ranks.

    Args:
        counted: Drafts whose token is known.
        accepted: Those that are the model's own greedy choice for that token.
        correct: Those that are the token of the text.
    """

    counted: Tensor
    accepted: Tensor
    correct: Tensor

    @property
    def acceptance(self) -> Tensor:
        """Accepted ones among those that were counted `[D]`, float32; 0 where none was."""
        return self.accepted / self.counted.clamp(min=1)

    @property
    def accuracy(self) -> Tensor:
        """Correct ones among those that were counted `[D]`, float32; 0 where none was."""
        return self.correct / self.counted.clamp(min=1)


def count_drafts(
    drafts: Tensor, greedy: Tensor, labels: Tensor, documents: Tensor | None = None, ignore_index: int = -100
) -> DraftCounts:
    """Compare drafts on a given text with the model's own predictions.

    The draft of depth k at position i predicts token i + k + 1 from the text up to token i + k. The model's own greedy choice
    for that token is the one at position i + k, from the same text. In greedy speculative decoding the draft is accepted exactly if
    both are equal, given that those of lower depths were. Each depth is counted by itself, on the text's tokens.

    Args:
        drafts: Likeliest tokens of the predictor's states `[D, B, S]`.
        greedy: Likeliest tokens of the model's own states `[B, S]`.
        labels: The text's next tokens, or `ignore_index`, as in `shifted_targets` `[B, S]`; ignored positions are not counted.
        documents: Which sample each position is of `[B, S]`; `None`: each row is one.
        ignore_index: Of the labels.

    Raises:
        ValueError: Shapes that do not fit.
    """
    if drafts.dim() != 3 or not drafts.shape[1:] == greedy.shape == labels.shape:
        raise ValueError(
            f"count_drafts: expected drafts [D, B, S], greedy tokens [B, S] and labels [B, S], got {tuple(drafts.shape)}, "
            f"{tuple(greedy.shape)} and {tuple(labels.shape)}"
        )
    targets = shifted_targets(labels, len(drafts), documents, ignore_index)
    own = shifted_targets(greedy, len(drafts), documents, ignore_index)
    known = targets != ignore_index
    return DraftCounts(
        counted=known.sum((1, 2)),
        accepted=((drafts == own) & known).sum((1, 2)),
        correct=((drafts == targets) & known).sum((1, 2)),
    )
