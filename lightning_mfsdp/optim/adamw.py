"""AdamW with moments of 2 bytes or 1, rounded stochastically: 8 or 6 bytes a parameter for main weight and state where torch's takes 12."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from lightning_mfsdp.base.kernels import has_triton
from lightning_mfsdp.engine import ElementwiseOptimizer
from lightning_mfsdp.optim.adamw_rule import Rule, divided, joined, step_
from lightning_mfsdp.optim.moment_codes import decoded, encoded

__all__ = ["AdamW", "function_for"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {
    "bfloat16": dict.fromkeys(_MOMENTS, torch.bfloat16),
    "float32": dict.fromkeys(_MOMENTS, torch.float32),
    "8bit": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},  # codes: see moment_codes.py
}
_REMAINDER, _MASTER = "remainder", "master_param"
_WITHOUT = "lightning_mfsdp.optim.AdamW on GPUs takes thirty PyTorch operations a tensor, and more memory"
# What is in the groups of torch.optim.AdamW as well: programs that compare names (torch.distributed.checkpoint) then take either's state.
_OF_TORCH: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class AdamW(ElementwiseOptimizer):
    """`torch.optim.AdamW`, the same rule, with moments that take half the memory or a quarter, and weights in bfloat16 that lose no update.

    A moment in bfloat16 has 8 bits. One step of `betas[1]=0.999` changes the second moment by a thousandth of it, which is less than the
    last of these bits, so that rounded to the nearest it could grow and never shrink. Here it is rounded up or down at random, with
    chances such that the mean is exact. The random bits are computed from weight, gradient and step, not from a generator: the same on
    every rank that holds the number, on every mesh, after every resumption, on CPUs and on GPUs.

    A step reads weight, gradient and moments once and writes them once, in one Triton kernel on GPUs. It is elementwise: any sharding and
    CPU offload work. State has the names that `torch.optim.AdamW` gives it, so each continues from checkpoints of the other.

    In 8 bits a second moment is a code of its root, and a first one a share of that: no scales of blocks, so each number is rounded by
    itself here as well. `state` has the codes, `state_dict()` has moments in bfloat16, which have the same codes when they are loaded.
    Codes reach to 1365 for the root of the second moment: larger gradients, of summed losses for example, take longer steps.

    A weight in bfloat16, of `precision="bf16-true"` for example, loses updates of less than half of its last digit. With
    `store_param_remainders=True` state has what each lacks of a weight in float32, 2 bytes, and training is that of weights in float32.
    `state_dict()` has these weights, under the name that Transformer Engine gives them, "master_param".

    Gradients of such weights are rounded to bfloat16 for the step, as `.grad` has the dtype of its parameter. With
    `use_decoupled_grad=True` it has the dtype in which gradients were summed (`main_grads_dtype`), and no copy is made.

    Args:
        params: Parameters of real numbers, or parameter groups.
        lr: Learning rate.
        betas: Shares of the old moments that are kept.
        eps: Added to the root of the second moment.
        weight_decay: Of the weights, decoupled from the gradient, times `lr`.
        maximize: Ascend.
        state_dtype: Of the moments: "bfloat16"; "8bit"; or "float32", which rounds as `torch.optim.AdamW` does for weights in float32. It
            is no part of a checkpoint: what is loaded is converted.
        store_param_remainders: Keep what weights in bfloat16 lack of float32, under the name "remainder". Others have none.
        use_decoupled_grad: Under this package have gradients in `main_grads_dtype`, in `.grad`. Elsewhere it changes nothing.

    Raises:
        ValueError: An option out of its range or not of this optimizer, a complex parameter, or weights in float64 with moments in 8 bits.
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
        state_dtype: Literal["bfloat16", "8bit", "float32"] = "bfloat16",
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        if state_dtype not in _DTYPES:
            raise ValueError(f'AdamW: option state_dtype={state_dtype!r}: expected "bfloat16", "8bit" or "float32"')
        self.state_dtype, self.store_param_remainders = state_dtype, store_param_remainders
        self.use_decoupled_grad = use_decoupled_grad  # the engine asks for it
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**defaults, **_OF_TORCH})

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying."""
        names = ("state_dtype", "store_param_remainders", "use_decoupled_grad")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the end of `load_state_dict`: moments take this optimizer's dtype."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            group.update(_OF_TORCH)  # how another optimizer computed its steps
        held: Mapping[Any, Any] = self.state  # what belongs to no parameter is loaded as it is
        for parameter, values in held.items():
            if isinstance(parameter, Tensor):
                self._take(parameter, values)

    def _take(self, parameter: Tensor, values: dict[str, Any]) -> None:
        for name, value in values.items():
            values[name] = value.value if isinstance(value, _Kept) else value
        if isinstance(step := values.get("step"), (int, float, Tensor)):
            values["step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")
        master, remainder = (values.pop(name, None) for name in (_MASTER, _REMAINDER))
        if not self._keeps_remainder(parameter):
            if master is not None or remainder is not None:
                warnings.warn(
                    "AdamW: the state that is loaded has weights in float32, which are left out, so weights go on from what they are "
                    "in bfloat16; to keep them, have weights in bfloat16 and pass store_param_remainders=True",
                    stacklevel=2,
                )
        elif isinstance(master, Tensor):
            values[_REMAINDER] = _like(master, divided(_local(master).float())[1])
        elif remainder is not None:
            values[_REMAINDER] = remainder
        for name in (*_MOMENTS, _REMAINDER):
            if isinstance(value := values.get(name), Tensor):
                values[name] = value.to(parameter.device)
        if self.state_dtype == "8bit":
            _encode(values)
        else:
            values.update(_values(values))
            for name, dtype in _DTYPES[self.state_dtype].items():
                if isinstance(value := values.get(name), Tensor):
                    values[name] = value.to(dtype)

    def _keeps_remainder(self, parameter: Tensor) -> bool:
        return self.store_param_remainders and parameter.dtype is torch.bfloat16

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer. Moments of 8 bits are shown by their values in bfloat16, and remainders as weights in float32."""
        # The first one, which has what is stepped: others may show it otherwise.
        handle = self.register_state_dict_post_hook(_show_values, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this optimizer, or of `torch.optim.AdamW`; moments of any dtype.

        Raises:
            ValueError: It is another optimizer's, or was made with an option that is not here. Nothing has changed then.
        """
        handle = self.register_load_state_dict_pre_hook(_check_and_keep)  # the last one: others may make a state fit
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Raises:
            ValueError: As the constructor.
        """
        for name in ("state_dtype", "store_param_remainders", "use_decoupled_grad", *_OF_TORCH):
            if param_group.get(name) not in (None, False, _OF_TORCH.get(name)):
                raise ValueError(
                    f"AdamW: option {name}={param_group[name]!r} of a parameter group: expected none of that name; leave it out"
                )
        super().add_param_group(param_group)
        try:
            _check_rule(self.param_groups[-1])
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1], self.state_dtype)
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
            if group["capturable"]:
                raise ValueError(
                    "AdamW: option capturable=True: expected False, as the number of the step is read on the host; to record a step in a "
                    "CUDA graph use torch.optim.AdamW"
                )
            rules: dict[int, Rule] = {}
            lr = float(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _refuse_sparse(parameter, parameter.grad)
                    values = self._state_of(parameter)
                    step = int(values["step"])
                    rule = rules.get(step)
                    if rule is None:
                        rule = rules[step] = Rule.of(group, lr, step)
                    _step(parameter, parameter.grad, values, rule)
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Its state, with the number of the step that begins."""
        values: dict[str, Any] = self.state[parameter]
        if not values:
            values["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for name, dtype in _DTYPES[self.state_dtype].items():
                values[name] = torch.zeros_like(parameter, dtype=dtype)
        if not self._keeps_remainder(parameter):  # the program may have converted the weight
            values.pop(_REMAINDER, None)
        elif _REMAINDER not in values:
            values[_REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16)
        values["step"] += 1
        return values


def _show_values(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The first hook after a state was collected."""
    held = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    state = {
        key: _shown(held[key], values) if key in held and isinstance(values, Mapping) else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _shown(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    shown = {**values, **_values(values)}
    remainder = shown.pop(_REMAINDER, None)
    if (
        isinstance(remainder, Tensor) and parameter.dtype is torch.bfloat16
    ):  # else the program has converted the weight since
        shown[_MASTER] = _like(remainder, joined(_local(parameter), _local(remainder)))
    return shown


def _values(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Moments by their values in bfloat16; empty where they are no codes."""
    mean, variance = (values.get(name) for name in _MOMENTS)
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor) and mean.dtype is torch.int8):
        return {}
    moments = zip(_MOMENTS, decoded(_local(mean), _local(variance)), strict=True)
    return {name: _like(values[name], value, torch.bfloat16) for name, value in moments}


def _encode(values: dict[str, Any]) -> None:
    """Have moments by their codes."""
    mean, variance = (values.get(name) for name in _MOMENTS)
    if isinstance(mean, Tensor) and isinstance(variance, Tensor) and mean.is_floating_point():
        for name, codes in zip(_MOMENTS, encoded(_local(mean), _local(variance)), strict=True):
            values[name] = _like(values[name], codes)


def _like(tensor: Tensor, local: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Local numbers as a tensor of the class and placement of another one."""
    made = torch.empty_like(tensor, dtype=dtype or local.dtype)
    _local(made).copy_(local)
    return made


class _Kept:
    """State that is loaded. As a tensor it would be given the dtype of its parameter first, and lose what that does not have."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _check_and_keep(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The hook before a state is loaded."""
    for group in state_dict["param_groups"]:
        _check_rule(group)
    held = {key for group in state_dict["param_groups"] for key in group["params"]}

    def kept(name: str, value: Any) -> Any:
        is_kept = name in (*_MOMENTS, _REMAINDER, _MASTER) and isinstance(value, Tensor)
        return _Kept(value) if is_kept else value

    state = {
        key: {name: kept(name, value) for name, value in values.items()}
        if key in held and isinstance(values, Mapping)
        else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _refuse_sparse(parameter: Tensor, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise ValueError(
            f"AdamW.step: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: expected a dense one. Make the "
            "layer with sparse=False"
        )


def _step(parameter: Tensor, gradient: Tensor, values: Mapping[str, Any], rule: Rule) -> None:
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    state = [_local(values[name]) for name in (*_MOMENTS, _REMAINDER) if name in values]
    weight, gradient, (mean, variance, *remainder) = _local(parameter), _local(gradient), state
    function_for(weight, gradient, *state)(weight, gradient, mean, variance, rule, *remainder)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def function_for(weight: Tensor, *others: Tensor) -> Callable[..., None]:
    """The kernel on GPUs, for tensors without gaps up to 32 bits a number; otherwise `step_`."""
    is_dense = weight.is_contiguous() and all(tensor.is_contiguous() for tensor in others)
    if weight.is_cuda and is_dense and weight.dtype is not torch.float64 and has_triton(_WITHOUT):
        from lightning_mfsdp.optim.adamw_kernel import step_in_one_pass_

        return step_in_one_pass_
    return step_


def _check_rule(group: Mapping[str, Any]) -> None:
    """Whether these are options of AdamW, of either kind."""
    if lacking := [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]:
        raise ValueError(
            f"AdamW: expected options lr, betas, eps and weight_decay, and {', '.join(lacking)} are not there: this is the state of "
            "another optimizer; load it into one of its class"
        )
    _expect(
        group,
        amsgrad=(not group.get("amsgrad"), "False: the largest second moment is not kept here"),
        decoupled_weight_decay=(
            group.get("decoupled_weight_decay", True),
            "True: decay is not added to gradients here",
        ),
    )


def _check_options(group: Mapping[str, Any]) -> None:
    """Whether a program may begin with them; a schedule may leave others."""
    betas = group["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    _expect(
        group,
        lr=(_is_number(group["lr"]) and group["lr"] >= 0, "a number of at least 0"),
        betas=(pair and all(_is_number(beta) and 0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
        eps=(_is_number(group["eps"]) and group["eps"] >= 0, "a number of at least 0"),
        weight_decay=(_is_number(group["weight_decay"]) and group["weight_decay"] >= 0, "a number of at least 0"),
    )


def _expect(group: Mapping[str, Any], **expectations: tuple[Any, str]) -> None:
    for name, (fits, expected) in expectations.items():
        if not fits:
            raise ValueError(f"AdamW: option {name}={group[name]!r}: expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _check_parameters(group: Mapping[str, Any], state_dtype: str) -> None:
    for parameter in group["params"]:
        if parameter.dtype is torch.float64 and state_dtype == "8bit":
            raise ValueError(
                f"AdamW: a parameter of shape {tuple(parameter.shape)} has dtype torch.float64 and its moments 8 bits: expected weights of "
                'at most 32 bits; use state_dtype="float32"'
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"AdamW: a parameter of shape {tuple(parameter.shape)} has dtype {parameter.dtype}: expected real floating-point numbers. "
                "Use torch.optim.AdamW for it"
            )
