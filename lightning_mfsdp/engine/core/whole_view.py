"""WholeView: part of a sharded tensor as indexing, `view`, `T` or `chunk` show it. It reads and writes what the sharded tensor holds.

    p.data[0].zero_(), p.grad[:2].mul_(0), nn.init.orthogonal_(p.data), r = p[:2] and later r.clamp_(...) under no_grad

Where ranks hold different rows, such a view lies in the whole tensor, gathered for this use. If the tensor was written since, an operation
on the view gets a view of a newly gathered whole, with its history if it had one; graphs keep what they saved. All ranks
compute the same, and of what was written through the view each keeps its rows. Where every rank has all rows, the view lies in the tensor
itself, and code that reads the tensor is notified of writes.

Alternatives considered: refusing such writes (DDP and plain PyTorch allow them, and a program that freezes embedding rows has no other
way); classifying functions by name alone (`out=`, `foreach` and library code write without such a name; version counters tell); gathering
again for every use (a rank that reads a view alone, for a log, would wait for the others; a graph that saved it would be out of date).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.number import Number
from lightning_mfsdp.engine.core.placed_tensor import PlacedTensor
from lightning_mfsdp.engine.core.torch_functions import describes, is_in_place, makes_alike, written_argument

__all__ = ["Whole", "WholeView", "in_memory_of", "with_views"]

# A rank may print a view, or query where it lies, by itself: it is not gathered for that.
_BY_ONE_RANK = frozenset(("__repr__", "__str__", "__format__", "data_ptr", "backward"))


def in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a view of another one's memory."""
    if tensor.layout is not torch.strided or not tensor.numel() or isinstance(tensor, PlacedTensor):
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(eq=False)
class Whole:
    """All of a sharded tensor, in memory that views show.

    Attributes:
        source: The sharded tensor.
        memory: All of it, contiguous; with history where a loss may be computed from it.
        again: Gathers all of it again. Collective.
        writes: How often the source had been written when it was gathered, counting only writes that are known to all ranks.
    """

    source: PlacedTensor
    memory: Tensor
    again: Callable[[], Tensor]
    writes: int

    def present(self) -> Whole:
        """One with the present values: this one, or another in memory of its own, as graphs may have saved these. Collective if written."""
        writes = self.source.known_writes
        return self if self.writes == writes else Whole(self.source, self.again(), self.again, writes)

    def write_back(self, view: Tensor) -> None:
        """Keep this rank's rows of what a view shows; other rows are unchanged."""
        local = self.source._local_tensor
        with torch.no_grad():
            memory = torch.empty_like(self.memory)
            self.source.put_into(memory)
            self.like(view, memory).copy_(view)
            local.copy_(self.source.of_whole(memory))

    def like(self, view: Tensor, memory: Tensor) -> Tensor:
        """What a view of the whole is in other memory like it."""
        start = view.storage_offset() * view.element_size() - self.memory.storage_offset() * self.memory.element_size()
        start += memory.storage_offset() * memory.element_size()
        typed = memory if memory.dtype == view.dtype else memory.view(-1).view(view.dtype)
        return typed.as_strided(view.size(), view.stride(), start // view.element_size())


class WholeView(Number):
    """The same on every rank; what is computed from it is an ordinary tensor, what is viewed of it one of these."""

    _source: PlacedTensor
    _whole: Whole | None

    @staticmethod
    def of(view: Tensor, source: PlacedTensor, whole: Whole | None) -> WholeView:
        """A plain tensor, with or without history, as a view of a sharded one.

        Args:
            view: The plain one.
            source: What it shows a part of.
            whole: All of it, in the view's memory; `None`: that is the memory of `source` itself.
        """
        made: WholeView = view.as_subclass(WholeView)
        made._source, made._whole = source, whole
        return made

    @property
    def source(self) -> PlacedTensor:
        """What it shows a part of."""
        return self._source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, PlacedTensor) for kind in types):
            return NotImplemented  # sharded tensors handle it, and call `with_views`
        kwargs = kwargs or {}
        with with_views(func, args, kwargs) as (views, args, kwargs), compat.without_torch_function():
            return map_tensors(lambda one: _viewed(one, views), func(*args, **kwargs))

    def full_tensor(self) -> Tensor:
        """Itself, as an ordinary tensor with the present values. Collective where ranks hold different rows."""
        with compat.without_torch_function():
            present = _present([self])
        return super(WholeView, present.get(id(self), self)).full_tensor()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor, to be read: what is written to an array is not seen."""
        found = self.full_tensor().detach().numpy(force=force)
        found.setflags(write=False)
        return found

    def __dlpack__(self, *args: Any, **options: Any) -> NoReturn:
        raise EngineStateError(
            f"a view of parameter {self._source.described} is handed to another library (DLPack), whose writes would not be seen; hand "
            "over view.full_tensor().clone()"
        )


@contextmanager
def with_views(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[list[WholeView], tuple[Any, ...], dict[str, Any]]]:
    """Around a torch function that is called with views: before it they have present values, after it what it wrote is kept. Collective.

    Yields:
        The views, and the arguments to call it with: views of one tensor lie in the same memory, as they may overlap.

    Raises:
        EngineStateError: It writes to a view that needs a gradient.
    """
    views = [one for one in tensors_in((args, kwargs)) if isinstance(one, WholeView)]
    if describes(function) or makes_alike(function) or getattr(function, "__name__", "") in _BY_ONE_RANK:
        yield views, args, kwargs
        return
    for view in _written_by_name(function, args, kwargs):
        if torch.is_grad_enabled() and view.requires_grad:
            raise EngineStateError(
                f"{function.__name__} on a view of parameter {view.source.described}: it needs a gradient, and autograd cannot follow a "
                "write in place; write under torch.no_grad(), or to a view of its data"
            )
    for view in views:
        view.source.have_all()
    with compat.without_torch_function():
        if moved := _present(views):
            args, kwargs = map_tensors(lambda one: moved.get(id(one), one), (args, kwargs))
            views = [moved.get(id(view), view) for view in views]
        named = _written_by_name(function, args, kwargs)
        before = [None if view.is_inference() else view._version for view in views]
    yield views, args, kwargs
    with compat.without_torch_function():
        for view, version in zip(views, before, strict=True):
            if any(view is one for one in named) or (version is not None and view._version != version):
                if view._whole is not None:
                    view._whole.write_back(view)
                view.source.note_write()


def _present(views: Sequence[WholeView]) -> dict[int, WholeView]:
    """Of views that are out of date, or show one tensor in several wholes, the same views of one whole; by identity. Collective.

    A rank without rows of a tensor may not detect that two wholes belong to one. It keeps nothing of what is written.
    """
    wholes = {id(view._whole): view._whole for view in views if view._whole is not None}
    present = {key: whole.present() for key, whole in wholes.items()}
    if len(present) > 1:
        first: dict[tuple[int, torch.dtype], Whole] = {}
        for key, whole in present.items():
            local = whole.source._local_tensor
            if local.numel() and not whole.memory.requires_grad:
                present[key] = first.setdefault((local.data_ptr(), local.dtype), whole)
    moved: dict[int, WholeView] = {}
    for view in views:
        before = view._whole
        if before is not None and (now := present[id(before)]) is not before:
            memory = now.memory if view.requires_grad else now.memory.detach()
            moved[id(view)] = WholeView.of(before.like(view, memory), view._source, now)
    return moved


def _written_by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WholeView]:
    """Views that a function definitely writes to: its first argument, or `out`."""
    if not is_in_place(function, kwargs):
        return []
    return [one for one in tensors_in(written_argument(args, kwargs)) if isinstance(one, WholeView)]


def _viewed(one: Tensor, views: Sequence[WholeView]) -> Tensor:
    """What a function returned, as a view too if it shows the memory of one."""
    if isinstance(one, WholeView):
        return one
    for view in views:
        if in_memory_of(one, view):
            return WholeView.of(one, view._source, view._whole)
    return one
