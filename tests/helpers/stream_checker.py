"""Finds on a CPU what goes wrong on a GPU alone: work on one stream that does not wait for work on another.

A GPU runs streams side by side, so code that forgets to wait is right most of the time and on a CPU always. Here the engine gets streams
that only keep count. A `TorchDispatchMode` sees every operation, which memory it reads and writes, and on which stream it was issued.
Each stream has a clock, and knows of every other stream how much of its work is surely done (a vector clock: an event carries what
the stream that recorded it knew, and who waits for the event learns it). Two uses of the same bytes, at least one of them a
write, must be ordered by what is known; so must the last use of memory that was freed and the first write of whoever gets it next.
The allocator of PyTorch gives freed memory to the next who asks on the stream on which it was allocated, at once, whatever other
streams still do with it: any allocation may get any memory that was freed on its stream.

Source of the method: FastTrack (Flanagan and Freund, PLDI 2009) and PyTorch's `torch.cuda._sanitizer`, which does the same for kernels on
a GPU, without freed memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mfsdp.base.streams import Streams
from tests.engine.internals import Ranges
from tests.engine.internals import context as context_module

COMPUTE = "compute"
STEP = "step"
CPU = torch.device("cpu")
Known = dict[str, int]

# Operations whose schema does not say that they write: places of what they write among their arguments.
_WRITES = {
    "c10d::_allgather_base_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "c10d::allreduce_": (0,),
    "c10d::allreduce_coalesced_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::broadcast_": (0,),
}


@dataclass(frozen=True)
class Use:
    """One use of some bytes of a storage."""

    start: int
    end: int
    stream: str
    clock: int
    writes: bool
    what: str


@dataclass
class Memory:
    """What is known of one storage.

    Attributes:
        stream: Where it was allocated.
        before: Its last owners' uses, by stream: done before it is written for the first time.
        uses: That later ones must come after.
    """

    stream: str
    before: Known = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)


class Event:
    """What a stream knew when it was recorded."""

    def __init__(self, known: Known) -> None:
        self.known = known


class Checker(TorchDispatchMode):
    """Watches the operations of this thread.

    Attributes:
        stream: The current one.
        problems: What was found, once for each pair of operations.
        waits: Places in the code that waited for an event that said something new.
        left_out: One of them, whose waits do nothing.
        issued: Collectives and steps of optimizers, in their order; a line each.
        known_before: For each line, how much of each stream's work was surely done before.
    """

    def __init__(self, left_out: str = "") -> None:
        super().__init__()
        self.stream = COMPUTE
        self.problems: dict[str, None] = {}
        self.waits: dict[str, None] = {}
        self.left_out = left_out
        self.issued: list[str] = []
        self.known_before: list[Known] = []
        self.concerns = ""  # what the engine says a collective is for
        self._known: dict[str, Known] = {}
        self._freed: dict[str, Known] = {}
        self._memory: dict[int, Memory] = {}

    def note(self, line: str) -> None:
        """Something is issued on the current stream."""
        self.issued.append(line)
        self.known_before.append(dict(self.known(self.stream)))

    # -- streams -------------------------------------------------------------------------------------------------------

    def streams(self, device: torch.device = CPU) -> CheckedStreams:
        """Streams that this watches."""
        kind: type[CheckedStreams] = type("CheckedStreams", (CheckedStreams,), {"checker": self})
        return kind(device)

    def known(self, stream: str) -> Known:
        """How much of each stream's work is done before what comes next on this one."""
        return self._known.setdefault(stream, {})

    def record(self) -> Event:
        """An event after the work issued so far on the current stream."""
        return Event(dict(self.known(self.stream)))

    def wait(self, event: Event, stream: str, place: str) -> None:
        """Later work on `stream` comes after the event."""
        if not _is_ordered(event.known, self.known(stream)):
            self.waits[place] = None
            if place != self.left_out:
                _learn(self.known(stream), event.known)

    def join(self) -> None:
        """All streams wait for each other."""
        everything: Known = {}
        for known in self._known.values():
            _learn(everything, known)
        for known in self._known.values():
            _learn(known, everything)

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocated(self, storage: torch.UntypedStorage) -> Memory:
        """A storage has memory from now on."""
        memory = Memory(self.stream, dict(self._freed.get(self.stream, {})))
        if storage._cdata not in self._memory:
            weakref.finalize(storage, self.freed, storage._cdata).atexit = False
        self._memory[storage._cdata] = memory
        return memory

    def freed(self, key: int) -> None:
        """A storage has no memory any more, or is gone."""
        memory = self._memory.pop(key, None)
        if memory is not None:
            pending = self._freed.setdefault(memory.stream, {})
            _learn(pending, memory.before)
            _learn(pending, _latest(memory.uses))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage's memory goes, or comes."""
        if size == 0:
            memory = self._memory.get(storage._cdata)
            if memory is not None:
                _learn(self._freed.setdefault(memory.stream, {}), _latest(memory.uses))
                memory.uses.clear()
        else:
            self.allocated(storage)

    def _use(self, tensor: Tensor, what: str, *, writes: bool) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:  # from before this began
            memory = self.allocated(storage)
            memory.before = {}
        known = self.known(self.stream)
        if writes and memory.before:
            if not _is_ordered(memory.before, known):
                self._found(f"{what} on {self.stream} writes memory of {memory.stream} that others still use")
            memory.before = {}
        start = tensor.storage_offset() * tensor.itemsize
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        use = Use(start, start + span * tensor.itemsize, self.stream, known[self.stream], writes, what)
        kept = []
        for other in memory.uses:
            if other.end <= use.start or use.end <= other.start or not (writes or other.writes):
                kept.append(other)
                continue
            is_ordered = known.get(other.stream, 0) >= other.clock
            if not is_ordered:
                verb = {True: "writes", False: "reads"}
                self._found(
                    f"{what} on {use.stream} {verb[writes]} what {other.what} on {other.stream} {verb[other.writes]}"
                )
            if not (writes and is_ordered and use.start <= other.start and other.end <= use.end):
                kept.append(other)
        memory.uses = [*kept, use]

    def _found(self, problem: str) -> None:
        self.problems[problem] = None

    def read_by_host(self, tensor: Tensor, what: str) -> None:
        """The host reads values, without an operation that is dispatched."""
        known = self.known(self.stream)
        known[self.stream] = known.get(self.stream, 0) + 1
        self._use(tensor, what, writes=False)

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name, arguments = operator._schema.name, operator._schema.arguments
        read: list[Tensor] = []
        written: list[Tensor] = []
        for index, argument in enumerate(arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            is_written = index in _WRITES.get(name, ()) or (alias is not None and alias.is_write)
            (written if is_written else read).extend(_tensors(value))
        given = {tensor.untyped_storage()._cdata for tensor in (*read, *written) if _has_storage(tensor)}
        made = [one for one in _tensors(result) if _has_storage(one) and one.untyped_storage()._cdata not in given]
        if not (made or written or name == "aten::_local_scalar_dense"):
            return result  # a view
        if name.startswith("c10d::"):
            sizes = " -> ".join(str(sum(one.nbytes for one in some)) for some in (read, written) if some)
            (group,) = (
                dist.ProcessGroup.unbox(one)
                for one in args
                if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())
            )
            purpose = f" ({self.concerns})" if self.concerns else ""
            self.note(f"{self.stream}: {name.removeprefix('c10d::')} {sizes} bytes, {group.size()} ranks{purpose}")
        known = self.known(self.stream)
        known[self.stream] = known.get(self.stream, 0) + 1
        for tensor in made:
            self.allocated(tensor.untyped_storage())
        for tensor in read:
            self._use(tensor, name, writes=False)
        if not name.startswith("aten::empty"):
            for tensor in (*written, *made):
                self._use(tensor, name, writes=True)
        return result


