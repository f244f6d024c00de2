"""WholeTensor: what sharded tensors show as a plain tensor, the same on every rank: results of reductions, and views.

    p.norm(), p.sum(0)                  a result. It may join a loss or a log, and has the methods that FSDP2's results have
    p.data[0].zero_(), p.grad[:2].mul_(0), nn.init.orthogonal_(p.data), r = p[:2] and later r.clamp_(...) under no_grad
                                        a view: part of a sharded tensor as indexing, `view`, `T` or `chunk` show it

Where ranks hold different rows, a view lies in the whole tensor, gathered for this use. If the tensor was written since, an operation
on the view gets a view of a newly gathered whole, with its history if it had one; graphs keep what they saved. All ranks
compute the same, and of what was written through the view each keeps its rows. Where every rank has all rows, the view lies in the tensor
itself, and code that reads the tensor is notified of writes.

Alternatives considered: refusing such writes (DDP and plain PyTorch allow them, and a program that freezes embedding rows has no other
way); classifying functions by name alone (`out=`, `foreach` and library code write without such a name; version counters tell); gathering
again for every use (a rank that reads a view alone, for a log, would wait for the others; a graph that saved it would be out of date).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.engine.core.held_back import HeldBackGradient
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor
from lightning_mfsdp.engine.core.torch_functions import describes, is_in_place, makes_alike, written_argument

__all__ = ["Gathered", "WholeTensor", "in_memory_of", "views_in", "with_views"]

# A rank may print a view, or query where it lies, by itself: it is not gathered for that.
_BY_ONE_RANK = frozenset(("__repr__", "__str__", "__format__", "data_ptr", "backward"))

# They call a function again with other tensors, or, if sharded, with views that have present values.
_HANDLE_WHOLES = (ShardedTensor, StandIn, HeldBackGradient)


def in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a view of another one's memory."""
    if tensor.layout is not torch.strided or not tensor.numel() or isinstance(tensor, ShardedTensor):
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(eq=False)
class Gathered:
    """All of a sharded tensor, in memory that views show.

    Attributes:
        source: The sharded tensor.
        memory: All of it, contiguous; with history where a loss may be computed from it.
        again: Gathers all of it again. Collective.
        writes: How often the source had been written when it was gathered, counting only writes that are known to all ranks.
    """

    source: ShardedTensor
    memory: Tensor
    again: Callable[[], Tensor]
    writes: int

    @property
    def present_writes(self) -> int:
        """How often the source has been written."""
        return self.source.known_writes

    def present(self) -> Gathered:
        """One with the present values: this one, or another in memory of its own, as graphs may have saved these. Collective if written."""
        writes = self.present_writes
        return self if self.writes == writes else Gathered(self.source, self.again(), self.again, writes)

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


