"""NaNGradientReporter: which parameters got NaN or Inf, where and when first, at the price of one pass over the gradients.

    on_after_backward            one fused norm of order infinity over this rank's flat gradients, one flag reduced over all ranks,
                                 one copy of the flag to the host that nobody waits for
    on_before_zero_grad, or
    on_before_backward           the flag of the backward before is read; nothing has overwritten its gradients yet
    on_before_optimizer_step     only for "skip": checks the optimizer's gradients and reads the flag at once

While everything is finite, "raise" and "warn" never make the host wait for the work it has just submitted: when the flag is read, the
host waits until the backward before has ended, and the optimizer step and the next forward are already queued behind that. The price is
that the optimizer step with the bad gradients has been taken by then. "skip" must know before the step, so it waits for the device once
per step, as a loss scaler does.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.engine import compat, sharded_parameters
from lightning_mfsdp.engine.context import Context
from lightning_mfsdp.engine.gradients import local_gradients
from lightning_mfsdp.engine.parameter import owner_of
from lightning_mfsdp.engine.reduction_schedule import Sync
from lightning_mfsdp.engine.unit import unit_of
from lightning_mfsdp.lightning_api import Callback, LightningModule, Trainer
from lightning_mfsdp.strategy import MFSDPStrategy

__all__ = ["NaNGradientReporter", "NonFiniteGradientError"]

METRIC = "nan_gradients/steps"
_MAX_LINES = 40
_NOT_SHARDED = "(ignored_parameters)"


class NonFiniteGradientError(RuntimeError):
    """Some gradient is NaN or infinite. The message names parameters, ranks, step and microbatch."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """NaN and Inf in the rows of one parameter's gradient that one rank owns. `position`: of the unit in backward order."""

    parameter: str
    unit: str
    position: int
    rank: int
    num_nan: int
    num_inf: int
    numel: int
    finite_min: float | None
    finite_max: float | None


@dataclass(frozen=True)
class _Check:
    """A check whose flag is on its way to the host, and the gradients it is about."""

    step: int
    microbatch: int
    ready: torch.cuda.Event | None
    gradients: dict[int, Tensor]


