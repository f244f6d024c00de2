"""The seam between experts and whoever keeps what their backward needs.

An expert layer computes on static buffers of `capacity` rows, of which only the first `live_rows` mean something; the number is on
the device and unknown to the host. In forward it gives the buffers it needs again to its saver, in backward it asks for them back:

    forward(ctx, ...)       ctx.rows = saver.save([expert_input, gate_up], live_rows)
    backward(ctx, ...)      expert_input, gate_up = ctx.rows.load()

`OrdinarySaver` keeps the buffers as they are. A paged stash keeps their live rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightning_mfsdp.engine import EngineStateError

__all__ = ["OrdinarySaver", "Originals", "RowSaver", "SavedRows", "SavesRows"]


class SavedRows(Protocol):
    """What was given to a saver in one forward."""

    def load(self) -> list[Tensor]:
        """The tensors, in the order they were given; rows past the live ones hold anything. Once, in the backward."""
        ...


class RowSaver(Protocol):
    """Keeps buffers from the forward of an expert layer to its backward."""

    def save(self, tensors: Sequence[Tensor], live_rows: Tensor) -> SavedRows:
        """Take buffers. Called where a backward may follow: under `torch.is_grad_enabled()`, as seen outside an autograd.Function.

        Args:
            tensors: Of shape [capacity, ...], contiguous. Nobody writes to them afterwards.
            live_rows: int64 on the same device, one element: how many first rows mean something. Nobody writes to it before the load.

        Returns:
            What the backward loads them from. It is kept on `ctx`, and nowhere else.
        """
        ...


@runtime_checkable
class SavesRows(Protocol):
    """An expert layer that saves through a saver, by which a paged stash knows it.

    Attributes:
        saver: In use; `OrdinarySaver()` at first.
    """

    saver: RowSaver

    def set_saver(self, saver: RowSaver) -> None:
        """Save through another one from the next forward on."""
        ...


class Originals:
    """Saved tensors as they are, which nobody may write to meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Detached: the graph that made a tensor must not be kept alive by what it keeps alive.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def tensors(self) -> list[Tensor]:
        """The tensors.

        Raises:
            EngineStateError: One was written to since it was saved.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise EngineStateError(
                    f"experts: a tensor of shape {list(tensor.shape)} that backward needs was written to in place after it was saved "
                    f"(version {tensor._version}, expected {version}); clone it before writing"
                )
        return list(self._tensors)


class OrdinarySaver:
    """Keeps buffers whole, as autograd would."""

    def save(self, tensors: Sequence[Tensor], live_rows: Tensor) -> SavedRows:
        """See `RowSaver.save`."""
        return OrdinaryRows(tensors)


class OrdinaryRows:
    """Buffers that are simply held. They may be loaded again and again (`retain_graph`)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._originals = Originals(tensors)

    def load(self) -> list[Tensor]:
        """See `SavedRows.load`."""
        return self._originals.tensors()
