"""LinearLossHead: the last layer of a language model as one module: hidden states in, loss or log-probabilities out.

A parameter of a sharded module is whole only while its unit runs, so what needs the weight must be computed in the forward of the module
that owns it.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.ops.cross_entropy import linear_cross_entropy
from lightning_mfsdp.ops.inputs import SoftmaxOptions, check_choice, check_fraction, check_not_negative
from lightning_mfsdp.ops.logprobs import linear_logprobs

__all__ = ["LinearLossHead"]


class LinearLossHead(nn.Linear):
    """A linear layer that also computes losses or log-probabilities of its logits, without storing all of them.

    It is a unit of its own under `fully_shard`: one gather in forward, one in backward. To tie it to an embedding, assign that one's
    parameter: `head.weight = embedding.weight`. A tensor axis divides it as "colwise"; what it computes is then of the whole vocabulary.

    Args:
        in_features: Width H.
        out_features: Size of the vocabulary V.
        bias: Whether there is one.
        temperature: As in `linear_logprobs`, as are the next four.
        softcap: See there.
        token_chunk: See there.
        sum_dtype: See there.
        ignore_index: See there.
        reduction: Of losses, as in `linear_cross_entropy`, as are the next two.
        label_smoothing: See there.
        z_loss: See there.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: A number out of its range.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        token_chunk: int | None = None,
        sum_dtype: torch.dtype | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        check_fraction("label_smoothing", label_smoothing)
        check_not_negative("z_loss", z_loss)
        self.options = SoftmaxOptions(
            temperature=temperature,
            softcap=softcap,
            token_chunk=token_chunk,
            sum_dtype=sum_dtype,
            ignore_index=ignore_index,
        )
        self.reduction: Literal["mean", "sum", "none"] = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss

    @overload
    def forward(
        self,
        input: Tensor,
        target: Tensor | None = ...,
        output: Literal["loss", "logprobs"] = ...,
        vocab_group: dist.ProcessGroup | None = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        output: Literal["logprobs_and_entropy"],
        vocab_group: dist.ProcessGroup | None = ...,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        output: Literal["loss", "logprobs", "logprobs_and_entropy"] = "loss",
        vocab_group: dist.ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the requested output.

        Args:
            input: Hidden states `[..., H]`.
            target: Token ids `[...]`; `None`: return the logits `[..., V]`, after softcap and temperature.
            output: "loss"; "logprobs" `[...]`; or a pair of these and entropies `[...]`.
            vocab_group: Its ranks have equal parts of the weight's rows, in order. Logits are those of this rank's part.

        Returns:
            The loss, 0-D unless the reduction is "none"; logits; log-probabilities; or the pair.

        Raises:
            ValueError: As `linear_logprobs`, or the output is unknown.
        """
        check_choice("output", output, ("loss", "logprobs", "logprobs_and_entropy"))
        options = self.options
        if target is None:
            logits = F.linear(input, self.weight, self.bias)
            if options.softcap is not None:
                logits = options.softcap * torch.tanh(logits / options.softcap)
            return logits if options.temperature == 1.0 else logits / options.temperature
        if output == "loss":
            return linear_cross_entropy(
                input,
                self.weight,
                target,
                bias=self.bias,
                temperature=options.temperature,
                softcap=options.softcap,
                token_chunk=options.token_chunk,
                sum_dtype=options.sum_dtype,
                ignore_index=options.ignore_index,
                vocab_group=vocab_group,
                reduction=self.reduction,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
            )
        logprobs, entropy = linear_logprobs(
            input,
            self.weight,
            target,
            bias=self.bias,
            temperature=options.temperature,
            softcap=options.softcap,
            token_chunk=options.token_chunk,
            sum_dtype=options.sum_dtype,
            ignore_index=options.ignore_index,
            vocab_group=vocab_group,
            return_entropy=True,
        )
        return logprobs if output == "logprobs" else (logprobs, entropy)
