"""The reference decoder as a LightningModule, its text as a LightningDataModule, and sampling from it.

Nothing here mentions sharding: the same classes train under any strategy.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.decoder import PRESETS, Decoder, DecoderConfig, next_token_loss
from examples.multi_token import MultiTokenDecoder, MultiTokenOptions
from examples.text import BYTES, ByteText
from lightning_mfsdp.context_parallel import context_attention, context_positions
from lightning_mfsdp.optim import AdamW


class LightningDecoder(LightningModule):
    """Trains a decoder to predict the next byte.

    Args:
        config: Sizes, or the name of a preset: tiny, 300m, 1b, 8b.
        learning_rate: Peak of the schedule: linear warm-up, then a cosine down to a tenth.
        weight_decay: Applied to matrices only.
        warmup_steps: Optimizer steps of linear warm-up.
        total_steps: Optimizer steps over which the schedule runs; None takes them from the Trainer. Give it when a run
            is meant to be stopped and continued.
        meta: Build on the meta device, without memory; the strategy then fills in the weights as it shards them.
        multi_token: How tokens after the next one are predicted too; None: they are not.
        betas: Of AdamW.
        moments: Dtype of AdamW's moments. Other than in float32, weights of "bf16-true" also keep what they lack of float32.

    Raises:
        ValueError: There is no preset of that name.
    """

    def __init__(
        self,
        config: str | DecoderConfig = "tiny",
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        total_steps: int | None = None,
        meta: bool = False,
        multi_token: MultiTokenOptions | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        moments: Literal["float32", "bfloat16", "8bit"] = "float32",
    ) -> None:
        super().__init__()
        if isinstance(config, str) and config not in PRESETS:
            raise ValueError(f"no preset {config!r}; the presets are {', '.join(PRESETS)}")
        self.config = PRESETS[config] if isinstance(config, str) else config
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.meta = meta
        self.multi_token = multi_token
        self.betas, self.moments = betas, moments
        self.decoder: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the decoder. Lightning calls this once per fit, validate, test and predict."""
        if self.decoder is None:
            with torch.device("meta") if self.meta else contextlib.nullcontext():
                ahead = self.multi_token
                self.decoder = (
                    Decoder(self.config, context_attention, context_positions)
                    if ahead is None
                    else MultiTokenDecoder(self.config, ahead)
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape [B, S, V] for `tokens` of shape [B, S]."""
        return self.decoder(tokens)

    def training_step(self, batch: Tensor | list[Tensor], batch_index: int) -> Tensor | dict[str, Tensor]:
        """Mean loss of the microbatch, in nats; with tokens after the next one also "next_token_loss", the part without them."""
        tokens, targets = tokens_and_targets(batch)
        if not isinstance(self.decoder, MultiTokenDecoder):
            loss = next_token_loss(self.decoder(tokens), targets)
            self.log("bits_per_byte", loss.detach() / math.log(2), prog_bar=True)
            return loss
        loss, ahead = self.decoder.losses(tokens, targets)
        self.log("bits_per_byte", loss.detach() / math.log(2), prog_bar=True)
        for number, one in enumerate(ahead.detach(), start=1):
            self.log(f"bits_per_byte_ahead_{number}", one / math.log(2))
        return {"loss": loss + self.decoder.predictor.weighted(ahead), "next_token_loss": loss.detach()}

    def validation_step(self, batch: Tensor | list[Tensor], batch_index: int) -> None:
        """Log the held-out loss, in bits per byte, averaged over all batches and ranks.

        With tokens after the next one, log for each also the rates of `DraftCounts`: how many drafts are the decoder's own choice
        ("val_draft_acceptance_1") and how many are the text's byte ("val_draft_accuracy_1").
        """
        tokens, targets = tokens_and_targets(batch)
        options = {"sync_dist": True, "batch_size": len(tokens)}
        if isinstance(self.decoder, MultiTokenDecoder):
            loss, found = self.decoder.drafts(tokens, targets)
            # Every window has as many drafts, so the mean over windows is that over drafts.
            for number, rates in enumerate(zip(found.acceptance, found.accuracy, strict=True), start=1):
                self.log(f"val_draft_acceptance_{number}", rates[0], prog_bar=number == 1, **options)
                self.log(f"val_draft_accuracy_{number}", rates[1], **options)
        else:
            loss = next_token_loss(self.decoder(tokens), targets)
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True, **options)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with weight decay on matrices, and the learning rate as a function of the optimizer step."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        options: dict[str, Any] = {"lr": self.learning_rate, "betas": self.betas}
        # Under loss scaling a fused optimizer removes the scale inside its step, too late for clipping.
        fused = not str(self.trainer.precision).startswith("16")
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, **options, fused=fused)
            if self.moments == "float32"
            else AdamW(
                groups, **options, state_dtype=self.moments, store_param_remainders=True, use_decoupled_grad=True
            )
        )
        total = self.total_steps or int(self.trainer.estimated_stepping_batches)

        def scale(step: int) -> float:
            progress = min(step / total, 1.0)
            return min(1.0, (step + 1) / self.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def tokens_and_targets(batch: Tensor | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Both [B, S], of windows [B, S + 1] or of what `TextDataModule(pairs=True)` made of them."""
    if isinstance(batch, Tensor):
        return batch[:, :-1], batch[:, 1:]
    tokens, targets = batch
    return tokens, targets


def pairs_of(windows: list[Tensor]) -> list[Tensor]:
    """Tokens and the ones after them, both [B, S], of windows [S + 1]."""
    return list(tokens_and_targets(torch.stack(windows)))


class TextDataModule(LightningDataModule):
    """Windows of the standard library's source, shuffled for training.

    Args:
        seq: Bytes per window.
        batch_size: Windows per microbatch and process.
        held_out_windows: Windows of held-out text used for validation, over all processes.
        pairs: Batches are tokens and targets, which a context axis can divide alike, instead of windows.
    """

    def __init__(self, seq: int = 128, batch_size: int = 8, held_out_windows: int = 128, pairs: bool = False) -> None:
        super().__init__()
        self.collate = pairs_of if pairs else None
        self.seq = seq
        self.batch_size = batch_size
        self.held_out_windows = held_out_windows

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows; Lightning gives each process its own share."""
        text = ByteText("train", self.seq)
        return DataLoader(text, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The same held-out windows every time."""
        return DataLoader(self.held_out(), self.batch_size, collate_fn=self.collate)

    def held_out(self) -> ByteText:
        """The windows that validation reads."""
        return ByteText("held_out", self.seq, self.held_out_windows)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    length: int,
    *,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
    multiple: int = 1,
) -> Tensor:
    """Continue `prompt` by `length` bytes.

    Every rank must call this together with the same arguments: each forward of a sharded model is a collective. Every
    rank draws the same bytes, because all seed alike.

    Args:
        model: Maps tokens [B, S] to logits [B, S, V], each from the tokens up to its own.
        prompt: Bytes to continue, int64, 1-D, at least one.
        length: Bytes to add.
        context: Longest input the model is shown, in bytes.
        multiple: What lengths of inputs are padded to a multiple of, within `context`. FP8 layers need 16.
        temperature: Zero takes the likeliest byte; larger values draw more freely.
        seed: Of the draws.

    Returns:
        Prompt and continuation, int64, 1-D, on the device of `prompt`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        shown = tokens[-context:]
        padded = F.pad(shown, (0, -len(shown) % multiple))  # after the end, where a causal model does not look
        logits = model(padded[None])[0, len(shown) - 1, :BYTES].float().cpu()
        if temperature > 0:
            following = torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator)
        else:
            following = logits.argmax(dim=0, keepdim=True)
        tokens = torch.cat((tokens, following.to(tokens.device)))
    return tokens
