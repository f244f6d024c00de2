"""NormMonitor: logs norms of gradients, weights and updates of every parameter, layer and parameter group, with any logger.

    on_before_optimizer_step    norms of the gradients, before clipping; a copy of this rank's rows of the weights
    on_train_batch_end          norms of the weights and of what the step changed; one sum over ranks, one copy to the host
    a later batch               what has arrived is logged, under the step that it belongs to

The host waits for the device once, when training ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer
from lightning_mfsdp.base import compat
from lightning_mfsdp.callbacks.drawing import check_drawing, new_figure, save_figure
from lightning_mfsdp.engine import is_sharded, sharded_parameters
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NormMonitor"]

Kind = Literal["grad", "weight", "update"]
KINDS: tuple[Kind, ...] = ("grad", "weight", "update")
LEVELS = ("parameter", "layer", "group")


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """The layer and the group that a parameter belongs to; `total` is the name of its optimizer's total."""

    name: str
    layer: str
    group: str = ""
    total: str = "total"


@dataclass(frozen=True, kw_only=True)
class _Norms:
    """Norms of one step under way to the host: `values[i]` is that of `places[i]`."""

    step: int
    places: Sequence[tuple[Kind, _Parameter]]
    values: Tensor
    ready: torch.Event | None

    @property
    def is_there(self) -> bool:
        return self.ready is None or bool(self.ready.query())


