"""The optimizer in whose step an error is raised: for one that works only on whole tensors, the message says what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["OPTIMIZER_ADVICE", "call_closure", "stepping_optimizer"]

OPTIMIZER_ADVICE = (
    "An optimizer that treats every number by itself works on plain rows: call fully_shard_optimizer(optimizer, elementwise=True), under "
    'Lightning in configure_optimizers. One that needs whole tensors works where they are whole: sharding="no_shard" without offload and '
    "without a tensor axis"
)


def call_closure(closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the closure that a user gave to a step: what is raised in it is not caused by the optimizer."""
    return closure(*args, **kwargs)


def stepping_optimizer() -> Optimizer | None:
    """The optimizer whose `step` calls this, if any; calls from a user's closure do not count.

    It looks through the frames of the stack, so it is for messages only.
    """
    this = inspect.currentframe()
    frame = (
        this.f_back if this is not None else None
    )  # the variables of its own frame would reference that, and all tensors of the callers
    del this
    while frame is not None and frame.f_code is not call_closure.__code__:
        if (
            frame.f_code.co_name == "step"
        ):  # reading the variables of a frame keeps all of them alive until it ends (Python 3.11)
            owner = frame.f_locals.get("self")
            if isinstance(owner, Optimizer):
                return owner
        frame = frame.f_back
    return None
