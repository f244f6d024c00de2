"""Tree: small objects between all ranks over sockets, so that no rank has more than a few connections, whatever their number is.

Rank 0 is the root. The ranks after the first one of a range are divided into `FAN_OUT` ranges of equal length, whose first ranks are its
children; so each rank speaks for consecutive ranks, which launchers place on the same host:

    0 .. 4095     0 has the children 1, 257, 513, ...
    1 .. 256      1 has the children 2, 18, 34, ...
    2 .. 17       2 has the children 3 .. 17

What travels between rank 0 and another rank passes at most two others among 4,096, and is unpickled only at its ends. Nothing lies in
memory of a device. A collective of a process group would bring what every rank has to all ranks, or connect each with all others.

A connection ends with its process. The ranks next to it notice, and close theirs, so that all ranks that wait end with an error.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.children import call_in_children
from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.base.sockets import (
    LOOPBACK,
    addresses_of_host,
    end_if_unanswered,
    network_of_host,
)

__all__ = ["FAN_OUT", "RANKS", "SAVES", "Tree", "children_of", "tree_of_all_ranks"]

T = TypeVar("T")
V = TypeVar("V")

FAN_OUT = 16
# Names of trees. Threads that exchange at the same time use different ones.
RANKS = "ranks"
SAVES = "saves"  # in the background
_CONNECT_S = 20.0  # to one address
_GREETING_S = 10.0  # for what has connected to send its token
# For what was connected to, to answer, if there is another address. A parent may be waiting for its own.
_ANSWER_S = 60.0
_BACKLOG = 4096
_LENGTH = struct.Struct("!Q")
_GREETING = struct.Struct("!32sQ")  # what a child says, and its rank
_ANSWER_BYTES = 32
_CHUNK_BYTES = 1 << 20


class _Contact(NamedTuple):
    """Where a rank listens for its children, and what both say there: others may listen at an address that two hosts have."""

    addresses: list[str]
    port: int
    of_child: str
    of_parent: str

    @classmethod
    def of(cls, listener: socket.socket, addresses: list[str]) -> _Contact:
        """Of a listener, with new tokens."""
        return cls(addresses, listener.getsockname()[1], secrets.token_hex(16), secrets.token_hex(16))


def children_of(rank: int, size: int) -> list[range]:
    """The ranks below a rank, as one range for each child, which is its first."""
    lowest, highest = 0, size  # the range that begins with `rank`
    while True:
        parts = _divided(lowest + 1, highest)
        if rank == lowest:
            return parts
        part = next(part for part in parts if rank in part)
        lowest, highest = part.start, part.stop


def _parent_of(rank: int, size: int) -> int:
    lowest, highest = 0, size
    while True:
        part = next(part for part in _divided(lowest + 1, highest) if rank in part)
        if part.start == rank:
            return lowest
        lowest, highest = part.start, part.stop


def _divided(start: int, stop: int) -> list[range]:
    count = min(FAN_OUT, stop - start)
    bounds = [start + (stop - start) * number // count for number in range(count + 1)] if count else []
    return [range(*pair) for pair in pairwise(bounds)]


class Tree:
    """This rank's connections to its parent and its children. Calls are collective, and all by one thread at a time.

    Attributes:
        rank: This one.
        size: Number of ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        parent: socket.socket | None,
        children: Sequence[socket.socket],
        limit_s: float | None,
    ) -> None:
        self.rank, self.size = rank, size
        self._parent, self._children = parent, children
        self._ranges = children_of(rank, size)
        for connection in (*([parent] if parent is not None else []), *children):
            connection.settimeout(limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_if_unanswered(connection)
            call_in_children(connection.close)
        self._limit_s = limit_s
        self._problem = ""

    @classmethod
    def alone(cls) -> Tree:
        """Of one rank."""
        return cls(0, 1, None, [], None)

    @classmethod
    def connected(
        cls, store: compat.Store, place: str, rank: int, size: int, *, limit_s: float | None, meeting_s: float
    ) -> Tree:
        """Connect the ranks. Collective.

        Args:
            store: Where they find each other; each has a few keys in it.
            place: Prefix of the keys. No others may use it at the same time; it may have been used before.
            rank: Of this process.
            size: Number of ranks.
            limit_s: Seconds that a rank waits for another one in a call; `None`: as long as that one lives.
            meeting_s: Seconds to wait for others to connect.

        Raises:
            CollectiveError: One that is next to this rank cannot be reached, or did not come; or the store cannot.
        """
        if size == 1:
            return cls.alone()
        place = f"{place}/of {size}"
        with _naming_lost_store(rank):
            place = f"{place}/{(store.add(f'{place}/starts', 1) - 1) // size}"
        children = [part.start for part in children_of(rank, size)]
        network = json.dumps(network_of_host())
        if rank:
            with _naming_lost_store(rank):
                store.set(f"{place}/{rank}/network", network)
        with contextlib.ExitStack() as closing:
            below = above = None
            if children:
                networks = [_said(store, place, child, "network", rank) for child in children]
                is_local = all(other == network for other in networks)
                listener = closing.enter_context(_listener(is_local=is_local))
                contact = _Contact.of(listener, LOOPBACK if is_local else addresses_of_host())
                with _naming_lost_store(rank):
                    store.set(f"{place}/{rank}/contact", json.dumps(contact))
                below = listener, contact
            if rank:
                above = _Contact(*json.loads(_said(store, place, _parent_of(rank, size), "contact", rank)))
            return cls._joined(rank, size, above, below, limit_s=limit_s, meeting_s=meeting_s)

    def another(self, *, limit_s: float | None, meeting_s: float) -> Tree:
        """Further connections between the same ranks, which find each other over these. Collective.

        Args:
            limit_s: As in `connected`.
            meeting_s: As in `connected`.

        Raises:
            CollectiveError: As in `connected`.
        """
        try:
            with contextlib.ExitStack() as closing:
                below = above = None
                if self._children:
                    ends = [
                        self._address(child, part.start)
                        for child, part in zip(self._children, self._ranges, strict=True)
                    ]
                    listener = closing.enter_context(_listener(is_local=all(end in LOOPBACK for end in ends)))
                    contact = _Contact.of(listener, [])
                    for child, part in zip(self._children, self._ranges, strict=True):
                        self._send(child, part.start, json.dumps(contact).encode())
                    below = listener, contact
                if self._parent is not None:
                    parent = _parent_of(self.rank, self.size)
                    said = _Contact(*json.loads(self._received(self._parent, parent)))
                    above = said._replace(addresses=[self._address(self._parent, parent)])
                return self._joined(self.rank, self.size, above, below, limit_s=limit_s, meeting_s=meeting_s)
        except BaseException:  # re-raised
            # Others may have the other tree, and what they send over this one next could not be understood.
            self.close("could not make further connections")
            raise

    def _address(self, connection: socket.socket, rank: int) -> str:
        """Of the other end."""
        with self._whole(rank):
            address, _, *rest = connection.getpeername()
        scope = rest[1] if len(rest) == 2 else 0  # of a local address of IPv6
        return f"{address}%{scope}" if scope else str(address)

    @classmethod
    def _joined(
        cls,
        rank: int,
        size: int,
        above: _Contact | None,
        below: tuple[socket.socket, _Contact] | None,
        *,
        limit_s: float | None,
        meeting_s: float,
    ) -> Tree:
        """Connect to the parent, and have the children connect to a listener."""
        children = [part.start for part in children_of(rank, size)]
        parent, came = None, {}
        with contextlib.ExitStack() as failed:
            # Before its children are answered, so that the parent misses a rank at once that fails from here on.
            if above is not None:
                try:
                    parent = failed.enter_context(_connection(above, rank, meeting_s))
                except OSError as error:
                    raise CollectiveError(
                        f"rank {rank} on {socket.gethostname()} cannot reach rank {_parent_of(rank, size)} at {above.addresses}, port "
                        f"{above.port}: {error}. Have the firewall let hosts of a run reach each other at all ports, and allow enough "
                        "files (ulimit -n)"
                    ) from error
            if below is not None:
                try:
                    came = _accepted(*below, children, time.monotonic() + meeting_s)
                except OSError as error:
                    raise CollectiveError(
                        f"rank {rank} on {socket.gethostname()} cannot accept connections of ranks {children[:8]}: {error}. Allow enough "
                        "files (ulimit -n)"
                    ) from error
            for connection in came.values():
                failed.enter_context(connection)
            if missing := [child for child in children if child not in came]:
                raise CollectiveError(
                    f"rank {rank} on {socket.gethostname()} waited {meeting_s:g} s for ranks {missing[:8]} to connect to it. Look for the "
                    "first error in their output, and whether the firewall lets hosts of a run reach each other at all ports"
                )
            failed.pop_all()
        return cls(rank, size, parent, [came[child] for child in children], limit_s)

    # -- objects -------------------------------------------------------------------------------------------------------

    def to_first(self, item: T) -> list[T] | None:
        """What every rank passes, by rank, on rank 0; `None` on the others."""
        received = self.bytes_to_first(pickle.dumps(item) if self._parent is not None else b"")
        return None if received is None else [item, *(pickle.loads(data) for data in received[1:])]

    def from_first(self, item: T | None) -> T:
        """What rank 0 passes, on all ranks."""
        data = self.bytes_from_first(pickle.dumps(item) if self.rank == 0 and self.size > 1 else b"")
        received: T = item if self.rank == 0 else pickle.loads(data)  # type: ignore[assignment]
        return received

    def decide(self, item: T, judge: Callable[[list[T]], V]) -> V:
        """What rank 0 concludes from what all ranks pass, on all of them; `judge` must not raise."""
        items = self.to_first(item)
        return self.from_first(None if items is None else judge(items))

    def for_each(self, items: Sequence[T] | None) -> T:
        """Of what rank 0 passes for every rank, by rank, that for this one."""
        data = self.bytes_for_each(None if items is None else [pickle.dumps(item) for item in items])
        received: T = pickle.loads(data) if items is None else items[0]
        return received

    def judge_each(self, item: T, judge: Callable[[list[T]], list[V]]) -> V:
        """Of what rank 0 concludes for each rank from what all ranks pass, that for this one; `judge` must not raise."""
        items = self.to_first(item)
        return self.for_each(None if items is None else judge(items))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def bytes_to_first(self, data: bytes) -> list[bytes] | None:
        """As `to_first`."""
        parts = [_framed(data)]
        for number, child in enumerate(self._children):
            parts.append(self._received(child, self._ranges[number].start))
        if self._parent is None:
            return _unframed(b"".join(parts))
        self._send(self._parent, _parent_of(self.rank, self.size), b"".join(parts))
        return None

    def bytes_from_first(self, data: bytes) -> bytes:
        """As `from_first`."""
        if self._parent is not None:
            data = self._received(self._parent, _parent_of(self.rank, self.size))
        for number, child in enumerate(self._children):
            self._send(child, self._ranges[number].start, data)
        return data

    def bytes_for_each(self, datas: Sequence[bytes] | None) -> bytes:
        """Of what rank 0 passes for every rank, by rank, that for this one."""
        if self._parent is not None:
            datas = _unframed(self._received(self._parent, _parent_of(self.rank, self.size)))
        assert datas is not None, "rank 0 has them"
        for child, part in zip(self._children, self._ranges, strict=True):
            frames = map(_framed, datas[part.start - self.rank : part.stop - self.rank])
            self._send(child, part.start, b"".join(frames))
        return datas[0]

    def close(self, problem: str = "it was closed") -> None:
        """End the connections: ranks that wait for this one get an error."""
        self._problem = self._problem or problem
        for connection in (*([self._parent] if self._parent is not None else []), *self._children):
            connection.close()

    def __del__(self) -> None:
        """Its process group is gone, and so are those of the others."""
        self.close()

    def _send(self, connection: socket.socket, rank: int, data: bytes) -> None:
        with self._whole(rank):
            if len(data) < _CHUNK_BYTES:  # in one packet, where it fits
                connection.sendall(_framed(data))
            else:
                connection.sendall(_LENGTH.pack(len(data)))
                connection.sendall(data)

    def _received(self, connection: socket.socket, rank: int) -> bytes:
        with self._whole(rank):
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            return _read(connection, length)

    @contextmanager
    def _whole(self, rank: int) -> Iterator[None]:
        """Context around a message from or to another rank. After a part of one, nothing that follows could be understood."""
        try:
            yield
        except OSError as error:
            raise self._broken(rank, error) from error
        except BaseException as error:
            self.close(f"was interrupted: {type(error).__name__}")
            raise

    def _broken(self, rank: int, error: OSError) -> CollectiveError:
        # The kernel's has a number, `settimeout`'s has none.
        is_limit = isinstance(error, TimeoutError) and error.errno is None and self._limit_s
        self.close(f"waited {self._limit_s:g} s for rank {rank}" if is_limit else f"lost rank {rank}: {error}")
        return CollectiveError(
            f"rank {self.rank} {self._problem}, in what ranks exchange to start, save or load. Look for the first error in the output of "
            "all ranks"
        )


def tree_of_all_ranks(name: str) -> Tree:
    """The tree of a name of the default process group, made at the first call. Collective.

    Args:
        name: `RANKS` or `SAVES`. In a save ranks wait for one that writes as long as it lives.
    """

    def make() -> Tree:
        store = compat.default_store()
        waits_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
        if name == SAVES:
            return tree_of_all_ranks(RANKS).another(limit_s=None, meeting_s=waits_s)
        rank, size = dist.get_rank(), dist.get_world_size()
        return Tree.connected(store, f"mfsdp/tree/{name}", rank, size, limit_s=waits_s, meeting_s=waits_s)

    return kept(("tree", name), make)


def _listener(*, is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server((LOOPBACK[0], 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


@contextmanager
def _naming_lost_store(here: int) -> Iterator[None]:
    """Around what is written to the store.

    Raises:
        CollectiveError: It is gone, or did not answer in its time.
    """
    try:
        yield
    except RuntimeError as error:  # a DistStoreError or DistNetworkError, but for stores in files
        raise CollectiveError(
            f"rank {here} on {socket.gethostname()} cannot write to the store in which ranks find each other: {error}. Rank 0 keeps "
            "it, or torchrun on the first node (MASTER_ADDR): look for the first error in their output"
        ) from error


def _said(store: compat.Store, place: str, rank: int, what: str, here: int) -> str:
    """What another rank has put into the store.

    Raises:
        CollectiveError: Nothing came in the store's time, or the store is gone.
    """
    try:
        return str(store.get(f"{place}/{rank}/{what}").decode())
    except RuntimeError as error:  # a DistStoreError, but for stores in files
        raise CollectiveError(
            f"rank {here} on {socket.gethostname()} learned nothing from rank {rank}, with which it exchanges what is small: {error}. Look "
            "for the first error in its output, and for ranks that ended before"
        ) from error


def _connection(parent: _Contact, rank: int, meeting_s: float) -> socket.socket:
    """To a parent.

    Raises:
        OSError: No address leads to one; that of the last.
    """
    *others, last = parent.addresses
    for address in others:
        with contextlib.suppress(OSError):
            return _connected(address, parent, rank, min(_ANSWER_S, meeting_s))
    return _connected(last, parent, rank, meeting_s)


def _connected(address: str, parent: _Contact, rank: int, answer_s: float) -> socket.socket:
    connection = socket.create_connection((address, parent.port), timeout=_CONNECT_S)
    try:
        connection.settimeout(answer_s)
        connection.sendall(_GREETING.pack(parent.of_child.encode(), rank))
        if not secrets.compare_digest(_read(connection, _ANSWER_BYTES), parent.of_parent.encode()):
            raise ConnectionError("another program answers there: give the hosts of a run different addresses")
    except OSError:
        connection.close()
        raise
    return connection


def _accepted(
    listener: socket.socket, contact: _Contact, children: Sequence[int], until: float
) -> dict[int, socket.socket]:
    """Connections of those children that have come in time. What has no token is closed, and none is waited for alone.

    Raises:
        OSError: This process can accept none.
    """
    came: dict[int, socket.socket] = {}
    greetings: dict[socket.socket, tuple[bytes, float]] = {}  # what has come of each, and when it must be whole
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        try:
            while len(came) < len(children) and time.monotonic() < until:
                ready = [key.fileobj for key, _ in selector.select(min(until - time.monotonic(), 1.0))]
                for connection in [one for one, (_, limit) in greetings.items() if time.monotonic() > limit]:
                    _turn_away(connection, greetings, selector)
                if listener in ready:
                    with contextlib.suppress(BlockingIOError):  # it has gone meanwhile
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        greetings[connection] = b"", time.monotonic() + _GREETING_S
                        selector.register(connection, selectors.EVENT_READ)
                for connection in greetings.keys() & set(ready):
                    rank = _greeted(connection, greetings, contact)
                    if rank is not None and rank in children:
                        selector.unregister(connection)
                        del greetings[connection]
                        came[rank] = connection
                    elif rank is not None:
                        _turn_away(connection, greetings, selector)
        except BaseException:  # re-raised
            for connection in came.values():
                connection.close()
            raise
        finally:
            for connection in list(greetings):
                _turn_away(connection, greetings, selector)
    return came


def _greeted(
    connection: socket.socket, greetings: dict[socket.socket, tuple[bytes, float]], contact: _Contact
) -> int | None:
    """The rank that a whole greeting names, which is answered; -1 without the token, `None` while it is not whole."""
    data, limit = greetings[connection]
    try:
        news = connection.recv(_GREETING.size - len(data))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    data += news
    if not news or len(data) < _GREETING.size:
        greetings[connection] = data, limit
        return None if news else -1
    key, rank = _GREETING.unpack(data)
    if not secrets.compare_digest(key, contact.of_child.encode()):
        return -1
    try:
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK):  # it has waited too long for this, and tries another address
                return -1
        connection.sendall(contact.of_parent.encode())
    except OSError:  # it has gone meanwhile
        return -1
    return int(rank)


def _turn_away(
    connection: socket.socket,
    greetings: dict[socket.socket, tuple[bytes, float]],
    selector: selectors.BaseSelector,
) -> None:
    selector.unregister(connection)
    del greetings[connection]
    connection.close()


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view, min(len(view), _CHUNK_BYTES))
        if not count:
            raise ConnectionError("its end of the connection is closed")
        view = view[count:]
    return bytes(data)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _unframed(frames: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(frames):
        (length,) = _LENGTH.unpack_from(frames, at)
        at += _LENGTH.size
        parts.append(frames[at : at + length])
        at += length
    return parts
