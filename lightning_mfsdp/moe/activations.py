"""The activations of experts between their two projections, with explicit derivatives. On CUDA, kernels compute live rows only.

Probabilities are multiplied here and not after the second projection: so their gradient needs no output of the experts, and
tokens are combined by plain sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp.moe.saving import PagedRows

__all__ = ["ACTIVATIONS", "Activation", "ActivationName"]

ActivationName: TypeAlias = Literal["swiglu", "gelu"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A pointwise function of a projection.

    Attributes:
        name: "swiglu": `silu(gate) * up`, of a projection that is the gate and then the up part. "gelu": of the whole projection.
        width: Columns of the projection for each column of the result.
    """

    name: ActivationName
    width: int

    def forward(self, projected: Tensor, probabilities: Tensor, live: Tensor) -> Tensor:
        """The activation of each row, times its probability.

        Args:
            projected: `[rows, width * I]`.
            probabilities: `[rows]`.
            live: How many rows count, int64, 0-D. The others may hold anything, and so may the result there.

        Returns:
            `[rows, I]`, dtype of `projected`.
        """
        if projected.is_cuda and projected.dtype is not torch.float64:
            from lightning_mfsdp.moe.activation_kernels import scaled_activation

            return scaled_activation(self.name, projected, probabilities, live)
        wide, factor = _widened(projected, probabilities)
        return (self._value(wide) * factor).to(projected.dtype)

    def backward(
        self, projected: Tensor | PagedRows, probabilities: Tensor, grad: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` returned, recomputed, and the gradients of its arguments.

        Args:
            projected: `[rows, width * I]`, whole or in pages.
            probabilities: `[rows]`.
            grad: Of the result, `[rows, I]`.
            live: How many rows count.

        Returns:
            The result, `[rows, I]`; the gradient of `projected`; that of `probabilities`, `[rows]`, float32 or better.
        """
        if projected.device.type == "cuda" and projected.dtype is not torch.float64:
            from lightning_mfsdp.moe.activation_kernels import scaled_activation_backward

            return scaled_activation_backward(self.name, projected, probabilities, grad, live)
        projected = projected.whole() if isinstance(projected, PagedRows) else projected
        wide, factor = _widened(projected, probabilities)
        value, grad_value = self._value(wide), grad.to(wide.dtype)
        grad_wide = self._derivative(wide, grad_value * factor)
        return (
            (value * factor).to(projected.dtype),
            grad_wide.to(projected.dtype),
            (grad_value * value).sum(-1),
        )

    def _value(self, projected: Tensor) -> Tensor:
        if self.name == "gelu":
            return F.gelu(projected)
        gate, up = projected.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _derivative(self, projected: Tensor, grad: Tensor) -> Tensor:
        if self.name == "gelu":
            below = 0.5 * (1 + torch.erf(projected / math.sqrt(2)))
            density = torch.exp(-0.5 * projected.square()) / math.sqrt(2 * math.pi)
            return grad * (below + projected * density)
        gate, up = projected.chunk(2, dim=-1)
        opened = torch.sigmoid(gate)
        grad_gate = grad * up * opened * (1 + gate * (1 - opened))
        return torch.cat((grad_gate, grad * gate * opened), dim=-1)


def _widened(projected: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 or better; probabilities as a column."""
    wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
    return wide, probabilities.to(wide.dtype).unsqueeze(-1)


ACTIVATIONS: dict[ActivationName, Activation] = {
    "swiglu": Activation(name="swiglu", width=2),
    "gelu": Activation(name="gelu", width=1),
}
