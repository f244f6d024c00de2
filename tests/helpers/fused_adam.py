"""A stand-in for Transformer Engine's FusedAdam: the same names, state and step counter; it computes in plain PyTorch.

Like the library's, it counts steps by group, makes state for parameters without gradients too, takes loaded state up in dtypes of
its own choice, and has no eyes for `.grad` when it is to read `decoupled_grad`. Of a float32 weight in two halves it rounds the upper one
by the sign of the lower one, which has to be there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
        store_param_remainders: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.capturable, self.master_weights, self.use_decoupled_grad = capturable, master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype

    def _dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        found = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        if self.master_weights:
            found["master_param"] = torch.int16 if parameter.dtype is torch.bfloat16 else torch.float32
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if self.use_decoupled_grad:
                parameter.decoupled_grad = None
            else:
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    for key, dtype in self._dtypes(parameter).items():
                        state[key] = torch.zeros_like(parameter, dtype=dtype)
                name = "decoupled_grad" if self.use_decoupled_grad else "grad"
                grad = getattr(parameter, name, None)
                if grad is not None:
                    self._update(group, parameter, grad.float(), state)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        first, second = group["betas"]
        mean = state["exp_avg"].float().mul_(first).add_(grad, alpha=1 - first)
        square = state["exp_avg_sq"].float().mul_(second).addcmul_(grad, grad, value=1 - second)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        denominator = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        halves = self.store_param_remainders and parameter.dtype is torch.bfloat16
        remainder = state["master_param"] if halves else None
        weight = joined(parameter, remainder) if halves else parameter.float()
        weight = weight.mul(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean / (1 - first ** group["step"]), denominator, value=-group["lr"])
        if halves:
            split(weight, parameter, remainder)
        else:
            parameter.copy_(weight)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, values in state_dict["state"].items():
            dtypes = self._dtypes(parameters[number])
            made = {}
            for key, value in values.items():
                dtype = dtypes.get(key, torch.float32)
                assert value.dtype is torch.int16 or dtype is not torch.int16
                made[key] = torch.empty_like(parameters[number], dtype=dtype).copy_(value)
            self.state[parameters[number]] = made


def joined(upper: Tensor, lower: Tensor | None) -> Tensor:
    """The float32 weight of a bfloat16 one and its other 16 bits."""
    assert lower is not None
    bits = upper.view(torch.int16).int() - (lower < 0).int()
    return (bits * 2**16 + (lower.int() & 0xFFFF)).view(torch.float32)


def split(weight: Tensor, upper: Tensor, lower: Tensor | None) -> None:
    """Write both halves."""
    assert lower is not None
    bits = weight.view(torch.int32)
    lower.copy_(((bits & 0xFFFF) ^ 0x8000) - 0x8000)
    upper.view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
