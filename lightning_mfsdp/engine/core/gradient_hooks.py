"""Hooks on sharded parameters that run once their gradients are reduced, after the backward: `register_post_accumulate_grad_hook`.

They run at the end of the backward, when nothing is unsharded, in the order in which gradients are reduced, so that hooks which communicate
match on all ranks. A hook sees the accumulated gradient, may step an optimizer, and may clear the gradient. It makes no difference whether
it was registered before the parameter was sharded or after.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = [
    "Hooks",
    "add_gradient_hook",
    "has_gradient_hooks",
    "run_gradient_hooks",
]

Hooks = OrderedDict[int, Callable[[Any], None]]


def add_gradient_hook(group: ParameterGroup, index: int, hook: Callable[[Any], None]) -> RemovableHandle:
    """Call `hook(parameter)` with the sharded parameter whenever a reduced gradient was added to its `.grad`."""
    hooks = group.gradients.hooks.setdefault(index, OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def has_gradient_hooks(group: ParameterGroup) -> bool:
    """Whether there are any that were not removed."""
    return any(group.gradients.hooks.values())


def run_gradient_hooks(reduced: Iterable[tuple[ParameterGroup, Iterable[int]]]) -> None:
    """Run the hooks of parameters whose gradients were reduced, by index in their groups. Collective if the hooks are."""
    for group, indices in reduced:
        for index in sorted(group.gradients.hooks.keys() & indices):
            parameter = group.entries[index].sharded
            if parameter.grad is not None:
                for hook in list(group.gradients.hooks[index].values()):
                    hook(parameter)
