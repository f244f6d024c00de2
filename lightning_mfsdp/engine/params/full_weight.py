"""FullWeight: the whole weight of a group, and what the module's parameters point at.

Parameters are views of memory that comes and goes. The views are made once for each memory the full weight lives in. Parameters of
a codec read raw data there, one plane after the other in a slot, each laid out as the group's layout says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.layout.layout import Layout
from lightning_mfsdp.engine.memory.buffer import FlatBuffer, buffer_numel
from lightning_mfsdp.engine.memory.storage import Client, Slot
from lightning_mfsdp.engine.params.codec import WeightCodec
from lightning_mfsdp.engine.params.parameter import Entry

__all__ = ["FullWeight"]


class FullWeight:
    """Owns the slot's client, and points parameters into slots or into what is held whole.

    Args:
        layout: Of the group; the full weight has all its shards.
        dtype: Of the memory.
        codec: Of the parameters, if they have one.
        entries: The parameters, in the layout's order.
        device: Where they are.
        evict: See `Client`.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        dtype: torch.dtype,
        codec: WeightCodec | None,
        entries: Sequence[Entry],
        device: torch.device,
        evict: Callable[[], bool],
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._codec = codec
        self._entries = entries
        self._extent = range(layout.num_shards)
        self._numel = buffer_numel(layout, self._extent)
        self._bound: Sequence[FlatBuffer] | None = None
        self._by_slot: weakref.WeakKeyDictionary[Slot, list[FlatBuffer]] = weakref.WeakKeyDictionary()
        self._num_planes = 1 if codec is None else codec.planes
        self.client = Client(name="", size_bytes=self._num_planes * self._numel * dtype.itemsize, evict=evict)

    def rest(self, index: int) -> None:
        """Leave a parameter without memory of its own, and without a gradient."""
        full = self._entries[index].full
        full.grad = None
        if self._codec is None:
            compat.set_data(full, torch.empty(0, dtype=self._dtype, device=self._device))
        else:  # its shape is that of what it reads
            nothing = torch.empty(1, dtype=self._dtype, device=self._device).expand(full.shape)
            self._codec.bind(full, [nothing] * self._num_planes)

    def in_slot(self, slot: Slot) -> list[FlatBuffer]:
        """A buffer for each plane in a slot's memory, made once per slot."""
        known = self._by_slot.get(slot)
        if known is None:
            with torch.inference_mode(False):
                memory = slot.memory[: self.client.size_bytes].view(self._dtype)
                known = self._by_slot[slot] = [
                    FlatBuffer.over(self._layout, self._extent, plane)
                    for plane in memory.view(self._num_planes, -1).unbind()
                ]
        return known

    def bind(self, planes: Sequence[FlatBuffer]) -> None:
        """Point the module's parameters into full-size buffers."""
        if self._bound is planes:
            return
        self._bound = planes
        if self._codec is None:
            with torch.inference_mode(False):
                for entry, view in zip(self._entries, planes[0].views(), strict=True):
                    compat.set_data(entry.full, view)
            return
        with torch.inference_mode(False), torch.no_grad():
            for entry, *views in zip(self._entries, *(plane.views() for plane in planes), strict=True):
                # `data`: a version counter of its own, so that a gather does not disturb tensors saved for backward.
                self._codec.bind(entry.full, [view.data for view in views])

    def take_back(self, index: int) -> Tensor:
        """Whatever a parameter holds now, in the memory it was pointed at before somebody set its `data`."""
        assert self._bound is not None, "only parameters that were shown are written"
        full, view = self._entries[index].full, self._bound[0].views()[index]
        with torch.inference_mode(False), torch.no_grad():
            if full.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
                view.copy_(full)
                compat.set_data(full, view)
        return view

    def prepare(self) -> None:
        """What was gathered is about to be shown."""
        if self._codec is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._codec.after_gather([entry.full for entry in self._entries])

    def retire(self) -> None:
        """What was shown is about to go."""
        if self._codec is not None:
            self._codec.before_release([entry.full for entry in self._entries])
