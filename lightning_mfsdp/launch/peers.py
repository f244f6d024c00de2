"""Notifies ranks of each other's failures and requests to stop, over connections of their own, where collectives would hang.

Every rank has a connection to the relay of its host (relay.py, which says how a failure travels), and a thread that reads it; a step costs
a comparison of two numbers, and nothing is sent. The messages, by their keys:

    stop      a rank received SIGTERM, or the signal that asks for a requeue, and begins no batch from then on. The hub answers with
              `report`: all report which batch they have `begun` and begin none meanwhile. The hub takes the largest, so that all `stop
              after` the same one
    failed    a rank has an exception. If all ranks have one, in the same place, they are `together` and may save. Otherwise (`apart`) all
              learn which ranks failed, and abort their communicators: no rank waits for collectives that never end
    at work   a rank has begun or ended an entry point of the Trainer: where its process ends meanwhile, it was killed. All are told of
              rank 0, because they judge by it where the first host is gone
    leaving   the program of rank 0 ends without an error. Not every program reports that: `os._exit` runs no handlers
    closing   a rank has made another process group, and hears no more of this one
    gone      rank 0, or the way to it, is gone
    hello     the first message of a rank, with the relay's token; it answers with `welcome`

Where rank 0 is gone without having been at work, others may be destroying their process groups, which must not be aborted at the same time
(PyTorch frees memory twice). So they have time for that; those that are still there afterwards may be waiting for rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from lightning_mfsdp.base.children import call_in_children
from lightning_mfsdp.base.sockets import LOOPBACK, addresses_of_host, network_of_host
from lightning_mfsdp.base.tree import Tree
from lightning_mfsdp.launch import relay
from lightning_mfsdp.launch.checks import files_needed
from lightning_mfsdp.launch.relay import GRACE_S, RELAY_KILLED, Line

__all__ = ["Peers"]

_log = logging.getLogger(__name__)

LEAVING_S = 30.0  # for ranks to end what they do, and their process groups, once rank 0 has ended; then what waits for it is aborted
ENDING_S = 1.5  # for a process that is told of a failure to detect it by itself, or to report its own
_SHOWN = 8  # ranks, in messages


class Peers:
    """This rank among the others.

    Attributes:
        abort: Called in a thread when this rank must stop waiting for the others: a rank has failed, and not all have. Returns whether
            nothing waits for them now.
        requeue: A rank asked for a requeue when it asked to stop.
        is_closed: Its process group is gone and another one was made; so is its end of the connection.
    """

    def __init__(self, rank: int, world_size: int, line: Line) -> None:
        self.rank, self.world_size = rank, world_size
        self._has_entered = False  # an entry point of the Trainer, so that messages say when work begins and ends
        self._rank0_at_work = self._rank0_leaves = False  # what it has reported
        self._gone: Mapping[str, Any] | None = (
            None  # the failure that the end of rank 0, or of the way to it, is for ranks that wait
        )
        self.abort: Callable[[], bool] | None = None
        self._line = line
        self._outgoing: list[dict[str, Any]] = []
        self._sending = threading.Lock()
        self._wake_reader, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        for end in (self._wake_reader, self._wake, line.socket):
            # A forked process would keep the connection open after its rank was killed.
            call_in_children(end.close)
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
    def connected(cls, tree: Tree) -> Peers | None:
        """Connect all ranks of a tree; `None` if that is not possible. Collective."""
        rank, world_size = tree.rank, tree.size
        network = network_of_host()
        own_ranks = tree.judge_each(network, _ranks_of_hosts)
        with contextlib.ExitStack() as connecting:  # a relay ends after it if no rank has connected
            started = _started_relay(connecting, network[0], own_ranks, world_size) if rank == own_ranks[0] else None
            own_relay, first_relay, unstarted = tree.judge_each((own_ranks[0], started), _contacts)
            if unstarted:
                if rank == 0:
                    _log.warning(
                        f"no relay process on {', '.join(unstarted)}: where one rank fails, others may wait for it, and SIGTERM "
                        "must reach all. Let processes start sys.executable"
                    )
                return None
            _, port, token = own_relay
            line = relay.connect((LOOPBACK, port, token), [rank], network[0], first_relay)
            unreached = tree.decide(line is None, _those_that_miss)
        if line is None or unreached:
            if line is not None:
                line.socket.close()
            if rank == 0:
                addresses, port, _ = first_relay
                _log.warning(
                    f"ranks {unreached} cannot reach rank 0 at {addresses}, port {port}: where one rank fails, others may wait for it, and "
                    "SIGTERM must reach all. Have the firewall let that port through"
                )
            return None
        return cls(rank, world_size, line)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def ask_to_stop(self, *, requeue: bool = False) -> None:
        """Have all ranks stop after the same batch, and tell them whether the job is to be requeued. May be called in a signal handler.

        That is the batch in which the signal came, unless another rank has begun a later one.
        """
        self._is_paused = True  # so that how fast messages travel does not decide how many batches follow
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
            if self._gone is not None:
                self._report_gone()
        self._say({"at work": True})

    def work_ends(self) -> None:
        """Failures of others no longer end this process, and its own end is no longer a failure."""
        with self._changed:
            self._at_work = False
        self._say({"at work": False})

    def program_ends(self) -> None:
        """The program ends without an error: the end of this process is no failure."""
        self._say({"leaving": True})

    def close(self) -> None:
        """Another process group was made: messages of these ranks must not abort its communicators.

        Ranks that do so later notice nothing. After a failure of some ranks all stays as it is, because it is still being announced.
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
                self._send({"failed": {"where": place, "what": what, "missed": where is None}})
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
            others = [
                {**failure, "ranks": ranks}
                for failure in self._failures
                if (ranks := [rank for rank in failure["ranks"] if rank != self.rank])
            ]
            return _peer_error(others) if others and self._verdict == "apart" else None

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        """Let the thread send a message, so that a signal handler may call this."""
        self._outgoing.append(message)
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._wake.send(b".")

    def _say(self, message: dict[str, Any]) -> None:
        """Send a message before this process does anything else: it may be about to end."""
        self._outgoing.append(message)
        self._send_outgoing()

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
                    failure = {"ranks": self._line.ranks, "what": RELAY_KILLED, "hosts": [self._line.host]}
                    self._handle({"gone": failure, "is lost": False})
                for message in messages or ():
                    self._handle(message)
        self._say({"closing": True})
        if self._timer is not None:
            self._timer.cancel()
        selector.close()
        for end in (self._line, self._wake_reader, self._wake):
            end.close()

    def _send_outgoing(self) -> None:
        with self._sending:
            while self._outgoing:
                self._line.send(self._outgoing.pop(0))

    def _first_is_gone(self, is_lost: bool) -> None:
        """The process of rank 0 is gone, or its host, or the way to it."""
        if self._rank0_at_work or (is_lost and self._may_wait):
            self._report_gone()
        elif self._may_wait:
            self._timer = threading.Timer(LEAVING_S, self._report_if_waited_for)
            self._timer.daemon = True
            self._timer.start()

    @property
    def _may_wait(self) -> bool:
        """Whether this rank may be waiting for rank 0, which is gone. In your own loop no message says when all is done."""
        return not self.is_closed and (self._at_work or not self._has_entered or not self._rank0_leaves)

    def _report_if_waited_for(self) -> None:
        with self._changed:
            if self._may_wait:
                self._report_gone()

    def _report_gone(self) -> None:
        """Treat the end of rank 0, for which this rank may be waiting, as its failure."""
        failure = dict(self._gone or {})
        if self._rank0_leaves:
            failure["what"] = "its program has ended"
        self._handle({"apart": [failure]})

    def _handle(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            if "leaving" in message:
                self._rank0_at_work, self._rank0_leaves = False, True
            elif "at work" in message:
                self._rank0_at_work = message["at work"]
            elif "report" in message:
                self._is_paused = True
                self._say({"begun": self._begun})
            elif "stop after" in message:
                self._is_paused, self._stop_after = False, message["stop after"]
                self.requeue = self.requeue or message["requeue"]
            elif "together" in message:
                self._verdict, self._is_paused = "together", False
            elif "apart" in message and self._verdict != "apart" and not self.is_closed:
                self._verdict, self._failures, self._is_paused = "apart", message["apart"], False
                threading.Thread(target=self._stop_waiting, name="mfsdp-abort", daemon=True).start()
            elif "gone" in message and self._gone is None:
                self._gone = message["gone"]
                self._first_is_gone(message["is lost"])
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
            f"{_peer_error(self._failures)}. Rank {self.rank} waits for it in vain and is ended, without its `finally` blocks. Look at "
            "that error first"
        )
        try:
            if self._error is not None:
                traceback.print_exception(self._error)
        finally:
            os._exit(1)


