"""LayerChunk: consecutive layers of which only the first one's input is kept.

Each layer is a region by itself, and its saved tensors are its own. But a layer whose input is what the previous layer returned
keeps a link to that instead of a tensor. In backward the last layer comes first. It reads its link, which recomputes the layers before it,
the first one first, each once: their saved tensors exist when their own backward comes, and their results are passed along the links.

A region is recomputed when one of its saved tensors is unpacked, in any checkpoint. So each link has one of its own.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerChunk", "Link", "Linked", "Order", "Results", "handle"]


class Results:
    """What a region returned, recomputed for the region after it.

    Attributes:
        linked: There is a region after it.
        tensors: Set from when the region is recomputed until the one after it has been, too.
    """

    def __init__(self) -> None:
        self.linked = False
        self.tensors: list[Tensor] | None = None

    def note(self, outputs: Sequence[Tensor]) -> None:
        """Keep what the region returned when it was recomputed, if the region after it has to read that."""
        if self.linked:
            self.tensors = [tensor.detach() for tensor in outputs]


class Link:
    """What the region after another one keeps instead of the tensors that it was given by that one.

    Args:
        results: Of the region.
        handle: Computed inside the region, from a tensor it saved.
        before: The region's own link to the one before it.
    """

    def __init__(self, results: Results, handle: Tensor, before: Link | None) -> None:
        self._results, self._handle, self._before = results, handle, before

    def tensors(self) -> list[Tensor]:
        """What the region returned, recomputed unless that just happened."""
        missing: list[Link] = []
        link: Link | None = self
        while link is not None and link._results.tensors is None:
            missing.append(link)
            link = link._before
        for earlier in reversed(missing):
            _ = earlier._handle.grad_fn.saved_tensors  # type: ignore[union-attr]
        assert self._results.tensors is not None, "the region was recomputed"
        return self._results.tensors

    def used(self) -> None:
        """A region that reads this link has run, so results have to be kept when the region is recomputed."""
        self._results.linked = True

    def taken(self) -> None:
        """The region that reads this link has read what it needs: free the results."""
        self._results.tensors = None


class Linked:
    """An input that is a result of the region before."""

    def __init__(self, link: Link, index: int, *, needs_grad: bool) -> None:
        self._link, self._index, self._needs_grad = link, index, needs_grad

    def take(self) -> Tensor:
        """The input for another forward, detached from what computed it."""
        return self._link.tensors()[self._index].detach().requires_grad_(self._needs_grad)


class Order:
    """Which layer of the chunks of a model ran last.

    Attributes:
        last: Its name.
    """

    def __init__(self) -> None:
        self.last = ""


class LayerChunk:
    """State of the layers of one chunk in a forward.

    Args:
        names: Of the layers, in order.
        order: Of the model.
    """

    def __init__(self, names: Sequence[str], order: Order) -> None:
        self.names = tuple(names)
        self._order = order
        self._link: Link | None = None
        self._outputs: list[tuple[weakref.ref[Tensor], int]] = []
        self._has_warned = False

    def inputs(self, index: int, tensors: Sequence[Tensor]) -> tuple[Link | None, dict[int, Linked]]:
        """Which inputs of layer `index` are results of the previous layer, by position, and the link they share."""
        link, outputs = self._link, self._outputs
        follows = index > 0 and self._order.last == self.names[index - 1]
        self._order.last = self.names[index]
        self._stop()
        if not follows:
            return None, {}
        linked: dict[int, Linked] = {}
        for position, tensor in enumerate(tensors):
            for number, (reference, version) in enumerate(outputs):
                output = reference()
                if link is not None and output is not None and _is_same(tensor, output, version):
                    linked[position] = Linked(link, number, needs_grad=tensor.requires_grad)
        if not linked and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Recompute: {self.names[index]} is given no tensor that {self.names[index - 1]} returned, as it was returned, so its own "
                "input is kept as well, and num_layers saves less than it could. Call them one right after the other, or give num_layers=1",
                stacklevel=2,
            )
        return (link, linked) if linked else (None, {})

    def offer(self, index: int, outputs: Sequence[Tensor], link: Link) -> None:
        """Layer `index` has run; the next may link to it as long as its results are alive."""
        if index + 1 < len(self.names):
            this = weakref.ref(self)

            def gone(_: Any) -> None:
                chunk = this()
                if chunk is not None and chunk._link is link:
                    chunk._stop()

            self._link = link
            self._outputs = [(weakref.ref(tensor, gone), tensor._version) for tensor in outputs]

    def _stop(self) -> None:
        """Offer the next layer nothing to link to."""
        self._link, self._outputs = None, []


def handle() -> Tensor:
    """A tensor that is computed inside a region and saves another one, so that unpacking that one recomputes the region."""
    return _Handle.apply(torch.empty(0, requires_grad=True, device="cpu"))  # type: ignore[no-any-return]


def _is_same(tensor: Tensor, output: Tensor, version: int) -> bool:
    """Whether a tensor is another one, or a view of all of it (units pass their inputs on as views), and not written to since."""
    if tensor is output:
        return output._version == version
    # Not by address: tensors without elements have none, and a rank without tokens must behave like all others.
    is_plain = type(tensor) is type(output) is Tensor and tensor.dtype == output.dtype
    return is_plain and tensor.is_set_to(output) and output._version == version


class _Handle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(leaf)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
