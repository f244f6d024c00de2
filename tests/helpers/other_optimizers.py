"""Optimizers that neither PyTorch nor this package has, short and as their papers say. Written for tests: no options that no test uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ADOPT", "SOAP", "Adan", "LowBitAdam", "Prodigy", "Shampoo"]


class _Rule(torch.optim.Optimizer):
    """Calls `update` with each parameter that has a gradient, its state and the options of its group."""

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    self.update(parameter, parameter.grad, state, group)
        return loss

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Adan(_Rule):
    """Adaptive Nesterov momentum (Xie and others, 2022, algorithm 1, with bias correction). Elementwise."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, weight_decay: float = 0.02) -> None:
        super().__init__(params, lr=lr, betas=(0.02, 0.08, 0.01), eps=1e-8, weight_decay=weight_decay)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two, three = group["betas"]
        if state["step"] == 1:
            state.update({key: torch.zeros_like(parameter) for key in ("mean", "change", "square")})
            state["last"] = grad.clone()
        step = state["step"]
        difference = grad - state["last"]
        state["mean"].mul_(1 - one).add_(grad, alpha=one)
        state["change"].mul_(1 - two).add_(difference, alpha=two)
        looked_ahead = grad + (1 - two) * difference
        state["square"].mul_(1 - three).addcmul_(looked_ahead, looked_ahead, value=three)
        state["last"].copy_(grad)
        size = (state["square"] / (1 - (1 - three) ** step)).sqrt_().add_(group["eps"])
        mean, change = state["mean"] / (1 - (1 - one) ** step), state["change"] / (1 - (1 - two) ** step)
        parameter.data.addcdiv_(mean + (1 - two) * change, size, value=-group["lr"])
        parameter.data.div_(1 + group["lr"] * group["weight_decay"])


