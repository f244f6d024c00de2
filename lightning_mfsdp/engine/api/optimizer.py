"""fully_shard_optimizer: adopts an optimizer, with the drivers that its class and its parameters need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.features.decoupled import reads_decoupled_gradients, show_gradients
from lightning_mfsdp.engine.features.fused_adam import Remainders, is_fused_adam, keeps_remainders, refuse_unfit_options
from lightning_mfsdp.engine.features.offload.streamed_step import StreamedStep
from lightning_mfsdp.engine.optimizer.adopt import adopt_optimizer
from lightning_mfsdp.engine.optimizer.driver import OptimizerDriver

__all__ = ["fully_shard_optimizer"]


def fully_shard_optimizer(
    optimizer: Optimizer, *, elementwise: bool | None = None, grad_scaler: object | None = None
) -> Optimizer:
    """Let an optimizer step sharded parameters.

    Elementwise optimizers of `torch.optim`, and any `LocalRowsOptimizer`, step plain local rows. Between two steps, and in the closure,
    their `param_groups` and `state` hold what the module shows, and state as DTensors. Others get plain tensors, always: whole ones where
    every rank has all rows (`no_shard`, one rank), local rows with `elementwise=True`; else they keep DTensors. State (if any yet) is
    adopted. The weights that forward uses are refreshed after each step, and within one before its closure is
    called again (LBFGS). No step is taken here: step counters and weight decay start where the user starts. What is added to the groups
    later, by `add_param_group` or otherwise, is adopted when the next step begins. Parameters that were sharded with
    `offload="optimizer"` are stepped a few at a time (streamed_step.py). `optimizer.state_dict()` shows state as DTensors, as under FSDP2,
    and `load_state_dict` takes these, or whole tensors (state.py).

    Args:
        optimizer: Built from `module.parameters()`, before or after `fully_shard`.
        elementwise: Overrides the list, for an optimizer of your own, or one whose step is compiled: `True` gives it plain local rows at
            all times, `False` DTensors. Once passed, it holds for later calls that omit it: the Trainer's strategy calls this again
            for what `configure_optimizers` returns.
        grad_scaler: Needed (any object) when parameters compute in float16: without loss scaling their gradients
            underflow. Once passed, it holds for later calls, too.

    Returns:
        The same optimizer.

    Raises:
        ShardingError: The optimizer holds no sharded parameter, cannot work on shards or on a few of them at a time, or float16 is used
            without a scaler.
    """
    name = type(optimizer).__name__
    if not compat.has_hooks(optimizer):
        raise ShardingError(
            f"fully_shard_optimizer: {name} has none of the hooks of torch.optim.Optimizer, by which its steps are followed. Call "
            "super().__init__(params, defaults) in its constructor, or pass the optimizer that it wraps"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ShardingError(
            f"fully_shard_optimizer: {name} needs sparse gradients, and what is reduced here is dense; use torch.optim.AdamW, and "
            "nn.Embedding(sparse=False)"
        )
    adopt_optimizer(optimizer, elementwise, grad_scaler, _Support)
    return optimizer


class _Support:
    """CPU offload of optimizer state, and Transformer Engine's FusedAdam, which is recognized by its name. An `OptimizerSupport`."""

    def __init__(self) -> None:
        self._streamed: StreamedStep | None = None

    def writes_in_steps_alone(self, optimizer: Optimizer) -> bool:
        """True for Transformer Engine's FusedAdam, beside the optimizers that the core knows."""
        return is_fused_adam(optimizer)

    def prepare(
        self, optimizer: Optimizer, held: Mapping[ParameterGroup, Sequence[Entry]], *, local: bool
    ) -> Sequence[OptimizerDriver]:
        """The drivers for remainders and for offloaded state. Parameters show decoupled gradients where the optimizer reads those."""
        if is_fused_adam(optimizer) and held:
            refuse_unfit_options(optimizer, list(held))
        decoupled = reads_decoupled_gradients(optimizer)
        if decoupled and held and not local:
            raise ShardingError(
                f"fully_shard_optimizer: {type(optimizer).__name__}(use_decoupled_grad=True) would find no gradient, because DTensors have "
                "none under that name. Leave it out, or pass elementwise=True if the optimizer treats every number by itself"
            )
        for group, entries in held.items():
            show_gradients(group, entries, decoupled=decoupled)
        drivers: list[OptimizerDriver] = []
        if keeps_remainders(optimizer):
            drivers.append(Remainders())
        if any(group.offloads for group in held):
            self._streamed = self._streamed or StreamedStep()
            self._streamed.adopt(optimizer)
            drivers.append(self._streamed)
        return drivers
