"""Expert parallelism: the experts of a layer are divided among ranks, and tokens are sent there.

"all_gather"    every rank of the axis sees all tokens, computes those that chose its experts, and the results are summed by a
reduce-scatter. Sizes are fixed beforehand: nothing waits for the host, and a CUDA graph can hold it. For one node.
"all_to_all"    every rank sends each token to the ranks whose experts it chose. Exactly the rows that are needed travel, and the host
waits for their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp.base.part import part_of
from lightning_mfsdp.engine import ShardingError, note_collective
from lightning_mfsdp.engine.internals import EXPERT, Axis, axis_of, view_of
from lightning_mfsdp.moe.experts import ExpertsOfRank, GroupedExperts
from lightning_mfsdp.moe.huggingface import DIVIDED, DividedExperts, is_grouped_layer
from lightning_mfsdp.moe.once import differentiable_once

__all__ = ["AllGatherDispatcher", "AllToAllDispatcher", "expert_parallel", "take_over_budget"]


def expert_parallel(
    experts: nn.Module, mesh: DeviceMesh, *, dispatcher: Literal["all_gather", "all_to_all"] = "all_to_all"
) -> nn.Module:
    """Keep this rank's share of the experts, and let the ranks of an axis compute for each other. In place, before `fully_shard`.

    Every rank of the axis then calls the module at the same time; with "all_gather", with equally many tokens.

    Args:
        experts: `GroupedExperts` with the same weights on all ranks, or on the meta device; or a layer of a Hugging Face model after
            `enable_grouped_experts`, with weights, of which the first rank's count.
        mesh: Its axis "expert" is used, or its only one. Rank p of it keeps experts from `p * E / size` on.
        dispatcher: How tokens reach their experts; the default is that of the strategies' `expert_dispatcher`.

    Returns:
        The same module.

    Raises:
        ShardingError: Another module, a mesh without such an axis, experts that it does not divide, or experts that are sharded or
            divided already.
    """
    if dispatcher not in ("all_gather", "all_to_all"):
        raise ShardingError(f'expert_parallel: dispatcher: expected "all_gather" or "all_to_all", got {dispatcher!r}')
    is_of_model = is_grouped_layer(experts)
    if not isinstance(experts, GroupedExperts) and not is_of_model:
        raise ShardingError(
            f"expert_parallel: expected GroupedExperts, or a layer of experts that enable_grouped_experts has enabled, got "
            f"{type(experts).__name__}; call it for each module of experts in the model"
        )
    axis = _expert_axis(mesh)
    if axis.size == 1:
        return experts
    held: Any = experts
    if held.num_experts % axis.size:
        raise ShardingError(
            f"expert_parallel: {held.num_experts} experts cannot be divided evenly among {axis.size} ranks; choose an axis whose size "
            "divides the number of experts"
        )
    names = ("gate_up_proj", "down_proj") if is_of_model else ("weight_in", "weight_out")
    before = vars(experts).get(DIVIDED) if is_of_model else held.dispatcher
    if before is not None or view_of(getattr(held, names[0])) is not None:
        raise ShardingError(
            "expert_parallel: these experts are divided or sharded already; call it once for each module, before fully_shard"
        )
    first_expert = axis.rank * (held.num_experts // axis.size)
    by = AllGatherDispatcher(axis) if dispatcher == "all_gather" else AllToAllDispatcher(axis)
    if is_of_model:
        for name in names:
            _keep_own(f"{type(experts).__name__}.{name}", getattr(held, name), axis, mesh.device_type)
        setattr(experts, DIVIDED, DividedExperts(experts, by, first_expert))
        return experts
    divided = [name for name in names if part_of(getattr(held, name)) is not None]
    if divided:
        raise ShardingError(
            f"expert_parallel: {divided[0]} is divided over a tensor axis already, and its parts would be taken for whole experts; call it "
            "before the plan of the tensor axis is applied"
        )
    held.first_expert = first_expert
    for name in names:
        weight = getattr(held, name)
        own = weight.detach().chunk(axis.size)[axis.rank].clone()
        setattr(held, name, nn.Parameter(own, requires_grad=weight.requires_grad))
    held.dispatcher = by
    return experts


@torch.no_grad()
def _keep_own(name: str, weight: nn.Parameter, axis: Axis, device_type: str) -> None:
    """This rank's experts of a weight that is whole on every rank, in the same parameter: it may be marked as a part."""
    if weight.is_meta:
        raise ShardingError(
            f"expert_parallel: {name} is on the meta device; use it after its parameters have values, which fully_shard_units gives them"
        )
    content = weight.detach().to(device_type).contiguous()  # where the group communicates
    dist.broadcast(content.view(-1).view(torch.uint8), group=axis.group, group_src=0)
    weight.data = content.chunk(axis.size)[axis.rank].clone().to(weight.device)


def _expert_axis(mesh: DeviceMesh) -> Axis:
    names = mesh.mesh_dim_names or ()
    if EXPERT not in names and mesh.ndim != 1:
        raise ShardingError(
            f'expert_parallel: expected a mesh with an axis named "{EXPERT}", or with one axis, got {mesh}'
        )
    return axis_of(mesh, names.index(EXPERT) if EXPERT in names else 0, EXPERT)