def _peer_error(failures: Sequence[Mapping[str, Any]]) -> str:
    """Describes the failure from which others follow, the first one that was not caused by missing other ranks, and who shares it."""
    first = next((failure for failure in failures if not failure.get("missed")), failures[0])
    hosts = f" (on host{'s' if len(first['hosts']) > 1 else ''} {_shown(first['hosts'])})" if first["hosts"] else ""
    ranks = sorted(first["ranks"])
    return f"rank{'s' if len(ranks) > 1 else ''} {_shown(ranks)} failed: {first['what']}{hosts}"


def _shown(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:_SHOWN])) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _ranks_of_hosts(networks: list[tuple[str, ...]]) -> list[list[int]]:
    """For every rank, those of its host."""
    by_host: dict[tuple[str, ...], list[int]] = {}
    for rank, network in enumerate(networks):
        by_host.setdefault(network, []).append(rank)
    return [by_host[network] for network in networks]


def _contacts(started: list[tuple[int, Any]]) -> list[tuple[Any, Any, list[str]]]:
    """For every rank how its relay and the first one are reached, and which have not started. Given the first rank of each one's host."""
    unstarted = [contact for _, contact in started if isinstance(contact, str)]
    return [(started[first][1], started[0][1], unstarted[:_SHOWN]) for first, _ in started]


def _those_that_miss(misses: list[bool]) -> list[int]:
    return [rank for rank, is_missing in enumerate(misses) if is_missing]


def _started_relay(
    connecting: contextlib.ExitStack, host: str, ranks: Sequence[int], world_size: int
) -> tuple[list[str], int, str] | str:
    """Start the relay of this host, from the lowest of its ranks: addresses for other hosts, port and token, or why there is none."""
    is_first = ranks[0] == 0
    is_reachable = is_first and len(ranks) < world_size
    if is_first:
        _allow_files(world_size)
    try:
        port, token = connecting.enter_context(
            relay.start(host, ranks, world_size if is_first else None, is_reachable=is_reachable)
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"host {host} ({error})"
    return addresses_of_host() if is_reachable else LOOPBACK, port, token


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
