"""Who writes main weights, and the refresh of compute weights after a step.

An elementwise optimizer does to each number what it would do to it in the whole tensor, so it can work on plain local
rows: no DTensor dispatch, and fused kernels. Others (LARS, LAMB: norms of the whole tensor) keep DTensors; those that need
whole matrices (Muon, Shampoo, Adafactor) are refused, by name or by the operation.

Source of the list: the update rules in `torch.optim`; a class is taken only if it is exactly one of these, since a
subclass may do anything.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.engine.context import Context
from lightning_mfsdp.engine.errors import ShardingError
from lightning_mfsdp.engine.group import ParameterGroup
from lightning_mfsdp.engine.parameter import Entry, owner_of

__all__ = ["ELEMENTWISE_OPTIMIZERS", "fully_shard_optimizer"]

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# LBFGS takes all parameters as one vector, SparseAdam sparse gradients, Muon products of whole matrices, Adafactor their means.
_UNFIT_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon, torch.optim.Adafactor)


def fully_shard_optimizer(
    optimizer: Optimizer, *, elementwise: bool | None = None, grad_scaler: object | None = None
) -> Optimizer:
    """Let an optimizer step sharded parameters.

    Elementwise optimizers get plain local rows in their `param_groups`, and their state (if any yet) is keyed by them;
    others keep DTensors. After each step the weights that forward uses are refreshed. No step is taken here: step
    counters and weight decay start where the user starts. What `add_param_group` adds later is taken over when the next
    step begins.

    Args:
        optimizer: Built from `module.parameters()`, before or after `fully_shard`.
        elementwise: Overrides the list, for an optimizer of your own.
        grad_scaler: Needed (any object) when parameters compute in float16: without loss scaling their gradients
            underflow.

    Returns:
        The same optimizer.

    Raises:
        ShardingError: The optimizer holds no sharded parameter, cannot work on shards, or float16 is used without a
            scaler.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, _UNFIT_OPTIMIZERS) and elementwise is None:
        raise ShardingError(
            f"fully_shard_optimizer: {name} needs whole vectors or matrices, or sparse gradients, and cannot run on shards; "
            "use an elementwise optimizer such as torch.optim.AdamW, or sharding without this engine"
        )
    local = type(optimizer) in ELEMENTWISE_OPTIMIZERS if elementwise is None else elementwise
    contexts: list[weakref.ref[Context]] = []
    held = 0

    def adopt_new(optimizer: Optimizer, *_: Any) -> None:
        nonlocal held
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != held:
            contexts[:] = [weakref.ref(context) for context in _adopt_parameters(optimizer, local, grad_scaler)]
            held = count

    def weights_changed(*_: Any) -> None:
        for reference in contexts:
            context = reference()
            if context is not None:
                context.optimizer_stepped()

    adopt_new(optimizer)
    if not contexts:
        raise ShardingError(
            f"fully_shard_optimizer: {name} holds no parameter of a sharded module; call fully_shard(module) first "
            "and build the optimizer "
            "from module.parameters()"
        )
    optimizer.register_step_pre_hook(adopt_new)
    optimizer.register_step_post_hook(weights_changed)
    return optimizer


def _adopt_parameters(optimizer: Optimizer, local: bool, grad_scaler: object | None) -> list[Context]:
    """Replace parameters in place by the face the optimizer works on; returns the contexts they belong to, in order."""
    covered: dict[Context, list[Entry]] = {}
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            found = owner_of(parameter)
            if found is None:
                continue
            owner, entry = found
            if id(entry) in seen:
                raise ShardingError(
                    f"fully_shard_optimizer: {type(optimizer).__name__} holds parameter {entry.name} twice and would step it twice; take "
                    "it out of one group"
                )
            seen.add(id(entry))
            if owner.spec.compute_dtype is torch.float16 and grad_scaler is None:
                raise ShardingError(
                    f"fully_shard_optimizer: parameter {entry.name} computes in float16 and there is no loss scaling, "
                    "so small gradients become "
                    "zero; pass grad_scaler=torch.amp.GradScaler(...) and use it, or compute in bfloat16"
                )
            face = entry.local if local else entry.sharded
            group["params"][index] = face
            if parameter in optimizer.state and parameter is not face:
                optimizer.state[face] = _shard_state(optimizer.state.pop(parameter), owner, entry, local=local)
            if owner.context is not None:
                covered.setdefault(owner.context, []).append(entry)
    for context, entries in covered.items():
        context.cover(entries)
    return list(covered)


def _shard_state(state: dict[str, Any], group: ParameterGroup, entry: Entry, *, local: bool) -> dict[str, Any]:
    """State of a whole parameter, cut to this rank's rows."""
    if not local:
        raise ShardingError(
            f"fully_shard_optimizer: the optimizer already has state for {entry.name} from before sharding, and "
            "DTensor optimizers cannot take it over; "
            "shard before the first step"
        )
    index = group.entries.index(entry)
    rows = group.layout.owned_rows(index, group.main_extent.start, len(group.main_extent))
    shape = torch.Size(group.layout.shapes[index])  # before sharding, parts of a parameter are apart
    return {key: _rows(value, shape, rows) for key, value in state.items()}


def _rows(value: Any, shape: torch.Size, rows: range) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, Tensor) and value.shape == shape and value.dim():
        return value[rows.start : rows.stop].clone()
    return value
