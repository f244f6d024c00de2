"""Sockets between ranks: where a host can be reached, and what keeps a connection from outliving its process or its host."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

__all__ = ["LOOPBACK", "addresses_of_host", "end_if_unanswered", "network_of_host"]

_log = logging.getLogger(__name__)

LOOPBACK = ["127.0.0.1"]
_PROBED_S = 2  # the kernel probes a connection that was idle for so long, and again as long as no answer comes
# Then it ends, after 12 to 14 s: under the Trainer and Fabric later than the channel of failures, which names the host (launch/relay.py).
_PROBES = 6


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


def addresses_of_host() -> list[str]:
    """Addresses of IPv4 and IPv6 at which other hosts may reach this one, likely ones first."""
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
    ] or LOOPBACK


def end_if_unanswered(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host does not answer, be it idle or not (tcp(7)). Kernels answer for slow processes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PROBED_S * _PROBES * 1000)