@dataclass(frozen=True, eq=False)
class _Dispatcher(ABC):
    """Copies of a module share it: it holds only the connection to other ranks.

    Args:
        axis: Ranks with different experts.
    """

    axis: Axis

    def __call__(self, experts: ExpertsOfRank, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        """As `GroupedExperts.forward`. Results are summed over ranks in the compute dtype."""
        described = [(value.shape, value.dtype, value.device) for value in (hidden, expert_index, probabilities)]
        note_collective(experts.weight_in, lambda: self._take_part(experts, described))
        return self._dispatch(experts, hidden, expert_index, probabilities)

    @abstractmethod
    def _dispatch(self, experts: ExpertsOfRank, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        """The result of `__call__`."""

    def _take_part(
        self, experts: ExpertsOfRank, described: Sequence[tuple[torch.Size, torch.dtype, torch.device]]
    ) -> None:
        """Join the other ranks' calls, with as many tokens as in the last call, which choose no expert."""
        hidden, expert_index, probabilities = (torch.zeros(size, dtype=kind, device=at) for size, kind, at in described)
        self._dispatch(experts, hidden, expert_index.fill_(-1), probabilities)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dispatcher:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "experts that are divided among ranks cannot be pickled: the way to the other ranks cannot be saved. Save the module's "
            "state_dict(), or a checkpoint through the Trainer"
        )


class AllGatherDispatcher(_Dispatcher):
    """All tokens to all ranks, without waiting for the host."""

    def _dispatch(self, experts: ExpertsOfRank, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        gather, scatter = partial(_gathered, axis=self.axis), partial(_summed, axis=self.axis)
        computed = experts.compute(
            _moved(hidden.to(experts.compute_dtype(hidden)), gather, scatter),
            gather(expert_index) - experts.first_expert,
            _moved(probabilities, gather, scatter),
            average_rows=expert_index.numel(),
        )
        return _moved(computed, scatter, gather)


class AllToAllDispatcher(_Dispatcher):
    """Exactly the rows that are needed, whose number the host waits for."""

    def _dispatch(self, experts: ExpertsOfRank, hidden: Tensor, expert_index: Tensor, probabilities: Tensor) -> Tensor:
        axis, choices = self.axis, expert_index.reshape(-1)
        owner = torch.div(choices, experts.num_experts // axis.size, rounding_mode="floor")
        owner = torch.where((choices >= 0) & (choices < experts.num_experts), owner, axis.size)
        order = owner.sort(stable=True).indices
        sent, received = self._rows_by_rank(owner)
        send = partial(_exchanged, sent=sent, received=received, axis=axis)
        give_back = partial(_exchanged, sent=received, received=sent, axis=axis)
        order = order[: sum(sent)]
        token = order // expert_index.shape[1]
        computed = experts.compute(
            _moved(hidden.to(experts.compute_dtype(hidden)).index_select(0, token), send, give_back),
            send(choices[order]).unsqueeze(1) - experts.first_expert,
            _moved(probabilities.reshape(-1)[order], send, give_back).unsqueeze(1),
        )
        returned = _moved(computed, give_back, send)
        wide = returned.to(torch.promote_types(returned.dtype, torch.float32))
        summed: Tensor = wide.new_zeros(hidden.shape).index_add(0, token, wide)
        return summed.to(returned.dtype)

    def _rows_by_rank(self, owner: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank of the axis, and come from it. Collective, and the host waits."""
        axis = self.axis
        counts = torch.bincount(owner, minlength=axis.size + 1)[: axis.size]
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=axis.group)
        return counts.tolist(), theirs.tolist()


def _gathered(piece: Tensor, axis: Axis) -> Tensor:
    whole = piece.new_empty(axis.size * piece.shape[0], *piece.shape[1:])
    axis.gather([whole.view(-1)], [piece.contiguous().view(-1)])
    return whole


def _summed(whole: Tensor, axis: Axis) -> Tensor:
    piece = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:])
    axis.reduce_scatter([piece.view(-1)], [whole.contiguous().view(-1)], 1.0)
    return piece


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=axis.group)
    return result


def _moved(tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `there`; in backward, apply `back` to the gradient of the result."""
    result: Tensor = _Moved.apply(tensor, there, back)
    return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


@torch.no_grad()
def take_over_budget(module: nn.Module, group: dist.ProcessGroup | None = None) -> Tensor:
    """Whether any expert of any rank had more rows than its buffer since the last query; the flags are cleared. Collective.

    It does not wait for the device: the answer, bool and 0-D, stays there and is the same on all ranks.

    Args:
        module: With `GroupedExperts` inside; the same number on every rank.
        group: `None`: all ranks.

    Raises:
        ValueError: There are none.
    """
    flags = [part.over_budget for part in module.modules() if isinstance(part, GroupedExperts)]
    if not flags:
        raise ValueError(
            f"take_over_budget: {type(module).__name__} has no GroupedExperts inside; pass the model that holds them"
        )
    any_over = torch.stack(flags).any().to(torch.int32)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(any_over, op=dist.ReduceOp.MAX, group=group)
    for flag in flags:
        flag.zero_()
    return any_over.bool()
