"""AdamW with moments in bfloat16, rounded stochastically: 8 bytes a parameter for main weight and state where torch's takes 12."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from lightning_mfsdp.engine import ElementwiseOptimizer
from lightning_mfsdp.optim.adamw_rule import Rule, step_

__all__ = ["AdamW", "rule_for"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(ElementwiseOptimizer):
    """`torch.optim.AdamW`, the same rule, with moments that take half the memory.

    A moment in bfloat16 has 8 bits. One step of `betas[1]=0.999` changes the second moment by a thousandth of it, which is less than the
    last of these bits, so that rounded to the nearest it could grow and never shrink. Here it is rounded up or down at random, with
    chances such that the mean is exact. The random bits are computed from weight, gradient and step, not from a generator: the same on
    every rank that holds the number, on every mesh, after every resumption, on CPUs and on GPUs.

    A step reads weight, gradient and moments once and writes them once, in one Triton kernel on GPUs. It is elementwise: any sharding and
    CPU offload work. State has the names that `torch.optim.AdamW` gives it, so each continues from checkpoints of the other.

    Args:
        params: Parameters of real numbers, or parameter groups.
        lr: Learning rate.
        betas: Shares of the old moments that are kept.
        eps: Added to the root of the second moment.
        weight_decay: Of the weights, decoupled from the gradient, times `lr`.
        maximize: Ascend.
        state_dtype: Of the moments: "bfloat16", or "float32", which rounds as `torch.optim.AdamW` does. It is no part of a checkpoint:
            what is loaded is converted.

    Raises:
        ValueError: An option out of its range, or a complex parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        state_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    ) -> None:
        if state_dtype not in _DTYPES:
            raise ValueError(f'AdamW: option state_dtype={state_dtype!r}: expected "bfloat16" or "float32"')
        self.state_dtype = state_dtype
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying."""
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also convert moments after `load_state_dict`, which gives them the dtype of their parameters."""
        super().__setstate__(state)
        for group in self.param_groups:
            _check_options(group)
            group.setdefault("maximize", False)
        for values in self.state.values():
            for name in _MOMENTS:
                if name in values:
                    values[name] = values[name].to(_DTYPES[self.state_dtype])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Raises:
            ValueError: As the constructor.
        """
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss and gradients again; its result is returned.

        Raises:
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter, parameter.grad)
        return loss

    def _step_one(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise ValueError(
                f"AdamW.step: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: expected a dense one. Make the "
                "layer with sparse=False"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")  # as torch.optim.AdamW has it without `capturable`
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=_DTYPES[self.state_dtype])
        state["step"] += 1
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        weight, gradient, mean, variance = (
            _local(tensor) for tensor in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        )
        rule_for(weight, gradient)(weight, gradient, mean, variance, Rule.of(group, int(state["step"])))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rule_for(weight: Tensor, gradient: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Rule], None]:
    """The kernel on GPUs, for tensors without gaps up to 32 bits a number; otherwise `step_`."""
    is_dense = weight.is_contiguous() and gradient.is_contiguous()
    if weight.is_cuda and is_dense and weight.dtype is not torch.float64 and _has_triton():
        from lightning_mfsdp.optim.adamw_kernel import step_in_one_pass_

        return step_in_one_pass_
    return step_


@cache
def _has_triton() -> bool:
    is_installed = importlib.util.find_spec("triton") is not None
    if not is_installed:
        warnings.warn(
            "triton is not installed, so lightning_mfsdp.optim.AdamW on GPUs takes thirty PyTorch operations a tensor and more memory; "
            "install triton",
            stacklevel=2,
        )
    return is_installed


def _check_options(group: Mapping[str, Any]) -> None:
    expectations: dict[str, tuple[bool, str]] = {
        "lr": (float(group["lr"]) >= 0, "a number of at least 0"),
        "betas": (
            len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"]),
            "two numbers from 0 to below 1",
        ),
        "eps": (group["eps"] >= 0, "a number of at least 0"),
        "weight_decay": (group["weight_decay"] >= 0, "a number of at least 0"),
        "amsgrad": (not group.get("amsgrad"), "False: the largest second moment is not kept here"),
    }
    for name, (fits, expected) in expectations.items():
        if not fits:
            raise ValueError(f"AdamW: option {name}={group[name]!r}: expected {expected}")


def _check_parameters(group: Mapping[str, Any]) -> None:
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise ValueError(
                f"AdamW: a parameter of shape {tuple(parameter.shape)} has dtype {parameter.dtype}: expected real floating-point numbers. "
                "Use torch.optim.AdamW for it"
            )
