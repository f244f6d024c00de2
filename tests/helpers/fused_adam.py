"""A stand-in for Transformer Engine's FusedAdam: the same names, state and step counter; it computes in plain PyTorch.

Like the library's, it counts steps by group, makes state for parameters without gradients too, and takes loaded state up in dtypes of
its own choice.
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
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.capturable, self.master_weights, self.use_decoupled_grad = capturable, master_weights, use_decoupled_grad
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

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
                    for key, dtype in self._dtypes().items():
                        state[key] = torch.zeros_like(parameter, dtype=dtype)
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad, state)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        first, second = group["betas"]
        mean = state["exp_avg"].float().mul_(first).add_(grad, alpha=1 - first)
        square = state["exp_avg_sq"].float().mul_(second).addcmul_(grad, grad, value=1 - second)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        denominator = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean / (1 - first ** group["step"]), denominator, value=-group["lr"])

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, values in state_dict["state"].items():
            made = {key: torch.empty_like(parameters[number], dtype=dtype) for key, dtype in self._dtypes().items()}
            for key, value in values.items():
                made[key].copy_(value)
            self.state[parameters[number]] = made


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
