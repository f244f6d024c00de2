"""Muon for sharded matrices: momentum where the rows are, Newton-Schulz where the whole matrix is gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import LocalRowsOptimizer, RowPlacement, ShardingError, has_gradient, row_placement
from lightning_mfsdp.optim.exchange import BatchExchange
from lightning_mfsdp.optim.orthogonalize import orthogonalize, orthogonalize_stack
from lightning_mfsdp.optim.sharing import WIRE_DTYPE, Batch, SharedMatrix, plan_batches

__all__ = ["Muon"]

_ADAMW_EPS = 1e-8


@dataclass(frozen=True)
class _Plan:
    """How those matrices of one parameter group are exchanged that one process group shares."""

    parameters: list[Tensor]
    matrices: list[SharedMatrix]
    batches: list[Batch]


class Muon(LocalRowsOptimizer):
    """`torch.optim.Muon` for matrices sharded by this engine: the same arguments, the same rule, the same bits.

    Each rank keeps the momentum of its rows. Each matrix has an owner among the ranks that share its rows; it gets the rows in bfloat16,
    orthogonalizes, and sends the rows of the result back: two all-to-alls for a batch of matrices, those of the next batch while this
    one is computed. A matrix that every rank holds whole (`no_shard`, ignored parameters, no sharding at all) is orthogonalized by every
    rank, without communication; under HSDP each replica works by itself.

    In a parameter group with `"stacked": True` parameters are stacks of matrices `[E, R, C]`, such as the weights of experts, and each
    matrix is orthogonalized by itself. It is whole on the rank that has it, also with expert parallelism, so nothing is exchanged.

    A parameter group with `"use_muon": False` is updated by AdamW, with the group's `lr`, `betas`, `eps` (1e-8 there) and
    `weight_decay`. So one optimizer suffices for a model whose embedding, head, biases and norms are not for Muon.

    Args:
        params: Matrices (2-D), or parameter groups; those of AdamW may have any shape.
        lr: Learning rate.
        weight_decay: Of the weights, decoupled from the gradient.
        momentum: Share of the old momentum that is kept.
        nesterov: Look ahead by one step of momentum.
        ns_coefficients: Of x, x^3 and x^5 in the Newton-Schulz polynomial.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations, below 100.
        adjust_lr_fn: Factor for the rate of a matrix `[R, C]`. "original" (or `None`): sqrt(max(1, R / C)).
            "match_rms_adamw": 0.2 sqrt(max(R, C)), so that rates found for AdamW fit.
        betas: Of AdamW's groups.
        exchange_bytes: What a rank sends, and what it receives, in one exchange at most, unless a single matrix is larger (2
            bytes an element). The step takes up to eight times as much memory, besides what one matrix takes while it is computed.

    Raises:
        ValueError: An option out of its range, or a parameter that is neither in a group that is not AdamW's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        exchange_bytes: int = 128 * 2**20,
    ) -> None:
        self.exchange_bytes = exchange_bytes
        self._placements: dict[Tensor, RowPlacement | None] = {}
        self._plans: dict[tuple[int, dist.ProcessGroup], _Plan] = {}
        if exchange_bytes <= 0:
            raise ValueError(f"Muon: option exchange_bytes={exchange_bytes!r}: expected at least one byte")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
            "betas": betas,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying; plans are recreated later."""
        return {**super().__getstate__(), "exchange_bytes": self.exchange_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also fill defaults after `load_state_dict`: `torch.optim.Muon` saves no options of AdamW."""
        super().__setstate__(state)
        self._placements, self._plans = {}, {}
        for group in self.param_groups:
            group.setdefault("use_muon", True)
            group.setdefault("betas", self.defaults["betas"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Raises:
            ValueError: As the constructor.
        """
        group = dict(param_group)
        stacked = bool(
            group.pop("stacked", False)
        )  # what the program says of its parameters, and no option that a checkpoint has
        if not group.get("use_muon", True):
            group.setdefault("eps", _ADAMW_EPS)
        super().add_param_group(group)
        try:
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1], stacked=stacked)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. All ranks call it.

        Args:
            closure: Computes the loss and gradients again; its result is returned.

        Raises:
            ShardingError: A parameter is a DTensor, or a part of a matrix (this rank's experts, or what a tensor axis gives it).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            trained = [parameter for parameter in group["params"] if has_gradient(parameter)]
            if any(isinstance(parameter, DTensor) for parameter in trained):
                raise ShardingError(
                    "Muon.step: a parameter is a DTensor, and this optimizer works on local rows of what fully_shard has sharded; call "
                    "fully_shard_optimizer(optimizer) first, without elementwise=False"
                )
            if group["use_muon"]:
                self._step_matrices(number, group, trained)
            else:
                self._step_adamw(group, trained)
        return loss

    # -- Muon ----------------------------------------------------------------------------------------------------------

    def _step_matrices(self, number: int, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter not in self._placements:
                self._placements[parameter] = _whole_matrices(parameter)
        # Nothing is refused from here on.
        shared: dict[dist.ProcessGroup, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.dim() == 3:
                self._step_stack(group, parameter)
                continue
            placement = self._placements[parameter]
            if placement is not None and placement.group is not None:
                if placement.shape.numel():
                    shared.setdefault(placement.group, []).append(parameter)
            elif parameter.numel():
                (update,) = self._take_gradients(group, [parameter])
                _descend(group, parameter, parameter.shape, _orthogonalize(group, update.to(WIRE_DTYPE, copy=True)))
        for ranks, sharded in shared.items():
            self._step_shared(group, self._plan(number, ranks, sharded), ranks)

    def _step_stack(self, group: dict[str, Any], stack: Tensor) -> None:
        """Step matrices that are all here, as many at a time as `exchange_bytes` has room for."""
        (update,) = self._take_gradients(group, [stack])
        shape = stack.shape[1:]
        together = max(1, int(self.exchange_bytes) // max(1, shape.numel() * WIRE_DTYPE.itemsize))
        for some, updates in zip(stack.split(together), update.split(together), strict=True):
            if some.numel():
                matrices = updates.to(WIRE_DTYPE, copy=True)
                options = group["ns_coefficients"], group["ns_steps"], group["eps"]
                _descend(group, some, shape, orthogonalize_stack(matrices, *options))

    def _plan(self, number: int, ranks: dist.ProcessGroup, parameters: list[Tensor]) -> _Plan:
        plan = self._plans.get((number, ranks))
        if plan is None or list(map(id, plan.parameters)) != list(map(id, parameters)):
            placements = [placement for parameter in parameters if (placement := self._placements[parameter])]
            matrices = [SharedMatrix(shape=placement.shape, rows=placement.rows) for placement in placements]
            plan = _Plan(parameters, matrices, plan_batches(matrices, self.exchange_bytes))
            self._plans[number, ranks] = plan
        return plan

    def _step_shared(self, group: dict[str, Any], plan: _Plan, ranks: dist.ProcessGroup) -> None:
        """Rows of the next batch are sent, and results of the last received, while this one is orthogonalized."""

        def start(batch: Batch) -> BatchExchange:
            updates = self._take_gradients(group, [plan.parameters[member] for member in batch.members])
            return BatchExchange(batch, plan.matrices, updates, ranks, plan.parameters[0].device)

        def finish(batch: Batch, exchange: BatchExchange) -> None:
            for member, result in zip(batch.members, exchange.results(), strict=True):
                _descend(group, plan.parameters[member], plan.matrices[member].shape, result)

        coming = start(plan.batches[0])
        returning: tuple[Batch, BatchExchange] | None = None
        for batch, following in zip(plan.batches, [*plan.batches[1:], None], strict=True):
            present = coming
            if following is not None:
                coming = start(following)
            present.work(lambda matrix: _orthogonalize(group, matrix))
            if returning is not None:
                finish(*returning)
            returning = batch, present
        if returning is not None:
            finish(*returning)

    def _take_gradients(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Move the momentum of these rows towards their gradient; returns what must be orthogonalized, without rows if there are none."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momenta.append(state["momentum_buffer"])
        compat.foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return compat.foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta

    # -- AdamW ---------------------------------------------------------------------------------------------------------

    def _step_adamw(self, group: Mapping[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _orthogonalize(group: Mapping[str, Any], matrix: Tensor) -> Tensor:
    return orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _descend(group: Mapping[str, Any], parameter: Tensor, shape: torch.Size, update: Tensor) -> None:
    """Step rows of a matrix of the given global shape."""
    lr, (height, width) = float(group["lr"]), shape
    matches_adamw = group["adjust_lr_fn"] == "match_rms_adamw"  # both factors are those of torch.optim.Muon
    ratio = 0.2 * math.sqrt(max(height, width)) if matches_adamw else math.sqrt(max(1, height / width))
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(update, alpha=-lr * ratio)


def _check_options(group: Mapping[str, Any]) -> None:
    expectations: dict[str, tuple[bool, str]] = {
        "lr": (not group["lr"] < 0, "a number of at least 0"),
        "weight_decay": (not group["weight_decay"] < 0, "a number of at least 0"),
        "momentum": (not group["momentum"] < 0, "a number of at least 0"),
        "ns_coefficients": (len(group["ns_coefficients"]) == 3, "three numbers"),
        "ns_steps": (0 <= group["ns_steps"] < 100, "0 to 99 steps"),
        "adjust_lr_fn": (
            group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"),
            '"original" or "match_rms_adamw"',
        ),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "two numbers from 0 to below 1"),
    }
    for name, (fits, expected) in expectations.items():
        if not fits:
            raise ValueError(f"Muon: option {name}={group[name]!r}: expected {expected}")


def _whole_matrices(parameter: Tensor) -> RowPlacement | None:
    """Which ranks have which rows of whole matrices; `None` if it is not sharded. Collective for some; see `row_placement`."""
    placement = row_placement(parameter)
    if placement is None or placement.parts == 1 or (parameter.dim() == 3 and placement.has_whole_rows):
        return placement
    raise ShardingError(
        f"Muon.step: parameter {placement.name} of shape {tuple(placement.shape)} is one of {placement.parts} parts of a matrix, this "
        'rank\'s experts or what a tensor axis gives it: expected whole matrices. Put it into a group with "use_muon": False, which '
        "AdamW updates"
    )


def _check_parameters(group: Mapping[str, Any], *, stacked: bool) -> None:
    for number, parameter in enumerate(group["params"] if group["use_muon"] else ()):
        if parameter.dim() != (3 if stacked else 2) or parameter.is_complex():
            placement = row_placement(parameter)
            name = (
                placement.name
                if placement is not None
                else dict(enumerate(group.get("param_names", ()))).get(number, number)
            )
            expected = "stacks of matrices (3-D)" if stacked else "matrices"
            raise ValueError(
                f"Muon: parameter {name} of shape {tuple(parameter.shape)} and dtype {parameter.dtype}: expected {expected} of real "
                'numbers. Put stacks, such as weights of experts, into a group with "stacked": True, and what is neither into one with '
                '"use_muon": False, which AdamW updates'
            )
