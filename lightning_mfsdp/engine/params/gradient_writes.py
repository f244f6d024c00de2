"""Gradients of weights that layers write themselves, into the buffer in which they are reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mfsdp.engine.memory.buffer import FlatBuffer

__all__ = ["DirectWrites"]


class DirectWrites:
    """What layers wrote into a full-size buffer since the last reduction.

    Attributes:
        target: The buffer; `None` if nothing was written.
        is_new: Its other cells are undefined.
        written: Which tensors of the layout are there.
    """

    def __init__(self) -> None:
        self.target: FlatBuffer | None = None
        self.is_new = False
        self.written: set[int] = set()
        self._aside: list[tuple[Tensor, Tensor]] = []

    def begin(self, target: FlatBuffer, *, is_new: bool) -> None:
        """Gradients go to `target` from now on; with `is_new` it holds nothing yet."""
        self.target, self.is_new = target, is_new

    def add(self, index: int, left: Tensor, right: Tensor) -> None:
        """Write, or add, the product `left @ right` as the gradient of a tensor of the layout."""
        assert self.target is not None, "begin() comes first"
        view = self.target.views()[index]
        if self.is_new and index not in self.written:
            _product_into(view, left, right)
        else:
            _add_product(view, left, right)
        self.written.add(index)

    def memory(self, index: int, *, overwrites: bool) -> tuple[Tensor, bool]:
        """Where a layer is to write the gradient of a tensor of the layout, and whether that is memory beside the buffer.

        What is beside it is added later, so what overwrites never meets what is there already.
        """
        assert self.target is not None, "begin() comes first"
        self._add_aside()
        view = self.target.views()[index]
        is_first = self.is_new and index not in self.written
        self.written.add(index)
        if overwrites and not is_first:
            self._aside.append((view, torch.empty_like(view)))
            return self._aside[-1][1], True
        if is_first and not overwrites:
            view.zero_()
        return view, False

    def pieces(self) -> dict[int, Tensor]:
        """What was written and is not reduced yet, by tensor of the layout."""
        if self.target is None:
            return {}
        self._add_aside()
        views = self.target.views()
        return {index: views[index] for index in sorted(self.written)}

    def _add_aside(self) -> None:
        """Add what layers wrote beside the buffer since."""
        for view, piece in self._aside:
            view.add_(piece)
        self._aside.clear()

    def joined(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Forget the buffer; returns the gradients that autograd left along with those that layers wrote, in the buffer's memory."""
        target = self.target
        for index in sorted(self.end()):
            assert target is not None, "something was written"
            late, view = grads[index], target.views()[index]
            grads[index] = view if late is None else view.add_(late)
        return grads

    def end(self) -> frozenset[int]:
        """Forget the buffer; returns which tensors' cells of a new one are defined."""
        self._add_aside()
        written = frozenset(self.written) if self.is_new else frozenset()
        self.target, self.is_new = None, False
        self.written.clear()
        return written


def _product_into(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        torch.mm(left, right, out=view)
    elif _has_wide_product(view, left):
        torch.mm(left, right, out_dtype=view.dtype, out=view)
    else:
        view.copy_(left @ right)


def _add_product(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        view.addmm_(left, right)
    elif _has_wide_product(view, left):
        torch.addmm(view, left, right, out_dtype=view.dtype, out=view)
    else:
        view.add_(left @ right)


def _has_wide_product(view: Tensor, left: Tensor) -> bool:
    return view.is_cuda and view.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16)
