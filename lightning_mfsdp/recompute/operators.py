"""Which operators keep their results, for `Recompute(save_ops=...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["CHOICES", "check_save_ops", "keeping"]

# Names without overloads.
_KINDS: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten.matmul",
        "aten._grouped_mm",
        "aten._scaled_mm",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._scaled_dot_product_attention_math",
    ),
}
# What routers choose by. Computed again inside another kernel, a near tie might fall differently.
CHOICES = ("aten.sort", "aten.topk")


def check_save_ops(names: Iterable[str]) -> None:
    """Raise a ValueError for what is neither a kind of operators nor a name such as "aten.mm"."""
    for name in names:
        if name not in _KINDS and not (name.count(".") == 1 and all(part.isidentifier() for part in name.split("."))):
            raise ValueError(
                f"Recompute: save_ops: {name!r} is neither one of {', '.join(map(repr, _KINDS))} nor the name of an operator, as in "
                '"aten.mm": its library, a dot, and its name without an overload'
            )


def keeping(names: Iterable[str]) -> Callable[..., CheckpointPolicy]:
    """The policy for `torch.utils.checkpoint.create_selective_checkpoint_contexts` that keeps results of these."""
    kept = frozenset(full for name in names for full in _KINDS.get(name, (name,)))

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # What writes into memory that it is given has no result of its own to keep.
        is_kept = str(operator.overloadpacket) in kept and not operator._schema.is_mutable
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
