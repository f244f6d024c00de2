"""AveragedWeights: an exponential moving average of main weights. Each rank averages the rows it owns; nothing is communicated."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.conversion import refuse_moved
from lightning_mfsdp.engine.core.group import owner_of, place_of
from lightning_mfsdp.engine.core.inspect import context_of, sharded_parameters
from lightning_mfsdp.engine.core.parameter import Entry, is_left_behind
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor

__all__ = ["AveragedWeights"]


@dataclass(frozen=True, eq=False)
class _Source:
    """What is averaged: a parameter's main weight, what shows whether it is trainable, and its entry if it is sharded."""

    name: str
    main: Tensor
    shown: Tensor
    entry: Entry | None = None


class AveragedWeights:
    """Average of the trainable parameters of a sharded module. Each joins at the first `update` at which it is trainable.

    Buffers are not averaged: the average is used with the module's present ones.

    Args:
        module: Sharded before the first `update`. It is held only by a weak reference until then, and after `release`.
        dtype: Of the average.
        device: `None`: that of the weights. "cpu": in pinned host memory; every update moves it to the device and back, tensor by tensor.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype = torch.float32, device: Literal["cpu"] | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._module = weakref.ref(module)
        self._averages: dict[str, Tensor] = {}
        self._entries: dict[str, weakref.ref[Entry]] = {}  # of the sharded ones among these
        self._sources: list[_Source] | None = None
        self._waiting: list[_Source] = []
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._own: list[Tensor] | None = None  # while the average is shown

    def __bool__(self) -> bool:
        """Whether there is an average yet."""
        return bool(self._averages)

    @property
    def module(self) -> nn.Module:
        """The module it was made for.

        Raises:
            EngineStateError: It was deleted.
        """
        module = self._module()
        if module is None:
            raise EngineStateError("AveragedWeights: the module was deleted; keep it as long as its average is used")
        return module

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether it was made for exactly this module."""
        return self._module() is module

    @property
    def is_shown(self) -> bool:
        """Whether the module shows the average at the moment."""
        return self._own is not None

    # -- averaging -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """`average = decay * average + (1 - decay) * weight`; the first time a copy. Nothing waits for the device."""
        self._attach()
        averages, mains = self._pairs
        if averages and averages[0].device == mains[0].device and _are_alike(averages, mains):
            compat.foreach_lerp_(averages, mains, 1.0 - decay)
        else:
            for average, main in zip(averages, mains, strict=True):
                on_device = average.to(main.device, non_blocking=True)
                on_device.lerp_(main.to(average.dtype), 1.0 - decay)
                if on_device is not average:
                    average.copy_(on_device, non_blocking=True)
        trained = [source for source in self._waiting if source.shown.requires_grad]
        if trained:
            for source in trained:
                self._averages[source.name] = self._copy(source.main)
            self._pair()

    def _attach(self) -> None:
        if self._sources is None or any(is_left_behind(source.shown) for source in self._sources):
            self._find_sources()
        if not self._sources or is_left_behind(self._sources[0].shown):
            raise EngineStateError(
                "AveragedWeights: the module is not sharded, or unshard_model made it plain, so there are no rows to average; shard the "
                "module, and make a new AveragedWeights of it"
            )

    def _find_sources(self) -> None:
        module = self.module
        views = sharded_parameters(module)
        if not views:
            return
        owners = ((view, owner_of(view.local)) for view in views)
        self._sources = [_Source(view.name, view.main, view.local, owner and owner[1]) for view, owner in owners]
        self._sources += [
            _Source(name, parameter.detach(), parameter)
            for name, parameter in module.named_parameters()
            if owner_of(parameter) is None and (parameter.is_floating_point() or parameter.is_complex())
        ]
        self._forget_former()
        self._pair()

    def _forget_former(self) -> None:
        """Forget averages of parameters in whose place there are others now, or whose rows other ranks may have now."""
        now = {source.name: source.entry for source in self._sources or ()}
        former = [name for name, entry in self._entries.items() if name not in now or entry() is not now[name]]
        for name in former:
            del self._averages[name], self._entries[name]
        if former and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"AveragedWeights: the average of {', '.join(former[:4])}{', ...' if len(former) > 4 else ''} begins again, because these "
                "were sharded again with layers that came into the model; to continue an average, load a checkpoint that has it",
                stacklevel=2,
            )

    def _pair(self) -> None:
        """Averages and their weights, as lists for fused operations; rows that this rank does not have are left out."""
        sources = self._sources or []
        self._waiting = [source for source in sources if source.name not in self._averages]
        averaged = {source.name: source.entry for source in sources if source.name in self._averages}
        self._entries = {name: weakref.ref(entry) for name, entry in averaged.items() if entry is not None}
        pairs = [(self._averages[source.name], source.main) for source in sources if source.name in self._averages]
        self._pairs = (
            [average for average, _ in pairs if average.numel()],
            [main for _, main in pairs if main.numel()],
        )

    def _copy(self, value: Tensor) -> Tensor:
        """Copy a weight to the average's dtype and device; the dtype of complex ones is their own."""
        place = torch.device(self.device or value.device)
        with torch.inference_mode(False):
            dtype = value.dtype if value.is_complex() else self.dtype
            copied = torch.empty(value.shape, dtype=dtype, device=place, pin_memory=place != value.device)
            return copied.copy_(value, non_blocking=True)

    def release(self) -> None:
        """Release the module's memory; the average stays."""
        self.hide()
        self._sources, self._waiting, self._pairs = None, [], ([], [])

    # -- in place of the weights ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Write the average into the module's weights, and save those."""
        if not self._averages or self.is_shown:
            return
        self._attach()
        context = context_of(self.module)
        refuse_moved((group for unit in context.units for group in unit.groups), "AveragedWeights.show")
        self._own = []
        context.shown_averages.add(self)
        with torch.inference_mode(False):
            for average, main in zip(*self._pairs, strict=True):
                place = average.device
                saved = torch.empty(main.shape, dtype=main.dtype, device=place, pin_memory=place != main.device)
                self._own.append(saved.copy_(main, non_blocking=True))
                main.copy_(average, non_blocking=True)
        context.weights_changed()

    @torch.no_grad()
    def hide(self) -> None:
        """Restore the module's own weights, to the bit. Does nothing if they are in place."""
        if self._own is None:
            return
        with torch.inference_mode(False):
            for saved, main in zip(self._own, self._pairs[1], strict=True):
                main.copy_(saved, non_blocking=True)
        self._own = None
        context = context_of(self.module)
        context.shown_averages.discard(self)
        # No gather here: after an exception other ranks may not join.
        context.weights_changed()

    # -- saving --------------------------------------------------------------------------------------------------------

    def rows(self) -> dict[str, Tensor]:
        """This rank's rows of the average by parameter name, `[len(rows), *shape[1:]]`; they share its memory."""
        self._attach()
        averages, mains = self._pairs
        if averages and averages[0].device != mains[0].device:
            torch.get_device_module(mains[0].device).synchronize()
        return dict(self._averages)

    @torch.no_grad()
    def load_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Load what `rows` returned, on any number of ranks. An empty mapping forgets the average."""
        self._averages, self._entries = {}, {}
        self._attach()
        self._pair()
        for source in [source for source in self._waiting if source.name in rows]:
            self._averages[source.name] = self._copy(source.main).copy_(rows[source.name])
        self._pair()

    def in_place_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the module with averaged values, sharded as before, where there are any."""
        names = {
            (id(place[0]), place[1]): view.name
            for view in sharded_parameters(self.module)
            if (place := place_of(view.dtensor)) is not None
        }
        averages = self.rows()
        averaged = dict(state)
        for key, value in state.items():
            place = place_of(value) if isinstance(value, Tensor) else None
            name = names.get((id(place[0]), place[1])) if place is not None else key
            if name in averages:
                average = averages[name]
                is_sharded = isinstance(value, ShardedTensor)
                averaged[key] = ShardedTensor.over(average.to(value.device), value) if is_sharded else average
        return averaged


def _are_alike(averages: Sequence[Tensor], mains: Sequence[Tensor]) -> bool:
    """Whether averages have the dtypes of their weights."""
    return all(average.dtype == main.dtype for average, main in zip(averages, mains, strict=True))
