"""A process of each host that passes messages of failures and stops between the ranks: started as a script, it imports no torch.

How a failure travels. Every rank has one connection, to the relay of its host. Every relay has one to the relay of the first host, the one
of rank 0, where the hub decides. So the first host holds a connection to each host and to each of its own ranks, and no rank holds more
than one:

    rank 2 --+                              +-- rank 0
             +-- relay of host B -- relay of host A (hub)
    rank 3 --+                              +-- rank 1

- A process that ends closes its connection: its kernel does so at once, whatever ended it. The relay of its host sees that and tells the
  hub. If the rank was at work, the hub waits `KILLED_S` for others that were killed at the same time, and announces all of them to every
  relay, and each relay to its ranks. That the rank was the one that started the relay changes nothing.
- A host that is gone, or cut off, closes nothing. Its kernel no longer answers, and the kernels of the hosts that have connections to it
  end them after `UNANSWERED_S`. The hub then names all ranks of that host. A relay that loses the first host names the ranks of that one
  to its own. So each side of a cut network names the other, and hosts that reach the hub are never named.
- A process that is stopped, in a debugger, or in a long call of C code that holds the GIL is silent. No one judges silence: kernels answer
  for such a process, and a relay executes nothing of the program, so it is not stopped with it. What others tell goes on to all the
  others; the stopped process reads it when it continues. This is why relays are processes and not threads of a rank.
- A relay that ends before its ranks was killed, perhaps with all processes of its host. The hub names the ranks of that host that were at
  work, and they end as well: without their relay they would not hear of failures.

A relay ends with the last rank of its host. Signals that a scheduler or a terminal sends to all processes of a job do not end it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = [
    "GRACE_S",
    "RELAY_KILLED",
    "UNANSWERED_S",
    "Hub",
    "Line",
    "Relay",
    "connect",
    "open_listener",
    "start",
]

_log = logging.getLogger(__name__)

GRACE_S = 1.5  # for other ranks to fail as well, in the same place
KILLED_S = 0.1  # for the connections of other ranks to end that were killed at the same time
PROBED_S = 2  # the kernel probes a connection that was idle for so long, and again as long as no answer comes
UNANSWERED_S = 7  # then a connection ends whose other host does not answer: at most PROBED_S later
_ADDRESS_S = 20.0  # to connect to one address of the first host
_STARTED_S = 120.0  # for a relay to start, on a busy host
_UNUSED_S = 2 * _STARTED_S  # then a relay ends whose ranks did not come: they do once all relays have started
_LOST = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN))
_CLOSING_S = 10.0  # for the other end to close a connection, too
_GREETING_S = 10.0  # for what has connected to send its token: ranks and relays do so at once
_GREETING_BYTES = 16 << 10  # of that message: ranks of a host, and addresses of the first one
_LINE_BYTES = 16 << 20  # of any other message, which has a token's holder behind it
_STRANGERS = 128  # connections that have not sent the token
_TOLD = 16  # different failures that are announced; the ranks of each are complete
_KILLED = "its process ended, perhaps killed"
RELAY_KILLED = "the relay process of its host ended, perhaps killed with all others of that host"
_IGNORED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGTSTP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class FirstHostError(ConnectionError):
    """A relay cannot connect to that of the first host."""


class Line:
    """Messages over a socket: a JSON object in each line.

    Attributes:
        max_bytes: Of a message. A longer one ends the connection.
        ranks: That the other end speaks for. Of a relay: those of its host.
        host: Name of the other end's.
        is_lost: The connection has ended because the other host did not answer.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = _LINE_BYTES) -> None:
        # Or a message waits until the one before it is acknowledged, and may be dropped.
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.max_bytes = connection, max_bytes
        self.ranks: Sequence[int] = ()
        self.host = ""
        self.is_lost = False
        self._incomplete = b""  # the beginning of a line whose end has not arrived

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the connection has ended, which `receive` reports."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:  # the other end is gone, which its reader detects
            self._note_end(error)
            _log.debug("a peer is gone", exc_info=True)

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages received; `None` at the end."""
        try:
            data = self.socket.recv(65536)
        except OSError as error:
            self._note_end(error)
            data = b""
        if not data:
            return None
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if max(map(len, (*lines, self._incomplete))) > self.max_bytes:
            return None
        messages = [_parsed(line) for line in lines]
        return None if None in messages else [message for message in messages if message is not None]

    def close(self) -> None:
        """Close the connection once the other end has closed it, too, and so has all that was sent; or after `_CLOSING_S`.

        A kernel that closes a connection with something unread resets it, and drops what is still to be sent.
        """
        until = time.monotonic() + _CLOSING_S
        with contextlib.suppress(OSError):  # it has ended, or the time is over
            self.socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(65536):
                    break
        self.socket.close()

    def _note_end(self, error: OSError) -> None:
        """The kernel reports why a connection ended only once."""
        self.is_lost = self.is_lost or error.errno in _LOST


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The message of a line; `None` if it has none: another program may have connected, and sent anything."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


class Hub:
    """Decides what all ranks are told. It has no connections: the relay of the first host passes on to it what ranks say.

    Args:
        world_size: Number of ranks.
        announce: Sends a message to all ranks.

    Attributes:
        decide_at: Until then other ranks may report that they failed as well; `None`: none has.
    """

    def __init__(self, world_size: int, announce: Callable[[Mapping[str, Any]], None]) -> None:
        self._world_size, self._announce = world_size, announce
        self._hosts: dict[int, str] = {}
        self._unreported: set[int] | None = (
            None  # ranks that have yet to report which batch they have begun; `None`: none was asked
        )
        self._begun = 0  # the largest that was reported
        self._requeue = False  # requested since all agreed on the last stop
        self._failed: dict[int, dict[str, Any]] = {}
        self._at_work: set[int] = set()
        self._left: set[int] = set()
        self.decide_at: float | None = None

    def came(self, ranks: Sequence[int], host: str) -> None:
        """These ranks have connected."""
        self._hosts.update(dict.fromkeys(ranks, host))

    def handle(self, rank: int, message: Mapping[str, Any]) -> None:
        """A message of a rank."""
        if "stop" in message:
            self._requeue = self._requeue or message["requeue"]
            self._ask_progress()
        elif "begun" in message:
            self._begun = max(self._begun, message["begun"])
            self._agree_on_stop([rank])
        elif "failed" in message:
            self._failed[rank] = message["failed"]
            if len(self._failed) + len(self._left.difference(self._failed)) >= self._world_size:
                self.decide()
            elif self.decide_at is None:
                self._decide_soon(GRACE_S)
        elif "at work" in message:
            (self._at_work.add if message["at work"] else self._at_work.discard)(rank)
            if rank == 0:
                self._announce(message)
        elif "leaving" in message and rank == 0:
            self._announce(message)
        elif "closing" in message:
            self._left.add(rank)
            self._agree_on_stop([rank])
            if rank == 0:
                self._announce({"leaving": True})
        elif "ended" in message:
            self.ended([rank], _KILLED)

    def ended(self, ranks: Sequence[int], what: str, *, is_lost: bool = False) -> None:
        """The connection to these ranks has ended: a failure of those at work, or of all of them if their host is lost.

        Args:
            ranks: Some may have left before.
            what: Describes the failure.
            is_lost: Their host does not answer.
        """
        new = [rank for rank in ranks if rank not in self._left]
        failed = [rank for rank in new if is_lost or rank in self._at_work]
        self._left.update(new)
        for rank in failed:
            self._failed.setdefault(rank, {"where": None, "what": what, "missed": False})
        if failed:
            self._decide_soon(KILLED_S)
        elif 0 in new:
            self._announce({"gone": {"ranks": [0], "what": what, "hosts": self._named_hosts([0])}, "is lost": False})
        self._agree_on_stop(ranks)

    def decide(self) -> None:
        """Announce whether all ranks have failed in the same place."""
        self.decide_at = None
        places = [failure["where"] for failure in self._failed.values()]
        if len(places) == self._world_size and places[0] is not None and all(place == places[0] for place in places):
            self._failed.clear()
            self._announce({"together": True})
            return
        alike: dict[tuple[str, bool], list[int]] = {}
        for rank, failure in self._failed.items():
            alike.setdefault((failure["what"], failure["missed"]), []).append(rank)
        told = sorted(alike.items(), key=lambda item: item[0][1])[:_TOLD]  # those that follow from others last
        self._announce(
            {
                "apart": [
                    {"ranks": ranks, "what": what, "missed": missed, "hosts": self._named_hosts(ranks)}
                    for (what, missed), ranks in told
                ]
            }
        )

    def _named_hosts(self, ranks: Sequence[int]) -> list[str]:
        """Hosts of these ranks, where there are several to tell apart."""
        return sorted({self._hosts[rank] for rank in ranks}) if len(set(self._hosts.values())) > 1 else []

    def _decide_soon(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        self.decide_at = until if self.decide_at is None else min(until, self.decide_at)

    def _ask_progress(self) -> None:
        """Have all ranks report which batch they have begun, unless a failure ends them anyway."""
        if self._unreported is None and not self._failed:
            self._unreported, self._begun = set(range(self._world_size)) - self._left, 0
            self._announce({"report": True})

    def _agree_on_stop(self, ranks: Sequence[int]) -> None:
        """These ranks have reported, or left. Once all have, all stop after the last batch that any of them has begun."""
        if self._unreported is not None:
            self._unreported.difference_update(ranks)
            if not self._unreported:
                self._announce({"stop after": self._begun, "requeue": self._requeue})
                self._unreported, self._requeue = None, False


class Relay:
    """Connections of a host: to its ranks and the first host; on that one, to the other hosts.

    Args:
        listener: Where ranks, or other relays, connect.
        token: What they send first.
        host: Name of this one.
        ranks: Of this host.
        world_size: Number of ranks; `None`: this is not the first host.
        starter: Ends with the process that has started the relay, or once that one waits for no ranks to connect.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        host: str,
        ranks: Sequence[int],
        world_size: int | None = None,
        starter: IO[bytes] | None = None,
    ) -> None:
        self._token, self._host, self._ranks = token, host, ranks
        self._hub = None if world_size is None else Hub(world_size, self._announce)
        self._first: Line | None = None  # the relay of the first host, once a rank has said where that is
        self._lines: list[Line] = []  # to ranks of this host, and from relays of others
        self._strangers: dict[Line, float] = {}  # that have not sent the token, oldest first, and until when they may
        self._has_warned = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        if starter is not None:
            self._selector.register(starter, selectors.EVENT_READ, starter)

    def run(self) -> None:
        """Pass on messages until the ranks of this host have left.

        Raises:
            FirstHostError: The first host cannot be reached. The ranks of this one see that their connections end.
        """
        until = time.monotonic() + _UNUSED_S
        own_ranks = set(self._ranks)
        has_begun = False
        while True:
            is_used = any(own_ranks.issuperset(line.ranks) for line in self._lines)
            has_begun = has_begun or is_used
            decide_at = None if self._hub is None else self._hub.decide_at
            if not is_used and decide_at is None and (has_begun or time.monotonic() >= until):
                break
            self._close_strangers()
            times = [decide_at] if decide_at is not None else [] if has_begun else [until]
            wake_at = min([*times, *self._strangers.values()], default=None)
            for key, _ in self._selector.select(None if wake_at is None else max(wake_at - time.monotonic(), 0)):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif isinstance(key.data, Line):
                    self._read(key.data)
                else:
                    self._selector.unregister(key.fileobj)
                    key.data.close()
                    until = time.monotonic()  # no rank comes any more, unless some have
            if self._hub is not None and self._hub.decide_at is not None and time.monotonic() >= self._hub.decide_at:
                self._hub.decide()
        if self._first is not None:
            self._first.close()
        for file in [key.fileobj for key in self._selector.get_map().values()]:
            file.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # perhaps it has too many files open; the other end waits, and it is tried again
            if not self._has_warned:
                _log.warning(
                    f"the relay of host {self._host} cannot accept another connection: {error}. If too many files are open, raise "
                    "`ulimit -n`"
                )
            self._has_warned = True
            time.sleep(0.1)
            return
        _end_if_unanswered(connection)
        stranger = Line(connection, _GREETING_BYTES)
        self._strangers[stranger] = time.monotonic() + _GREETING_S
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _close_strangers(self) -> None:
        """Close connections that have not sent the token in time, and the oldest of too many."""
        excess = len(self._strangers) - _STRANGERS
        for index, (line, until) in enumerate(list(self._strangers.items())):
            if index < excess or time.monotonic() >= until:
                self._ended(line)

    def _read(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            self._ended(line)
            return
        for message in messages:
            if line is self._first:
                self._announce(message)
            elif line in self._strangers:
                if message.get("token") != self._token:
                    self._ended(line)
                    return
                self._greet(line, message)
            else:
                self._pass_on(message.pop("rank", line.ranks[0]), message)

    def _greet(self, line: Line, message: Mapping[str, Any]) -> None:
        """The first message of a rank, or of another host's relay. It has the token."""
        del self._strangers[line]
        line.max_bytes = _LINE_BYTES
        if self._hub is None and self._first is None:
            self._first = connect(message["first"], self._ranks, self._host)
            if self._first is None:
                addresses, port, _ = message["first"]
                raise FirstHostError(
                    f"host {self._host} cannot reach the first host at {addresses}, port {port}. Have the firewall let it through"
                )
            self._selector.register(self._first.socket, selectors.EVENT_READ, self._first)
        line.ranks, line.host = message["hello"], message["host"]
        self._lines.append(line)
        if self._hub is not None:
            self._hub.came(line.ranks, line.host)
        line.send({"welcome": self._token, "host": self._host, "ranks": self._ranks})

    def _pass_on(self, rank: int, message: Mapping[str, Any]) -> None:
        if self._hub is not None:
            self._hub.handle(rank, message)
        elif self._first is not None:
            self._first.send({**message, "rank": rank})

    def _announce(self, message: Mapping[str, Any]) -> None:
        for line in self._lines:
            line.send(message)

    def _ended(self, line: Line) -> None:
        """A connection has ended: a rank's process has, or another host's relay, or the host is lost."""
        self._strangers.pop(line, None)
        self._selector.unregister(line.socket)
        line.socket.close()
        what = unanswered(line.host) if line.is_lost else RELAY_KILLED
        if line is self._first:
            hosts = [] if line.is_lost else [line.host]
            self._announce({"gone": {"ranks": line.ranks, "what": what, "hosts": hosts}, "is lost": line.is_lost})
        elif line.ranks:
            self._lines.remove(line)
            if self._hub is not None and not set(line.ranks) <= set(self._ranks):
                self._hub.ended(line.ranks, what, is_lost=line.is_lost)
            else:
                self._pass_on(line.ranks[0], {"ended": True})


def unanswered(host: str) -> str:
    """What is known of ranks on a host that does not answer."""
    return f"host {host} has not answered for {UNANSWERED_S} s: the machine, or the network to it, is gone"


def connect(contact: Sequence[Any], ranks: Sequence[int], host: str, first: Sequence[Any] | None = None) -> Line | None:
    """A connection to a relay, which has answered; `None` where no address leads to it.

    Args:
        contact: Addresses of its host, its port, and its token.
        ranks: Those that this end speaks for.
        host: Name of this one.
        first: Contact of the first host's relay, for a relay that does not have it.
    """
    addresses, port, token = contact
    wait_s = (
        _ADDRESS_S if first is None else 2 * _ADDRESS_S * (1 + len(first[0]))
    )  # it connects to that one before it answers
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=wait_s)
        except OSError:
            continue
        line = Line(connection)
        line.send({"hello": ranks, "token": token, "host": host, "first": first})
        answer = _welcome(connection)
        if answer.get("welcome") == token:
            line.host, line.ranks = answer["host"], answer["ranks"]
            connection.settimeout(None)
            _end_if_unanswered(connection)
            return line
        connection.close()
    return None


