"""Refuses what cannot be computed with parts of weights, before anything is changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set

from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part
from lightning_mfsdp.tensor_parallel.styles import Target, is_linear

__all__ = ["check_attention", "check_experts", "check_own_parameters", "check_ties"]

_ATTENTION = re.compile(r"Attention|Attn|MHA")
# Attributes by which a forward would shape the parts of heads as if they were all heads.
_HEAD_COUNTS = re.compile(r"^(n|num)_(\w+_)?heads?$")
_COUNTS = {"num_attention_heads": "query heads", "num_key_value_heads": "KV heads"}


def check_attention(target: Target, parts: Mapping[str, Part], size: int) -> None:
    """Check the attention module around a linear layer whose outputs are divided among ranks.

    Raises:
        ShardingError: Heads would be divided, the forward counts on all of them, or attention drops weights at random.
    """
    layer, weight = target.parent, parts.get("weight")
    if not is_linear(target.module) or weight is None or weight.dim:
        return
    path = target.name.rpartition(".")[0] or "the model"
    head_dim = getattr(layer, "head_dim", None)
    heads = sum(weight.sections) // head_dim if isinstance(head_dim, int) else size
    if heads % size:
        raise ShardingError(
            f"{target.name}: {heads} heads of {head_dim} numbers cannot be divided over {size} tensor ranks. Use a smaller tensor size."
        )
    if not _ATTENTION.search(type(layer).__name__):
        return
    for key, meaning in _COUNTS.items():
        count = getattr(getattr(layer, "config", None), key, None)
        if isinstance(count, int) and count % size:
            raise ShardingError(
                f"{path} ({type(layer).__name__}): its {count} {meaning} cannot be divided over {size} tensor ranks. Use a smaller tensor"
                " size."
            )
    if read := [name for name in inspect.unwrap(type(layer).forward).__code__.co_names if _HEAD_COUNTS.match(name)]:
        raise ShardingError(
            f"{path} ({type(layer).__name__}): its forward reads {read[0]}, the number of heads of the whole layer, and a tensor rank has"
            " a part of them. Have it infer that number: view(..., -1, head_dim)."
        )
    for key, probability in _dropouts(layer):
        raise ShardingError(
            f"{path} ({type(layer).__name__}): {key}={probability:g}: dropout of attention weights with tensor > 1 would be equal for the"
            " heads of different ranks. Set it to 0."
        )


def _dropouts(layer: nn.Module) -> Iterator[tuple[str, float]]:
    """Probabilities other than 0, except that of a layer's output, which is whole."""
    attributes = {**vars(layer), **{key: getattr(child, "p", None) for key, child in layer.named_children()}}
    for key, value in attributes.items():
        if "drop" in key and "resid" not in key and isinstance(value, float) and value > 0:
            yield key, value


def check_own_parameters(target: Target, ruled: Set[tuple[int, str]]) -> None:
    """Check the parameters of the module around a layer whose outputs are divided.

    Args:
        target: Of the layer.
        ruled: Parameters that rules are for: ids of their modules, and their names in them.

    Raises:
        ShardingError: The module has parameters of its own, which may meet whole or divided tensors, and no rule says which.
    """
    path = target.name.rpartition(".")[0]
    for key, _ in target.parent.named_parameters(recurse=False):
        if (id(target.parent), key) not in ruled:
            raise ShardingError(
                f"{path or 'the model'} ({type(target.parent).__name__}): its parameter {key} is beside layers that are divided, and the"
                f' plan has no rule for it. Add one for "{path}.{key}": "colwise" to divide it, "replicated_with_grad_allreduce" if it is'
                ' used whole with the parts of this rank, "replicate" if with whole tensors.'
            )


def check_experts(target: Target, parts: Mapping[str, Part]) -> None:
    """Check a module whose own parameters are weights of experts, all of which are divided.

    Args:
        target: Of a rule "moe_tp_experts".
        parts: Of its own parameters, by name.

    Raises:
        ShardingError: A parameter stays whole, or the layout of the weights does not suit the rules.
    """
    experts = target.module
    kind = f"{target.name} ({type(experts).__name__})"
    for key, parameter in experts.named_parameters(recurse=False):
        if key not in parts:
            raise ShardingError(
                f"{kind}: no rule divides {key} of shape {list(parameter.shape)}, so every tensor rank would add all of it. Add a rule,"
                " or leave out those of its experts."
            )
    if getattr(experts, "has_post_expert_norm", False):
        raise ShardingError(
            f"{kind}: it normalizes the outputs of experts, which are terms of a sum on a tensor rank. Leave"
            " out the rules for its experts."
        )
    if not getattr(experts, "is_concatenated", True):
        raise ShardingError(
            f"{kind}: gate and up alternate in its weights, and the style divides one after the other. Leave"
            " out the rules for its experts."
        )


def check_ties(model: nn.Module, targets: Sequence[tuple[Target, Mapping[str, Part]]]) -> None:
    """Check that parameters which several modules share are divided alike in all of them.

    Raises:
        ShardingError: They would be divided in one module and not in another, or differently.
    """
    planned = {(id(target.module), key): part for target, parts in targets for key, part in parts.items()}
    seen: dict[int, tuple[str, Part | None]] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, prefix="", remove_duplicate=False):
            part = planned.get((id(module), key))
            name = f"{path}.{key}" if path else key
            first, other = seen.setdefault(id(parameter), (name, part))
            if other != part:
                raise ShardingError(
                    f"{first} and {name} are one parameter, and the plan divides them differently ({_dim_of(other)} and {_dim_of(part)})."
                    " Give both modules rules of the same dim."
                )


def _dim_of(part: Part | None) -> str:
    return "whole" if part is None else f"dim {part.dim}"