class CheckedStreams(Streams):
    """The engine's streams, by name."""

    checker: Checker

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gather, self.reduce, self.outer = "gather", "reduce", "outer"
        self.copy_in, self.copy_out = "copy in", "copy out"

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Issue work on a stream."""
        before, self.checker.stream = self.checker.stream, stream
        try:
            yield
        finally:
            self.checker.stream = before

    def record(self) -> Any:
        """See `Checker.record`."""
        return self.checker.record()

    def wait(self, event: Any, stream: Any = None) -> None:
        """See `Checker.wait`."""
        if event is not None:
            frame = sys._getframe(1)
            place = place_of(Path(frame.f_code.co_filename), frame.f_lineno)
            self.checker.wait(event, stream or self.checker.stream, place)

    def join_when_gone(self, owner: object) -> None:
        """See `Streams.join_when_gone`."""
        weakref.finalize(owner, self.checker.join).atexit = False


@contextmanager
def checked_streams(left_out: str = "") -> Iterator[Checker]:
    """Models that are sharded inside have streams that are watched."""
    checker = Checker(left_out)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        checker.resized(storage, size)
        return resize(storage, size)

    def listed(tensor: Tensor) -> Any:
        checker.read_by_host(tensor, "tolist")
        return to_list(tensor)

    around, stepped, to_list = Ranges.around, context_module.Context.optimizer_stepped, Tensor.tolist

    def named(ranges: Ranges, what: str, name: str) -> Ranges:
        checker.concerns = f"{what} {name}"
        return around(ranges, what, name)

    def noted(context: Any, groups: Any) -> None:
        checker.note(STEP)
        stepped(context, groups)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Ranges, "around", named))
        stack.enter_context(mock.patch.object(context_module.Context, "optimizer_stepped", noted))
        stack.enter_context(mock.patch.object(context_module, "Streams", checker.streams))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(mock.patch.object(Tensor, "tolist", listed))
        stack.enter_context(checker)
        yield checker


def place_of(path: Path, line: int) -> str:
    """A line of code, for people."""
    return f"{path.name}:{line}"


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not hasattr(tensor, "_local_tensor")


def _is_ordered(earlier: Known, later: Known) -> bool:
    return all(later.get(stream, 0) >= clock for stream, clock in earlier.items())


def _learn(known: Known, other: Known) -> None:
    for stream, clock in other.items():
        known[stream] = max(known.get(stream, 0), clock)


def _latest(uses: Iterable[Use]) -> Known:
    found: Known = {}
    for use in uses:
        found[use.stream] = max(found.get(use.stream, 0), use.clock)
    return found
