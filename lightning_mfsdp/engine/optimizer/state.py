"""Converts optimizer state between what `state_dict()` and `load_state_dict()` have, DTensors as with FSDP2, and plain local rows.

State that is shaped like a parameter is shown as a DTensor of the parameter's shape, over the optimizer's memory; so
`torch.distributed.checkpoint` and its `get_state_dict` see which rows are where. All ranks show the same: one without rows of a parameter
has an empty gradient of it, steps that as any other, and so has its state, over no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.group import as_sharded
from lightning_mfsdp.engine.core.parameter import is_left_behind
from lightning_mfsdp.engine.core.rows_exchange import sharded_alike
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor

__all__ = ["as_shown", "has_shape", "refuse_left_behind", "show_state", "take_state", "taken"]

# State of PyTorch's optimizers that is one number for a parameter of any shape. Only for 0-D parameters the shape is ambiguous.
_NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))


def show_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What `state_dict()` returns, as users see it."""
    held = [as_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    shown = dict(enumerate(held))
    state = {
        number: {key: as_shown(key, value, parameter) for key, value in values.items()}
        if (parameter := shown.get(number)) is not None
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def take_state(state_dict: dict[str, Any], held: Sequence[Tensor]) -> dict[str, Any]:
    """What `load_state_dict()` takes, as the optimizer keeps it. Collective for DTensors whose rows are not placed as in the layout.

    Args:
        state_dict: The user's.
        held: What `param_groups` hold, in order: local rows, or sharded parameters.
    """
    state = dict(state_dict["state"])
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    # PyTorch refuses another number of them.
    for key, parameter in zip(saved, held, strict=False):
        if (shown := as_sharded(parameter)) is not None and isinstance(state.get(key), Mapping):
            plain = {name: taken(name, value, shown) for name, value in state[key].items()}
            if isinstance(parameter, ShardedTensor):
                plain = {name: as_shown(name, value, shown) for name, value in plain.items()}
            state[key] = plain
    return {**state_dict, "state": state}


def refuse_left_behind(optimizer: Optimizer, what: str) -> None:
    """Raise if the module of an optimizer is plain again, and so has other parameters. It may also just be deleted.

    Args:
        optimizer: Any adopted optimizer.
        what: The method that was called.
    """
    if any(is_left_behind(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ShardingError(
            f"{type(optimizer).__name__}.{what}: unshard_model made the module plain whose rows the optimizer holds, so it has nothing to "
            "step any more; build a new optimizer from module.parameters(). State that it shall go on with is taken before unshard_model: "
            "get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))"
        )


def has_shape(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether state has the shape that a parameter has, whole or here, because it has a number for each of its numbers."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key not in _NUMBERS)


def as_shown(key: str, value: Any, parameter: ShardedParameter) -> Any:
    """State of local rows as users see it: a DTensor over the same memory, where it is shaped like them, of no class of its own."""
    is_plain = type(value) in (Tensor, nn.Parameter) and has_shape(key, value, parameter._local_tensor.shape)
    return ShardedTensor.over(value, parameter) if is_plain else value


def taken(key: str, value: Any, parameter: ShardedParameter) -> Any:
    """State of whichever representation as that of local rows: plain. Collective for DTensors whose rows lie otherwise than these."""
    local_shape, shape = parameter._local_tensor.shape, parameter.shape
    if isinstance(value, ShardedTensor) and sharded_alike(value, parameter):
        value = value._local_tensor  # itself, and not a view of it
    elif isinstance(value, DTensor):
        value = value.full_tensor()
    if local_shape != shape and has_shape(key, value, shape):
        value = parameter.of_whole(value).clone()
    return value