class NaNGradientReporter(Callback):
    """Reports every parameter whose gradient holds NaN or Inf.

    Args:
        action: "raise": a `NonFiniteGradientError` on all ranks, before the next backward and before any checkpoint is saved. The
            optimizer step with these gradients has been taken by then, so go back to the last checkpoint. "skip": the
            optimizer step is left out on all ranks alike, and a warning reports. "warn": a warning on rank 0.

    Attributes:
        steps: Number of checks that found something; logged as "nan_gradients/steps", saved in checkpoints.

    Raises:
        ValueError: An unknown action.
        TypeError: The strategy is not `MFSDPStrategy` (when the run starts).
    """

    def __init__(self, action: Literal["raise", "skip", "warn"] = "raise") -> None:
        if action not in ("raise", "skip", "warn"):
            raise ValueError(f'NaNGradientReporter(action={action!r}): expected "raise", "skip" or "warn"')
        self.action = action
        self.steps = 0
        self._microbatch = 0
        self._pending: _Check | None = None
        self._host_flag: Tensor | None = None
        self._whole: list[nn.Parameter] = []

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not work."""
        strategy = trainer.strategy
        if not isinstance(strategy, MFSDPStrategy):
            raise TypeError(
                f'NaNGradientReporter reads sharded gradients and works with strategy="mfsdp"; got {type(strategy).__name__}'
            )
        if strategy.precision_plugin.needs_scaler and self.action != "warn":
            raise ValueError(
                f"NaNGradientReporter(action={self.action!r}) with precision {strategy.precision_plugin.precision!r}: loss scaling "
                'overflows now and then on purpose and skips those steps itself. Use action="warn" to see them'
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin at zero in every logger."""
        self._pending, self._microbatch = None, 0
        self._whole = [parameter for parameter in pl_module.parameters() if owner_of(parameter) is None]
        self._log(trainer)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a check of what this backward left."""
        if self.action != "skip":
            self._start_check(trainer, _context(pl_module))
        self._microbatch += 1

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """The gradients checked last are still there."""
        self._resolve(trainer, pl_module)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradients checked last are still there."""
        self._resolve(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Leave the step out where that was asked for: an optimizer passes over parameters without a gradient."""
        if self.action == "skip":
            self._submit(trainer, _context(pl_module), _gradients_of(optimizer))
            if self._resolve(trainer, pl_module):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
        self._microbatch = 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """What is still on its way must be known before weights are saved."""
        self._resolve(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the last flag."""
        self._resolve(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The count."""
        self.steps = state_dict["steps"]

    # -- the check -----------------------------------------------------------------------------------------------------

    def _start_check(self, trainer: Trainer, context: Context) -> None:
        if context.reductions.sync is Sync.NONE:
            # Nothing was reduced; what is kept locally is checked once it is, in the last microbatch.
            return
        gradients: dict[int, Tensor] = {}
        flat: list[Tensor] = []
        for unit in context.units:
            for group in unit.groups:
                flat += local_gradients(group)
                for entry in group.entries:
                    if entry.local.grad is not None:
                        gradients[id(entry.local)] = entry.local.grad
        for parameter in self._whole:
            if parameter.grad is not None:
                gradients[id(parameter)] = parameter.grad
                flat.append(parameter.grad)
        self._submit(trainer, context, gradients, flat)

    def _submit(
        self, trainer: Trainer, context: Context, gradients: dict[int, Tensor], flat: list[Tensor] | None = None
    ) -> None:
        """Compute the flag on the device and send it to the host."""
        flag = _nonfinite_flag(list(gradients.values()) if flat is None else flat, context.device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        is_cuda = context.device.type == "cuda"
        if self._host_flag is None:
            self._host_flag = torch.zeros((), pin_memory=is_cuda)
        self._host_flag.copy_(flag, non_blocking=True)
        ready = None
        if is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._pending = _Check(
            trainer.global_step, max(self._microbatch - (self.action == "skip"), 0), ready, gradients
        )

    def _resolve(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Read the flag of the pending check, if any; returns whether it found something."""
        check, self._pending = self._pending, None
        if check is None:
            return False
        if check.ready is not None:
            check.ready.synchronize()
        assert self._host_flag is not None
        if not self._host_flag.item():
            return False
        self.steps += 1
        self._log(trainer)
        message = _describe(check, _everyones(_findings(pl_module, check.gradients)))
        if self.action == "raise":
            raise NonFiniteGradientError(message)
        if trainer.is_global_zero:
            consequence = "; this optimizer step is skipped" if self.action == "skip" else ""
            warnings.warn(message + consequence, stacklevel=2)
        return True

    def _log(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({METRIC: float(self.steps)}, step=trainer.global_step)


def _context(module: LightningModule) -> Context:
    unit = unit_of(module)
    assert unit is not None
    return unit.context


def _gradients_of(optimizer: Optimizer) -> dict[int, Tensor]:
    """This rank's rows of the gradients an optimizer is about to use, by the parameter's identity."""
    return {
        id(parameter): parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }


def _nonfinite_flag(tensors: list[Tensor], device: torch.device) -> Tensor:
    """1.0 if any element is NaN or infinite, else 0.0; 0-D float32. One read of the gradients, no memory, no wait."""
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        return torch.zeros((), device=device)
    largest = torch.stack([norm.float() for norm in compat.foreach_norm(present, float("inf"))])
    return torch.isfinite(largest).all().logical_not().float()


# -- the report: slow, and only when something is wrong ----------------------------------------------------------------


def _findings(module: LightningModule, gradients: dict[int, Tensor]) -> list[Finding]:
    order = [unit.name for unit in _context(module).units_in_backward_order]
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    candidates: list[tuple[str, str, Tensor | None]] = [
        (view.name, view.unit, gradients.get(id(view.local), gradients.get(id(view.dtensor))))
        for view in sharded_parameters(module)
    ]
    candidates += [
        (name, _NOT_SHARDED, gradients.get(id(parameter)))
        for name, parameter in module.named_parameters()
        if owner_of(parameter) is None
    ]
    for name, unit, grad in candidates:
        if grad is None or bool(torch.isfinite(grad).all()):
            continue
        finite = grad[torch.isfinite(grad)]
        found.append(
            Finding(
                parameter=name,
                unit=unit,
                position=order.index(unit) if unit in order else len(order),
                rank=rank,
                num_nan=int(torch.isnan(grad).sum()),
                num_inf=int(torch.isinf(grad).sum()),
                numel=grad.numel(),
                finite_min=float(finite.min()) if finite.numel() else None,
                finite_max=float(finite.max()) if finite.numel() else None,
            )
        )
    return found


def _everyones(mine: list[Finding]) -> list[Finding]:
    """Findings of all ranks, first units of the backward first."""
    if not dist.is_initialized():
        return mine
    gathered: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    everything = [finding for findings in gathered for finding in findings]
    return sorted(everything, key=lambda finding: (finding.position, finding.parameter, finding.rank))


def _describe(check: _Check, findings: list[Finding]) -> str:
    when = f"step {check.step}, microbatch {check.microbatch}"
    if not findings:
        return (
            f"non-finite gradients in {when}, but they had changed before they could be looked at: clipping by value makes Inf "
            'finite, and zero_grad(set_to_none=False) overwrites. Use action="skip", which looks before the step'
        )
    parameters = {finding.parameter for finding in findings}
    ranks = sorted({finding.rank for finding in findings})
    lines = [
        f"non-finite gradients in {when}: {len(parameters)} parameters, on ranks {ranks}; first unit in backward order: "
        f"{findings[0].unit or '(root)'}"
    ]
    for finding in findings[:_MAX_LINES]:
        finite = "none finite"
        if finding.finite_min is not None:
            finite = f"finite part in [{finding.finite_min:.4g}, {finding.finite_max:.4g}]"
        lines.append(
            f"  {finding.parameter} (unit {finding.unit or '(root)'}, rank {finding.rank}): "
            f"{finding.num_nan} NaN and {finding.num_inf} Inf of {finding.numel}, {finite}"
        )
    if len(findings) > _MAX_LINES:
        lines.append(f"  and {len(findings) - _MAX_LINES} more")
    return "\n".join(lines)
