"""Says which operators keep their results under `Recompute(save_ops=...)`, and checks the names that users give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from lightning_mfsdp.base import compat

__all__ = ["CHOICES", "MATMULS", "check_registered", "check_save_ops", "drawing", "keeping", "operators_of"]

# Names without overloads, of operators that reach a dispatch mode: PyTorch's plain attention, for example, is composite and never does.
_KINDS: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten._grouped_mm",
        "aten._scaled_mm",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
}
MATMULS = frozenset(_KINDS["matmul"])
# Requested by name, and composed of the operators of a kind.
_MADE_OF = {"aten.linear": "matmul", "aten.matmul": "matmul", "aten.scaled_dot_product_attention": "attention"}
# What routers choose by. Recomputed inside another kernel, a near tie might be decided differently.
CHOICES = ("aten.sort", "aten.topk")


def check_save_ops(names: Iterable[str]) -> None:
    """Raise a ValueError for anything but a kind of operators or a name such as "aten.mm"."""
    for name in names:
        if name not in _KINDS and not (name.count(".") == 1 and all(part.isidentifier() for part in name.split("."))):
            raise ValueError(
                f"Recompute: save_ops: {name!r} is neither one of {', '.join(map(repr, _KINDS))} nor the name of an operator; write "
                'its library, a dot, and its name without an overload, as in "aten.mm"'
            )


def check_registered(names: Iterable[str]) -> None:
    """Raise a ValueError for an operator that does not exist, or one whose result can never be kept.

    To be called once the model exists, since libraries register theirs when they are imported.
    """
    for name in names:
        if name in _KINDS:
            continue
        overloads = _registered(name)
        if not overloads:
            raise ValueError(
                f"Recompute: save_ops: there is no operator {name!r}, so it would keep nothing; expected a name as in torch.ops, without "
                "an overload, of a library that was imported before"
            )
        results = [operator for operator in overloads if not operator._schema.is_mutable]
        if not results:
            raise ValueError(
                f"Recompute: save_ops: {name!r} writes into memory that it is given and has no result of its own to keep; name the "
                "operator that returns one, as in x = x.relu() for x.relu_()"
            )
        if all(compat.is_composite(operator) for operator in results):
            instead = repr(_MADE_OF[name]) if name in _MADE_OF else "those, as a profile of the forward shows them"
            raise ValueError(
                f"Recompute: save_ops: {name!r} is made of other operators and never runs itself, so it would keep nothing; give {instead}"
            )


def keeping(names: Iterable[str]) -> Callable[..., CheckpointPolicy]:
    """The policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts` that keeps the results of these."""
    is_kept = _chosen(names)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def drawing(names: Iterable[str]) -> Callable[[Any], bool] | None:
    """Which of the operators that these keep may draw random numbers; `None`: none of them.

    PyTorch's own are marked; those of other libraries may not be.
    """
    is_kept = _chosen(names)
    if not any(_may_draw(operator) for name in operators_of(names) for operator in _registered(name)):
        return None
    return lambda operator: is_kept(operator) and _may_draw(operator)


def _chosen(names: Iterable[str]) -> Callable[[Any], bool]:
    """Whether the result of an operator is kept. An operator that writes into its arguments has no result of its own."""
    kept = operators_of(names)
    return lambda operator: (
        isinstance(operator, compat.OpOverload)
        and str(operator.overloadpacket) in kept
        and not operator._schema.is_mutable
    )


def operators_of(names: Iterable[str]) -> frozenset[str]:
    """Full names, of all operators of the kinds among `names`."""
    return frozenset(full for name in names for full in _KINDS.get(name, (name,)))


def _registered(name: str) -> list[compat.OpOverload]:
    """Operators of a full name, by overload. PyTorch's scripted ones are never dispatched."""
    library, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    return compat.overloads_of(packet)


def _may_draw(operator: compat.OpOverload) -> bool:
    return operator.namespace != "aten" or torch.Tag.nondeterministic_seeded in operator.tags