class NormMonitor(Callback):
    """Logs L2 norms of the gradient, the weight and the update of every parameter, layer and parameter group of the optimizer.

    All are those of whole parameters, whichever ranks hold their rows. A layer is a module that was sharded as a unit of its own, such as a
    block of a transformer; other parameters belong to the module that has them. Names of metrics: "grad_norm/NAME" of a parameter,
    "grad_norm_layer/NAME", "grad_norm_group/NAME" and "grad_norm_total", and likewise "weight_norm" and "update_norm". Gradients are those
    before clipping (with manual optimization, as they are when the optimizer steps), weights those after the step, and an update is the
    difference of the weights before and after it. With several optimizers groups and totals are those of each ("grad_norm_total/0").

    Args:
        every_n_steps: How often, in steps of the logger's axis. `None`: `Trainer(log_every_n_steps=...)`.
        of: Which norms. "update" copies this rank's rows of the main weights in the steps that are logged.
        levels: Which sums. The total is always logged.
        picture: A PNG file that is drawn after the fit: the norms of each layer over the logged steps. Needs matplotlib.

    Raises:
        ValueError: An unknown kind or level; one that CPU offload contradicts, or no logger (when the run starts).
        TypeError: The strategy is not `MFSDPStrategy` (when the run starts).
        ImportError: `picture` without matplotlib.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        of: Sequence[Kind] = KINDS,
        levels: Sequence[Literal["parameter", "layer", "group"]] = LEVELS,  # type: ignore[assignment]
        picture: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"NormMonitor(every_n_steps={every_n_steps}): expected a positive number of steps, or None"
            )
        for argument, chosen, allowed in (("of", of, KINDS), ("levels", levels, LEVELS)):
            if isinstance(chosen, str) or not set(chosen) <= set(allowed):
                raise ValueError(
                    f"NormMonitor({argument}={chosen!r}): expected a list of some of {', '.join(map(repr, allowed))}"
                )
        if picture is not None:
            check_drawing("NormMonitor", picture)
        self.every_n_steps = every_n_steps
        self.of = tuple(of)
        self.levels = tuple(levels)
        self.picture = None if picture is None else Path(picture)
        self._places: dict[int, tuple[_Parameter, Tensor]] = {}
        # By name, as an optimizer may step more than once in a batch.
        self._found: dict[tuple[Kind, str], tuple[_Parameter, Tensor]] = {}
        self._before: dict[str, tuple[_Parameter, Tensor, Tensor | None]] = {}
        self._pending: deque[_Norms] = deque()
        self._history: list[tuple[int, dict[str, float]]] = []
        self._has_logged = False
        self._windows: dict[int, int] = {}  # by optimizer, the last in which it was logged
        self._first = 0

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what has no norms here."""
        if not isinstance(trainer.strategy, MFSDPStrategy):
            raise TypeError(
                f'NormMonitor reads sharded parameters and works with strategy="mfsdp"; got {type(trainer.strategy).__name__}. Leave it '
                "out, or choose that strategy"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look up the layers and groups of all parameters, and forget norms of an earlier fit."""
        if not trainer.loggers and self.picture is None:
            raise ValueError(
                "NormMonitor: the Trainer has no logger, so norms would go nowhere; pass Trainer(logger=...), or NormMonitor(picture=...)"
            )
        self._has_logged = False
        self._windows = {}
        self._first = self._step_of(trainer)
        views = sharded_parameters(pl_module)
        on_host = [view.name for view in views if view.main.device != pl_module.device]
        if on_host and set(self.of) - {"grad"}:
            raise ValueError(
                f'NormMonitor(of={list(self.of)}): main weights are in host memory ({on_host[0]} and others, offload="optimizer"), and '
                'reading them would stop the device; expected of=["grad"]'
            )
        self._places = _places_of(pl_module)
        self._found, self._before, self._history = {}, {}, []
        self._pending.clear()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradients that this optimizer uses, and the weights that it is about to change. Collective."""
        number = next((number for number, other in enumerate(trainer.optimizers) if other is optimizer), 0)
        if not self._is_due(trainer, number):
            return
        several = f"{number}." if len(trainer.optimizers) > 1 else ""
        stepped = [
            (
                replace(
                    place, group=f"{several}{group.get('name', index)}", total=f"total/{number}" if several else "total"
                ),
                parameter,
            )
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in (self._places[id(held)] for held in group["params"] if id(held) in self._places)
        ]
        if "grad" in self.of:
            gradients = [(place, parameter.grad) for place, parameter in stepped]
            self._add("grad", [(place, gradient) for place, gradient in gradients if gradient is not None])
        keeps = "update" in self.of
        if keeps or "weight" in self.of:
            for place, parameter in stepped:
                if place.name not in self._before:
                    self._before[place.name] = place, parameter, parameter.detach().clone() if keeps else None

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the weights with those before the step, and log what has arrived of earlier steps. Collective."""
        before = list(self._before.values())
        if "weight" in self.of:
            self._add("weight", [(place, parameter.detach()) for place, parameter, _ in before])
        self._add("update", [(place, parameter.detach() - old) for place, parameter, old in before if old is not None])
        norms, self._found, self._before = self._found, {}, {}
        self._has_logged |= bool(norms)
        if norms and trainer.is_global_zero:
            self._pending.append(_on_the_way(self._step_of(trainer), norms))
        self._log_arrived(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last norms, and draw the picture."""
        self._log_arrived(trainer, wait=True)
        if not self._has_logged and self._every(trainer):
            rank_zero_warn(
                "NormMonitor: no step of this fit was logged, because it had too few, or because training_step steps its optimizers "
                "without Lightning's knowledge. Choose a smaller every_n_steps, and step what self.optimizers() returns"
            )
        self._draw_history(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log what has arrived, draw the picture of a fit that broke off, and release what was kept of the weights."""
        self._found, self._before = {}, {}
        self._log_arrived(trainer)
        self._draw_history(trainer)

    # -- inside --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _step_of(trainer: Trainer) -> int:
        """The axis of `self.log`: batches that stepped, however many optimizers step for each."""
        return trainer.fit_loop.epoch_loop._batches_that_stepped

    def _every(self, trainer: Trainer) -> int:
        """0: never, as Lightning has it."""
        every: int = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        return every

    def _is_due(self, trainer: Trainer, optimizer: int) -> bool:
        """Once in a window that begins where `self.log` writes: an optimizer that steps in other batches has its turn later."""
        every = self._every(trainer)
        if not every:
            return False
        window = (self._step_of(trainer) + 1) // every
        if window <= self._windows.get(optimizer, self._first // every):
            return False
        self._windows[optimizer] = window
        return True

    def _draw_history(self, trainer: Trainer) -> None:
        if self.picture is not None and trainer.is_global_zero and self._history:
            rank_zero_info(f"NormMonitor: norms of layers are drawn in {_draw(self._history, self.picture)}")

    def _add(self, kind: Kind, tensors: Sequence[tuple[_Parameter, Tensor]]) -> None:
        if not tensors:
            return
        wide = torch.float64 if any(tensor.dtype is torch.float64 for _, tensor in tensors) else torch.float32
        norms = compat.foreach_norm([tensor for _, tensor in tensors], 2.0, wide)
        self._found.update(((kind, place.name), (place, norm)) for (place, _), norm in zip(tensors, norms, strict=True))

    def _log_arrived(self, trainer: Trainer, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0].is_there):
            norms = self._pending.popleft()
            if norms.ready is not None:
                norms.ready.synchronize()
            metrics = _metrics(norms, self.levels)
            if self.picture is not None:
                self._history.append((norms.step, _metrics(norms, ("layer",))))
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=norms.step)


def _places_of(module: LightningModule) -> dict[int, tuple[_Parameter, Tensor]]:
    """By the id of what an optimizer may hold, a parameter's names and what the module shows of it."""
    layers = [name for name, child in module.named_modules() if name and is_sharded(child)]
    rows = {id(view.dtensor): id(view.local) for view in sharded_parameters(module)}
    places: dict[int, tuple[_Parameter, Tensor]] = {}
    for name, parameter in module.named_parameters():
        around = [layer for layer in layers if name.startswith(f"{layer}.")]
        place = _Parameter(name=name, layer=max(around, key=len) if around else name.rpartition(".")[0] or name)
        # Some optimizers hold rows, others what the module shows.
        places.update(dict.fromkeys((id(parameter), rows.get(id(parameter), id(parameter))), (place, parameter)))
    return places


def _on_the_way(step: int, norms: Mapping[tuple[Kind, str], tuple[_Parameter, Tensor]]) -> _Norms:
    values = torch.stack([norm.float() for _, norm in norms.values()])
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
    host.copy_(values, non_blocking=True)
    ready = None
    if values.is_cuda:
        ready = torch.Event(values.device)
        ready.record()
    return _Norms(
        step=step, places=[(kind, place) for (kind, _), (place, _) in norms.items()], values=host, ready=ready
    )


def _metrics(norms: _Norms, levels: Iterable[str]) -> dict[str, float]:
    """Names and values for a logger: norms of parameters, and roots of sums of their squares."""
    squares: dict[str, float] = {}
    for (kind, place), value in zip(norms.places, norms.values.tolist(), strict=True):
        keys = {"parameter": f"{kind}_norm/{place.name}", "layer": f"{kind}_norm_layer/{place.layer}"}
        keys["group"] = f"{kind}_norm_group/{place.group}"
        for key in (*(keys[level] for level in levels), f"{kind}_norm_{place.total}"):
            squares[key] = squares.get(key, 0.0) + value * value
    return {key: math.sqrt(square) if square >= 0 else math.nan for key, square in squares.items()}


# -- the picture -------------------------------------------------------------------------------------------------------


def _draw(history: Sequence[tuple[int, Mapping[str, float]]], path: Path) -> Path:
    """One panel for each kind of norm: layers from top to bottom, steps from left to right, colors by the logarithm."""
    kinds = [
        kind for kind in KINDS if any(key.startswith(f"{kind}_norm_total") for _, metrics in history for key in metrics)
    ]
    layers = {
        kind: list(
            dict.fromkeys(key for _, metrics in history for key in metrics if key.startswith(f"{kind}_norm_layer/"))
        )
        for kind in kinds
    }
    height = sum(1.2 + 0.18 * len(layers[kind]) for kind in kinds)
    figure = new_figure(9, height)
    panels = figure.subplots(len(kinds), squeeze=False, height_ratios=[4 + len(layers[kind]) for kind in kinds])[:, 0]
    for kind, axes in zip(kinds, panels, strict=True):
        _panel(axes, kind, layers[kind], history)
    return save_figure(figure, path)


def _panel(axes: Axes, kind: Kind, layers: Sequence[str], history: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    def exponent(value: float) -> float:
        return math.log10(value) if value > 0 and math.isfinite(value) else math.nan

    image = axes.imshow(
        [[exponent(metrics.get(layer, math.nan)) for _, metrics in history] for layer in layers],
        aspect="auto",
        interpolation="nearest",
    )
    shown = range(0, len(history), max(1, len(history) // 8))
    axes.set_xticks(list(shown), [str(history[index][0]) for index in shown])
    axes.set_yticks(range(len(layers)), [layer.partition("/")[2] for layer in layers], fontsize=7)
    axes.set_xlabel("step")
    axes.set_title(f"{kind} norm, logarithm to base 10")
    axes.figure.colorbar(image, ax=axes)