class ADOPT(_Rule):
    """Adam that divides before it averages, clipped (Taniguchi and others, 2024, algorithm 2). Elementwise."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.9999), eps=1e-6)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        if state["step"] == 1:
            state["mean"], state["square"] = torch.zeros_like(parameter), grad * grad.conj()
            return
        size = torch.clamp(state["square"].sqrt(), group["eps"])
        bound = (state["step"] - 1) ** 0.25
        state["mean"].lerp_(grad.div(size).clamp_(-bound, bound), 1 - one)
        parameter.add_(state["mean"], alpha=-group["lr"])
        state["square"].mul_(two).addcmul_(grad, grad.conj(), value=1 - two)


class LowBitAdam(_Rule):
    """AdamW with moments in 8 bits, a scale for each block of a row (Dettmers and others, 2021, with evenly spaced codes).

    Blocks end where rows end, so that rows by themselves are treated as in the whole tensor.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, block: int = 4) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, block=block)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        block = math.gcd(group["block"], parameter.shape[-1] if parameter.dim() > 1 else 1)
        if state["step"] == 1:
            for key in ("mean", "square"):
                state[f"{key}_codes"] = torch.zeros_like(parameter, dtype=torch.int8)
                state[f"{key}_scale"] = parameter.new_zeros(parameter.numel() // block, 1)
        moments = {}
        for key, value, beta in zip(("mean", "square"), (grad, grad.square()), group["betas"], strict=True):
            codes, scale = state[f"{key}_codes"], state[f"{key}_scale"]
            moment = (codes.view(-1, block) * scale).view(parameter.shape).lerp(value, 1 - beta)
            blocks = moment.view(-1, block)
            scale.copy_(blocks.abs().amax(1, keepdim=True) / 127)
            codes.copy_((blocks / scale.clamp(min=1e-30)).round().view(parameter.shape))
            moments[key] = moment / (1 - beta ** state["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(moments["mean"], moments["square"].sqrt() + group["eps"], value=-group["lr"])


class Prodigy(torch.optim.Optimizer):
    """Adam whose step size is estimated from all parameters together (Mishchenko and Defazio, 2023, algorithm 4)."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, d0: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "d": d0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            one, two = group["betas"]
            d, lr = group["d"], group["lr"]
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            numerator, denominator = group["numerator"] * math.sqrt(two), 0.0
            for parameter in trained:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["start"] = parameter.detach().clone()
                    state.update({key: torch.zeros_like(parameter) for key in ("mean", "square", "weighted")})
                numerator += (
                    (1 - math.sqrt(two))
                    * lr
                    * d**2
                    * torch.dot(grad.flatten(), (state["start"] - parameter).flatten()).item()
                )
                state["mean"].mul_(one).add_(grad, alpha=(1 - one) * d)
                state["square"].mul_(two).addcmul_(grad, grad, value=(1 - two) * d**2)
                state["weighted"].mul_(math.sqrt(two)).add_(grad, alpha=(1 - math.sqrt(two)) * lr * d**2)
                denominator += state["weighted"].abs().sum().item()
            group["numerator"] = numerator
            if denominator:
                group["d"] = max(d, numerator / denominator)
            for parameter in trained:
                state = self.state[parameter]
                parameter.addcdiv_(state["mean"], state["square"].sqrt() + d * group["eps"], value=-lr * d)
        return loss


def _power(matrix: Tensor, exponent: float, eps: float) -> Tensor:
    """Of a symmetric matrix that has no negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0).add(eps).pow(exponent)) @ vectors.T


class Shampoo(_Rule):
    """Gradients of matrices between inverse fourth roots of their sums of products, rows and columns (Gupta and others, 2018).

    Vectors are matrices of one column.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr, eps=1e-3)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        matrix = grad.reshape(len(grad), -1)
        if state["step"] == 1:
            state["left"] = torch.zeros(matrix.shape[0], matrix.shape[0], dtype=grad.dtype)
            state["right"] = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=grad.dtype)
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        left, right = (_power(state[side], -0.25, group["eps"]) for side in ("left", "right"))
        parameter.sub_((left @ matrix @ right).view_as(parameter), alpha=group["lr"])


class SOAP(_Rule):
    """Adam in the eigenbasis of Shampoo's matrix, found anew every `every` steps (Vyas and others, 2024, the one-sided variant).

    The side is the shorter one: on the longer one many directions have no gradient, and their basis would be any. The first step finds
    the basis and moves nothing, as the authors do it. Vectors take plain Adam. Its state is in row-major order, as sharded checkpoints
    give it back: products of the same numbers in another order differ in the last bit.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, every: int = 2) -> None:
        super().__init__(params, lr=lr, betas=(0.95, 0.95), eps=1e-8, every=every)

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        is_tall = grad.dim() == 2 and grad.shape[0] > grad.shape[1]
        parameter, grad = (parameter.T, grad.T) if is_tall else (parameter, grad)
        if state["step"] == 1:
            state["mean"], state["square"] = (
                torch.zeros_like(grad, memory_format=torch.contiguous_format) for _ in range(2)
            )
            if grad.dim() == 2:
                state["products"] = grad @ grad.T
                state["basis"] = torch.linalg.eigh(state["products"])[1].contiguous()
                return
        basis = state.get("basis")
        turned = grad if basis is None else basis.T @ grad
        state["mean"].lerp_(grad, 1 - one)
        state["square"].lerp_(turned.square(), 1 - two)
        mean = state["mean"] if basis is None else basis.T @ state["mean"]
        size = (state["square"] / (1 - two ** state["step"])).sqrt().add_(group["eps"])
        update = mean / (1 - one ** state["step"]) / size
        parameter.sub_(update if basis is None else basis @ update, alpha=group["lr"])
        if grad.dim() == 2:
            state["products"].lerp_(grad @ grad.T, 1 - two)
            if state["step"] % group["every"] == 0:
                state["basis"] = torch.linalg.eigh(state["products"])[1].contiguous()
