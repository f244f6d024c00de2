"""Notifies ranks of each other's failures and requests to stop, over connections of their own, where collectives would hang.

Every rank has a connection to rank 0, and a thread that reads it; a step costs a comparison of two numbers, and nothing is sent. The
messages, by their keys:

    stop      a rank received SIGTERM, or the signal that asks for a requeue. Rank 0 answers with `report`: all report which batch they
              have `begun` and begin none meanwhile. Rank 0 takes the largest, so that all `stop after` the same one
    failed    a rank has an exception. If all ranks have one, in the same place, they are `together` and may save. Otherwise (`apart`) all
              learn which ranks failed, and abort their communicators: no rank waits for collectives that never end
    at work   rank 0 has begun or ended an entry point of the Trainer: all connections end with its process, so others judge by this
              whether it was killed
    leaving   the program of rank 0 ends without an error. Not every program reports that: `os._exit` runs no handlers
    hello     the first message of a rank, with the token of this run and its host; rank 0 answers with `welcome`

A connection that ends in the middle of work stands for a failure: that process was killed. One whose other host does not answer is ended by
the kernel, which probes idle connections too: that machine, or the network to it, is gone, and all ranks of that host with it. Threads
are not asked whether they live: a process that is stopped, in a debugger, or in a long call of C code is silent, and its kernel answers.

Where rank 0 is gone without having been at work, others may be destroying their process groups, which must not be aborted at the same time
(PyTorch frees memory twice). So they have time for that; those that are still there afterwards may be waiting for rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import selectors
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_mfsdp.launch.checks import files_needed

__all__ = ["Peers", "addresses_of_host", "network_of_host", "open_listener"]

_log = logging.getLogger(__name__)

GRACE_S = 1.5  # for other ranks to fail as well, in the same place
LEAVING_S = 30.0  # for ranks to end what they do, and their process groups, once rank 0 has ended; then what waits for it is aborted
ENDING_S = 1.5  # for a process that is told of a failure to detect it by itself, or to report its own
KILLED_S = 0.1  # for the connections of other ranks to end that were killed at the same time
PROBED_S = 2  # the kernel probes a connection that was idle for so long, and again as long as no answer comes
UNANSWERED_S = 7  # then a connection ends whose other host does not answer: at most PROBED_S later
_LOST = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN))
_SHOWN = 8  # ranks, in messages
_KILLED = "its process ended, perhaps killed"


class _Line:
    """Messages over a socket: a JSON object in each line.

    Attributes:
        host: Name of the other end's.
        is_lost: The connection has ended because the other host did not answer.
    """

    def __init__(self, connection: socket.socket, host: str = "") -> None:
        self.socket = connection
        self.host = host
        self.is_lost = False
        self._incomplete = b""  # the beginning of a line whose end has not arrived
        self._sending = threading.Lock()  # rank 0 sends from two threads

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            with self._sending:
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
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # another program has connected, which may be anything
            return None

    def _note_end(self, error: OSError) -> None:
        """The kernel reports why a connection ended only once."""
        self.is_lost = self.is_lost or error.errno in _LOST


class _Hub:
    """The other end of all connections, in a thread of rank 0."""

    def __init__(self, listener: socket.socket, world_size: int, token: str) -> None:
        self._world_size, self._token = world_size, token
        self._lines: dict[int, _Line] = {}
        self._hosts: dict[int, list[str]] = {}
        self._begun: dict[int, int] | None = None  # the batch that each rank has begun; `None`: ranks were not asked
        self._requeue = False  # requested since all agreed on the last stop
        self._failed: dict[int, dict[str, Any]] = {}
        self._at_work: set[int] = set()
        self._left: set[int] = set()
        self._decide_at: float | None = None  # until then other ranks may report that they failed as well
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        threading.Thread(target=self._run, name="mfsdp-hub", daemon=True).start()

    def announce_to_others(self, message: Mapping[str, Any]) -> None:
        """Send a message of rank 0 at once, from its own thread: its process may be about to end."""
        for rank, line in list(self._lines.items()):
            if rank != 0 and rank not in self._left:
                line.send(message)

    def _run(self) -> None:
        while len(self._lines) < self._world_size or self._lines.keys() - self._left or self._decide_at is not None:
            wait = None if self._decide_at is None else max(self._decide_at - time.monotonic(), 0)
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._handle(key.data)
            if self._decide_at is not None and time.monotonic() >= self._decide_at:
                self._decide()
        for file in [key.fileobj for key in self._selector.get_map().values()]:
            file.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # perhaps it has too many files open; the rank waits, and it is tried again
            _log.warning(
                f"rank 0 cannot accept another rank's connection: {error}. If too many files are open, raise `ulimit -n`"
            )
            time.sleep(0.1)
            return
        _end_if_unanswered(connection)
        _close_in_children(connection)
        # The rank is set when its first message tells it.
        self._selector.register(connection, selectors.EVENT_READ, [_Line(connection), None])

    def _handle(self, state: list[Any]) -> None:
        line, rank = state
        messages = line.receive()
        if messages is None:
            self._ended(line, rank)
            return
        for message in messages:
            if rank is None:
                if message.get("token") != self._token:
                    continue
                rank = state[1] = message["hello"]
                self._lines[rank], self._hosts[rank] = line, message["host"]
                line.send({"welcome": self._token, "host": socket.gethostname()})
            elif "stop" in message:
                self._requeue = self._requeue or message["requeue"]
                self._ask_progress()
            elif "begun" in message and self._begun is not None:
                self._begun[rank] = message["begun"]
                self._agree_on_stop()
            elif "failed" in message:
                self._failed[rank] = message["failed"]
                if len(self._failed) + len(self._left - self._failed.keys()) >= self._world_size:
                    self._decide()
                elif self._decide_at is None:
                    self._decide_soon(GRACE_S)
            elif "at work" in message:
                (self._at_work.add if message["at work"] else self._at_work.discard)(rank)

    def _ended(self, line: _Line, rank: int | None) -> None:
        """A connection has ended: the rank's process has, or its host is lost, and all ranks on it."""
        self._selector.unregister(line.socket)
        line.socket.close()
        if rank is None:  # it was none of the ranks
            return
        self._left.add(rank)
        if line.is_lost:
            lost = [other for other, host in self._hosts.items() if host == self._hosts[rank]]
            for other in lost:
                what = _unanswered(self._hosts[other][0])
                self._failed.setdefault(other, {"rank": other, "where": None, "what": what})
            self._left.update(lost)
            self._decide_soon(KILLED_S)
        elif rank in self._at_work:
            self._failed.setdefault(rank, {"rank": rank, "where": None, "what": _KILLED})
            self._decide_soon(KILLED_S)
        self._agree_on_stop()

    def _decide_soon(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        self._decide_at = until if self._decide_at is None else min(until, self._decide_at)

    def _announce(self, message: Mapping[str, Any]) -> None:
        for rank, line in self._lines.items():
            if rank not in self._left:
                line.send(message)

    def _ask_progress(self) -> None:
        """Have all ranks report which batch they have begun, unless a failure ends them anyway."""
        if self._begun is None and not self._failed:
            self._begun = {}
            self._announce({"report": True})

    def _agree_on_stop(self) -> None:
        """Once all ranks that are left have reported: all stop after the last batch that any of them has begun."""
        if self._begun is not None and len(self._begun.keys() | self._left) == self._world_size:
            self._announce({"stop after": max(self._begun.values(), default=0), "requeue": self._requeue})
            self._begun, self._requeue = None, False

    def _decide(self) -> None:
        """Announce whether all ranks have failed in the same place."""
        failures, self._decide_at = list(self._failed.values()), None
        places = [failure["where"] for failure in failures]
        if len(failures) == self._world_size and places[0] is not None and all(place == places[0] for place in places):
            self._failed.clear()
            self._announce({"together": True})
        else:
            self._announce({"apart": failures})


class Peers:
    """This rank among the others.

    Attributes:
        abort: Called in a thread when this rank must stop waiting for the others: a rank has failed, and not all have. Returns whether
            nothing waits for them now.
        requeue: A rank asked for a requeue when it asked to stop.
        is_closed: Its process group is gone and another one was made; so is its end of the connection.
    """

    def __init__(
        self, rank: int, world_size: int, line: _Line, hub: _Hub | None = None, first_host: Sequence[int] = (0,)
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._hub = hub
        self._first_host = first_host  # ranks on the host of rank 0
        self._has_entered = False  # an entry point of the Trainer, so that messages say when work begins and ends
        # What rank 0 has reported of itself, and whether its connection has ended.
        self._rank0_at_work = self._rank0_leaves = self._rank0_is_gone = False
        self.abort: Callable[[], bool] | None = None
        self._line = line
        self._outgoing: list[dict[str, Any]] = []
        self._wake_reader, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        for end in (self._wake_reader, self._wake, line.socket):
            _close_in_children(end)
        self._changed = threading.Condition()
        self._begun = 0  # batches, since work began
        self.requeue = False
        self._is_paused = False  # no batch begins until rank 0 has said after which one all stop
        self._stop_after: int | None = None
        self._verdict: str | None = None  # "together" or "apart"; `None` while no failure is decided
        self._failures: list[dict[str, Any]] = []
        self._at_work = False
        self._knows_failure = False  # the program has an exception, or waits to hear of others
        self._error: BaseException | None = None  # the program's own
        self.is_closed = False
        self._timer: threading.Timer | None = None
        threading.Thread(target=self._run, name="mfsdp-peers", daemon=True).start()

    @classmethod
    def connected(cls) -> Peers | None:
        """Connect all ranks of the default process group; `None` if that is not possible. Collective."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        networks: list[tuple[str, ...]] = [()] * world_size
        network = network_of_host()
        dist.all_gather_object(networks, network)
        same_host = set(networks) == {networks[0]}
        listener = None
        contact: list[Any] = [None]
        if rank == 0:
            _allow_files(world_size)
            listener = open_listener(same_host, world_size)
            _close_in_children(listener)
            contact = [(addresses_of_host(same_host), listener.getsockname()[1], uuid.uuid4().hex)]
        dist.broadcast_object_list(contact, src=0)
        addresses, port, token = contact[0]
        hub = None if listener is None else _Hub(listener, world_size, token)
        line = _connected_line(addresses, port, token, rank, network)
        problems: list[Any] = [None] * world_size
        dist.all_gather_object(problems, line is None)
        if any(problems) or line is None:
            if rank == 0:
                unreached = [other for other, problem in enumerate(problems) if problem]
                _log.warning(
                    f"ranks {unreached} cannot reach rank 0 at {addresses}, port {port}: where one rank fails, others may wait for it, and "
                    "SIGTERM must reach all. Have the firewall let that port through"
                )
            return None
        return cls(
            rank, world_size, line, hub, [other for other in range(world_size) if networks[other] == networks[0]]
        )

    # -- stopping ------------------------------------------------------------------------------------------------------

    def ask_to_stop(self, *, requeue: bool = False) -> None:
        """Have all ranks stop after the same batch, and tell them whether the job is to be requeued. May be called in a signal handler."""
        self._send({"stop": True, "requeue": requeue})

    def may_begin_batch(self) -> bool:
        """Count a batch that is about to begin; `False`: all ranks stop before it."""
        with self._changed:  # the thread's answer must not change meanwhile
            if self._is_paused:
                self._changed.wait_for(lambda: not self._is_paused)
            if self._stop_after is not None and self._begun >= self._stop_after:
                return False
            self._begun += 1
        return True

    @property
    def begun(self) -> int:
        """Number of batches that this rank has begun since `work_begins`."""
        return self._begun

    def work_begins(self) -> None:
        """This rank begins an entry point that all ranks run: reset the count of batches, and forget earlier messages."""
        with self._changed:
            self._begun, self._stop_after, self._at_work, self._knows_failure, self._error = 0, None, True, False, None
            self._has_entered, self.requeue = True, False
            if self._verdict == "together":
                self._verdict, self._failures = None, []
            if self._rank0_is_gone:
                self._report_rank0_gone()
        self._announce_work(True)

    def work_ends(self) -> None:
        """Failures of others no longer end this process, and its own end is no longer a failure."""
        with self._changed:
            self._at_work = False
        self._announce_work(False)

    def _announce_work(self, is_at_work: bool) -> None:
        self._send({"at work": is_at_work})
        if self._hub is not None:
            self._hub.announce_to_others({"at work": is_at_work})

    def program_ends(self) -> None:
        """The program ends without an error: the end of this process is no failure."""
        if self._hub is not None:
            self._hub.announce_to_others({"leaving": True})

    def close(self) -> None:
        """Another process group was made: messages of these ranks must not abort its communicators.

        Ranks that do so later notice nothing: the hub stays until all have closed their ends. After a failure of some ranks all stays as it
        is, because it is still being announced.
        """
        if self._verdict == "together" or not (self._at_work or self._verdict == "apart"):
            self.is_closed = True
            with contextlib.suppress(OSError):  # the thread is awake, or has ended
                self._wake.send(b".")

    # -- failing -------------------------------------------------------------------------------------------------------

    def failed(self, where: Sequence[int] | None, what: str, error: BaseException | None = None) -> bool:
        """Report that this rank has an exception, and wait until it is known whether all have.

        Args:
            where: Numbers that are equal on ranks that failed in the same place. `None`: no such place, or other ranks were missing.
            what: The exception, for the others.
            error: The exception itself, to be printed if the process has to be ended.

        Returns:
            Whether all have one, in the same place.
        """
        with self._changed:
            self._knows_failure, self._error = True, self._error or error
            if self._verdict is None:
                place = None if where is None else list(where)
                self._send({"failed": {"rank": self.rank, "where": place, "what": what, "missed": where is None}})
                self._changed.wait_for(lambda: self._verdict is not None, timeout=2 * GRACE_S)
            return self._verdict == "together"

    @property
    def has_failed(self) -> bool:
        """Whether some rank has an exception that not all have."""
        return self._verdict == "apart"

    @property
    def failure_of_another(self) -> str | None:
        """Which other rank failed, and with what, if that is known."""
        with self._changed:
            others = [failure for failure in self._failures if failure["rank"] != self.rank]
            return _peer_error(others) if others and self._verdict == "apart" else None

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        """Let the thread send a message, so that a signal handler may call this."""
        self._outgoing.append(message)
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._wake.send(b".")

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_reader, selectors.EVENT_READ)
        selector.register(self._line.socket, selectors.EVENT_READ)
        while not self.is_closed:
            for key, _ in selector.select():
                if key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                    self._send_outgoing()
                    continue
                messages = self._line.receive()
                if messages is None:
                    selector.unregister(self._line.socket)
                    self._rank0_disconnected()
                for message in messages or ():
                    self._handle(message)
        self._send_outgoing()
        if self._at_work:
            self._line.send({"at work": False})
        if self._timer is not None:
            self._timer.cancel()
        selector.close()
        for end in (self._line.socket, self._wake_reader, self._wake):
            end.close()

    def _send_outgoing(self) -> None:
        while self._outgoing:
            self._line.send(self._outgoing.pop(0))

    def _rank0_disconnected(self) -> None:
        """The connection to rank 0 has ended: its process is gone, or its host."""
        with self._changed:
            self._rank0_is_gone = True
            if self._rank0_at_work or (self._line.is_lost and self._may_wait):
                self._report_rank0_gone()
            elif self._may_wait:
                self._timer = threading.Timer(LEAVING_S, self._report_rank0_if_waited_for)
                self._timer.daemon = True
                self._timer.start()

    @property
    def _may_wait(self) -> bool:
        """Whether this rank may be waiting for rank 0, which is gone. In your own loop no message says when all is done."""
        return not self.is_closed and (self._at_work or not self._has_entered or not self._rank0_leaves)

    def _report_rank0_if_waited_for(self) -> None:
        with self._changed:
            if self._may_wait:
                self._report_rank0_gone()

    def _report_rank0_gone(self) -> None:
        """Treat the end of rank 0, for which this rank may be waiting, as its failure."""
        if self._line.is_lost:
            what, gone = _unanswered(self._line.host), self._first_host
        else:
            what, gone = "its program has ended" if self._rank0_leaves else _KILLED, [0]
        self._handle({"apart": [{"rank": rank, "what": what} for rank in gone]})

    def _handle(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            if "leaving" in message:
                self._rank0_at_work, self._rank0_leaves = False, True
            elif "at work" in message:
                self._rank0_at_work = message["at work"]
            elif "report" in message:
                self._is_paused = True
                self._line.send({"begun": self._begun})
            elif "stop after" in message:
                self._is_paused, self._stop_after = False, message["stop after"]
                self.requeue = self.requeue or message["requeue"]
            elif "together" in message:
                self._verdict = "together"
            elif "apart" in message and self._verdict != "apart" and not self.is_closed:
                self._verdict, self._failures, self._is_paused = "apart", message["apart"], False
                threading.Thread(target=self._stop_waiting, name="mfsdp-abort", daemon=True).start()
            self._changed.notify_all()

    def _stop_waiting(self) -> None:
        """End what waits for the others; and the process, if that does not help."""
        until = time.monotonic() + ENDING_S
        released = True
        if self.abort is not None:
            if self._at_work:  # this may be its last message
                _log.warning(
                    f"rank {self.rank} aborts its communicators, because {_peer_error(self._failures)}. Look at that error first"
                )
            released = self.abort()

        def goes_on() -> bool:
            # If NCCL does not abort, a program that has learned of the failure hangs as well: in a callback, or when it frees memory.
            return not self._at_work or (self._knows_failure and (released or not dist.is_initialized()))

        with self._changed:
            self._changed.wait_for(goes_on, timeout=max(until - time.monotonic(), 0))
            if goes_on():
                if not self._at_work and not self._knows_failure:  # a program of its own, which may wait for the others
                    _log.warning(
                        f"rank {self.rank} may be waiting for others in vain: {_peer_error(self._failures)}. Look at that error first"
                    )
                return
        _log.warning(
            f"rank {self.rank} is ended, which would have waited forever: {_peer_error(self._failures)}. Look at that error first"
        )
        try:
            if self._error is not None:
                traceback.print_exception(self._error)
        finally:
            os._exit(1)


def _peer_error(failures: Sequence[Mapping[str, Any]]) -> str:
    """Describes the failure from which others follow, the first one that was not caused by missing other ranks, and who shares it."""
    first = next((failure for failure in failures if not failure.get("missed")), failures[0])
    ranks = sorted(failure["rank"] for failure in failures if failure["what"] == first["what"])
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} failed: {first['what']}"


def _unanswered(host: str) -> str:
    """What is known of ranks on a host that does not answer."""
    return f"host {host} has not answered for {UNANSWERED_S} s: the machine, or the network to it, is gone"


def network_of_host() -> tuple[str, ...]:
    """Equal for processes that reach each other over the loopback interface: one boot of one machine, and one network namespace of it.

    Host names alone do not tell: images may have a fixed one, and containers of one machine may have networks of their own.
    """
    known = [socket.gethostname()]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/net")):
        try:
            known.append(read().strip())
        except OSError:  # not on every system
            _log.debug("this system does not tell its boot or its network namespace", exc_info=True)
    return tuple(known)


def _allow_files(world_size: int) -> None:
    """Let rank 0 have as many files open as so many ranks need, if the system allows it: store, channel and groups take some for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(world_size)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(
            OSError, ValueError
        ):  # some systems allow less than they say; a connection then says what is missing
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def open_listener(same_host: bool, backlog: int) -> socket.socket:
    """Where other ranks connect: on the loopback interface, or on all of IPv4 and IPv6."""
    if same_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def addresses_of_host(same_host: bool) -> list[str]:
    """Addresses of IPv4 and IPv6 at which others may reach this host, likely ones first."""
    if same_host:
        return ["127.0.0.1"]
    main = os.environ.get("MASTER_ADDR", "192.0.2.1")
    addresses = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((main, 9))  # sends nothing, and shows which interface would be used
            addresses.append(probe.getsockname()[0])
    addresses.append(os.environ.get("MASTER_ADDR", ""))
    with contextlib.suppress(OSError):  # this host may not know its name
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    return [
        address
        for address in dict.fromkeys(addresses)
        if address and not address.startswith("127.") and address != "::1"
    ] or ["127.0.0.1"]


def _connected_line(addresses: Sequence[str], port: int, token: str, rank: int, network: Sequence[str]) -> _Line | None:
    """A connection to the hub of rank 0, which has answered; `None` where no address leads to it.

    Args:
        addresses: Of its host.
        port: That it listens on.
        token: Of this run.
        rank: This one.
        network: Of this host, see `network_of_host`.
    """
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=20)
        except OSError:
            continue
        line = _Line(connection)
        line.send({"hello": rank, "token": token, "host": network})
        answer = line.receive()
        if answer and answer[0].get("welcome") == token:
            line.host = answer[0]["host"]
            connection.settimeout(None)
            _end_if_unanswered(connection)
            return line
        connection.close()
    return None


def _end_if_unanswered(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host does not answer, be it idle or not (tcp(7); probes are answered by kernels)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)


def _close_in_children(end: socket.socket) -> None:
    """A forked process, such as a loader's worker, would keep a connection open after its rank was killed."""
    number = end.fileno()

    def close() -> None:
        if end.fileno() == number:
            end.close()

    os.register_at_fork(after_in_child=close)
