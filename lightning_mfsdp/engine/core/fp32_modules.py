"""Modules that the policy keeps in float32 (`fp32_modules`): which parameters they have, and the casts around them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy

__all__ = ["casts_alike", "fp32_parameters"]


def casts_alike(members: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> bool:
    """Whether the unit casts what its modules are called with; False: they are kept in float32 and cast for themselves."""
    kept = [_matches("", member, policy.fp32_modules) for member in members]
    if any(kept) and not all(kept):
        raise ShardingError(
            f"fully_shard: policy.fp32_modules keeps some of {[type(member).__name__ for member in members]} in float32 and not all, "
            "but all inputs of a unit are cast to one dtype; make them separate units"
        )
    return not any(kept)


def fp32_parameters(module: nn.Module, policy: MixedPrecisionPolicy) -> set[int]:
    """Parameters of modules that the policy keeps in float32; hooks cast around those modules."""
    kept: set[int] = set()
    if not policy.fp32_modules:
        return kept
    for name, child in module.named_modules():
        own = list(child.parameters(recurse=False))
        if own and _matches(name, child, policy.fp32_modules) and not any(owner_of(parameter) for parameter in own):
            kept.update(id(parameter) for parameter in own)
            _compute_in_fp32(child, policy.compute_dtype)
    return kept


def _matches(name: str, module: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> bool:
    return any(fnmatch(name, item) if isinstance(item, str) else isinstance(module, item) for item in wanted)


def _compute_in_fp32(module: nn.Module, outside: torch.dtype | None) -> None:
    """Cast a module's inputs to float32, and its outputs back to `outside` or to the dtype the inputs came in."""
    entered: list[torch.dtype | None] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if outside is None:  # first, since the hook after the forward is called even if a cast raises
            entered.append(next((one.dtype for one in tensors_in((args, kwargs)) if one.dtype.is_floating_point), None))
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # a norm, at a third of the host time
            given = args[0]
            return (given.float() if given.dtype.is_floating_point else given,), kwargs
        return map_tensors(lambda tensor: _cast(tensor, torch.float32), (args, kwargs))

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        dtype = outside or entered.pop()
        if dtype is None:
            return output
        if isinstance(output, Tensor):
            return output.to(dtype) if output.dtype.is_floating_point else output
        return map_tensors(lambda tensor: _cast(tensor, dtype), output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