class WholeTensor(Tensor):
    """The same on every rank.

    What is computed from results alone is a result too. What is computed from a view is an ordinary tensor, what is viewed of it a view.

    Attributes:
        source: Of a view, the sharded tensor; `None` for a result.
        gathered: Of a view, the memory that it lies in; `None`: that of the source itself.
    """

    source: ShardedTensor | None = None
    gathered: Gathered | None = None

    @staticmethod
    def of(plain: Tensor, source: ShardedTensor | None = None, gathered: Gathered | None = None) -> WholeTensor:
        """A plain tensor, with or without history, as a result, or, with a source, as a view."""
        whole: WholeTensor = plain.as_subclass(WholeTensor)
        if source is not None:
            whole.source, whole.gathered = source, gathered
            source.note_taken(whole)
        return whole

    def keep_values(self) -> None:
        """A view of a weight whose memory is exchanged: from now on it is a result. One that has not seen the last write stays a view."""
        if self.gathered is not None and self.gathered.present_writes != self.gathered.writes:
            return
        if self.gathered is None:
            with compat.without_torch_function():
                compat.set_data(self, self.detach().clone())
        self.source = self.gathered = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        are_all_ours = True
        for kind in types:
            if issubclass(kind, _HANDLE_WHOLES):
                return NotImplemented
            are_all_ours = are_all_ours and issubclass(cls, kind)
        tensors = tensors_in((args, kwargs))
        if not views_in(tensors):
            if not are_all_ours:
                return NotImplemented
            with compat.without_torch_function():
                result = func(*args, **kwargs)
                is_result = type(result) is Tensor and all(isinstance(tensor, cls) for tensor in tensors)
                return WholeTensor.of(result) if is_result else result
        with with_views(func, args, kwargs) as (views, args, kwargs), compat.without_torch_function():
            return map_tensors(lambda tensor: _as_view(tensor, views), func(*args, **kwargs))

    def full_tensor(self) -> Tensor:
        """Itself, as an ordinary tensor with the present values. Collective for views where ranks hold different rows."""
        with compat.without_torch_function():
            present = _present([self]).get(id(self), self)
            return present.as_subclass(torch.Tensor)

    def to_local(self) -> Tensor:
        """See `full_tensor`."""
        return self.full_tensor()

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor. The array of a view is for reading: what is written to it is not seen."""
        array = self.full_tensor().detach().numpy(force=force)
        if self.source is not None:
            array.setflags(write=False)
        return array

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        if self.source is None:
            return self.full_tensor().__dlpack__(*args, **options)
        raise EngineStateError(
            f"a view of parameter {self.source.described} is handed to another library (DLPack), whose writes would not be seen; hand "
            "over view.full_tensor().clone()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.full_tensor(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)


def views_in(tensors: Sequence[Tensor]) -> list[WholeTensor]:
    """Those that show part of a sharded tensor."""
    return [tensor for tensor in tensors if isinstance(tensor, WholeTensor) and tensor.source is not None]


@contextmanager
def with_views(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[list[WholeTensor], tuple[Any, ...], dict[str, Any]]]:
    """Around a torch function that is called with views: before it they have present values, after it what it wrote is kept. Collective.

    Yields:
        The views, and the arguments to call it with: views of one tensor lie in the same memory, as they may overlap.

    Raises:
        EngineStateError: It writes to a view that needs a gradient.
    """
    views = views_in(tensors_in((args, kwargs)))
    if describes(function) or makes_alike(function) or getattr(function, "__name__", "") in _BY_ONE_RANK:
        yield views, args, kwargs
        return
    for view in _written_by_name(function, args, kwargs):
        if torch.is_grad_enabled() and view.requires_grad:
            raise EngineStateError(
                f"{function.__name__} on a view of parameter {_source(view).described}: it needs a gradient, and autograd cannot follow a "
                "write in place; write under torch.no_grad(), or to a view of its data"
            )
    for view in views:
        _source(view).before_use()
    with compat.without_torch_function():
        if moved := _present(views):
            args, kwargs = map_tensors(lambda tensor: moved.get(id(tensor), tensor), (args, kwargs))
            views = [moved.get(id(view), view) for view in views]
        written = {id(view) for view in _written_by_name(function, args, kwargs)}
        before = [None if view.is_inference() else view._version for view in views]
    yield views, args, kwargs
    with compat.without_torch_function():
        for view, version in zip(views, before, strict=True):
            if id(view) in written or (version is not None and view._version != version):
                if view.gathered is not None:
                    view.gathered.write_back(view)
                _source(view).note_write()


def _source(view: WholeTensor) -> ShardedTensor:
    assert view.source is not None, "a view shows something"
    return view.source


def _present(views: Sequence[WholeTensor]) -> dict[int, WholeTensor]:
    """Of views that are out of date, or show one tensor in several wholes, the same views of one whole; by identity. Collective.

    A rank without rows of a tensor may not detect that two wholes belong to one. It keeps nothing of what is written.
    """
    wholes = {id(view.gathered): view.gathered for view in views if view.gathered is not None}
    present = {key: whole.present() for key, whole in wholes.items()}
    if len(present) > 1:
        first: dict[tuple[int, torch.dtype], Gathered] = {}
        for key, whole in present.items():
            local = whole.source._local_tensor
            if local.numel() and not whole.memory.requires_grad:
                present[key] = first.setdefault((local.data_ptr(), local.dtype), whole)
    moved: dict[int, WholeTensor] = {}
    for view in views:
        before = view.gathered
        if before is not None and (now := present[id(before)]) is not before:
            memory = now.memory if view.requires_grad else now.memory.detach()
            moved[id(view)] = WholeTensor.of(before.like(view, memory), view.source, now)
    return moved


def _written_by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WholeTensor]:
    """Views that a function definitely writes to: its first argument, or `out`."""
    return views_in(tensors_in(written_argument(args, kwargs))) if is_in_place(function, kwargs) else []


def _as_view(tensor: Tensor, views: Sequence[WholeTensor]) -> Tensor:
    """What a function returned, as a view too if it shows the memory of one."""
    if isinstance(tensor, WholeTensor):
        return tensor
    for view in views:
        if in_memory_of(tensor, view):
            return WholeTensor.of(tensor, view.source, view.gathered)
    return tensor