def _welcome(connection: socket.socket) -> dict[str, Any]:
    """The first message received, or an empty one. What follows it stays in the socket, for a selector to see."""
    try:
        with connection.makefile("rb", buffering=0) as unbuffered:
            return _parsed(unbuffered.readline(_LINE_BYTES)) or {}
    except OSError:
        _log.debug("a relay has not answered", exc_info=True)
        return {}


@contextlib.contextmanager
def start(host: str, ranks: Sequence[int], world_size: int | None, *, is_reachable: bool) -> Iterator[tuple[int, str]]:
    """Start the relay of this host. Its process is no child of this one.

    It ends with the context, or with this process, unless a rank of this host has connected by then: it then ends with the last of them.

    Args:
        host: Name of this one.
        ranks: On this host.
        world_size: Number of ranks; `None`: this is not the first host.
        is_reachable: Other hosts will connect to it.

    Yields:
        Its port and its token.

    Raises:
        OSError, subprocess.SubprocessError: No process could be started, or it ended.
    """
    if not sys.executable:  # of an interpreter that another program has embedded
        raise OSError("sys.executable is not set, so Python cannot be started; set it to the path of Python")
    options = json.dumps([host, list(ranks), world_size, is_reachable])
    # Without site-packages: an interpreter starts faster, and what they have it execute stays out.
    command = [sys.executable, "-S", os.path.abspath(__file__), options]
    reader, writer = os.pipe()
    try:
        try:
            done = subprocess.run(command, stdin=reader, stdout=subprocess.PIPE, timeout=_STARTED_S, check=True)
        finally:
            os.close(reader)
        port, token = json.loads(done.stdout)
        yield port, token
    finally:
        os.close(writer)


def _main(host: str, ranks: Sequence[int], world_size: int | None, is_reachable: bool) -> None:
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    listener = open_listener(is_reachable)
    token = os.urandom(16).hex()
    sys.stdout.write(json.dumps([listener.getsockname()[1], token]))
    sys.stdout.flush()
    if os.fork():  # so that the rank need not wait for it at its end
        os._exit(0)
    os.setsid()
    os.chdir("/")
    starter = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    with contextlib.suppress(FirstHostError):  # rank 0 warns of it
        Relay(listener, token, host, ranks, world_size, starter).run()


def open_listener(is_reachable: bool) -> socket.socket:
    """Where ranks and other relays connect: on the loopback interface, or on all of IPv4 and IPv6."""
    if not is_reachable:
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def _end_if_unanswered(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host does not answer, be it idle or not (tcp(7); probes are answered by kernels)."""
    # As in base/sockets.py, which this program does not import: it starts without the package.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
