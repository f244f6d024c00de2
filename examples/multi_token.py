"""The reference decoder with multi-token prediction: one more block for each token beyond the next one, in training and as drafts.

Shapes as in decoder.py, and P for the number of tokens beyond the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from examples.decoder import Block, Decoder, DecoderConfig, RMSNorm, next_token_loss
from lightning_mfsdp.mtp import DraftCounts, MultiTokenPredictor, count_drafts


@dataclass(frozen=True, kw_only=True)
class MultiTokenOptions:
    """How a decoder predicts more than the next token.

    Args:
        depth: Tokens P beyond the next one.
        loss_weight: Of the mean of their losses, beside the loss of the next token.
        shared: One block for all of them.
        recompute: Their blocks are recomputed in backward.
    """

    depth: int = 1
    loss_weight: float = 0.3
    shared: bool = False
    recompute: bool = False


class MultiTokenDecoder(Decoder):
    """A decoder whose embedding and head also serve a predictor of the tokens after the next one.

    Its checkpoints have the names of a plain decoder's, and those of `predictor.layers`.
    """

    def __init__(self, config: DecoderConfig, options: MultiTokenOptions) -> None:
        super().__init__(config)
        self.predictor = MultiTokenPredictor(
            config.dim,
            partial(Block, config),
            depth=options.depth,
            shared=options.shared,
            norm=partial(RMSNorm, eps=config.norm_eps),
            loss_weight=options.loss_weight,
            recompute=options.recompute,
        )

    def losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the next token, 0-D, and of those after it, [P], in nats; `tokens` and `targets` are [B, S]."""
        own, ahead = self.all_states(tokens)
        # One after the other, behind everything else: a sharded head is then gathered once for both.
        return self.loss_of(own, targets), self.predictor.losses(ahead, targets, self.loss_of)

    @torch.no_grad()
    def drafts(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, DraftCounts]:
        """Mean loss of the next token, and how often its own drafts would be accepted (see `count_drafts`)."""
        own, ahead = self.all_states(tokens)
        logits = self.head(own)
        drafts = torch.stack([self.head(states).argmax(-1) for states in ahead])
        return next_token_loss(logits, targets), count_drafts(drafts, logits.argmax(-1), targets)

    def all_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the head sees for the next token, [B, S, D], and for those after it, [P, B, S, D]."""
        x = self.embedding(tokens)
        cos, sin = self.rotary(x)
        own = self.states(x, cos, sin)
        return own, self.predictor(own, x, cos, sin)

    def loss_of(self, states: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of targets that are not -100, 0-D."""
        return next_token_loss(self.head(states), targets)
