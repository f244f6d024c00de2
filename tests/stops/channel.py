"""The channel of failures with many endpoints and no training: `python -S tests/stops/channel.py ENDPOINTS [RANKS_OF_A_HOST]`.

A relay process for each host, forked from this one, and all ranks' ends in this one; sockets are real, on the loopback interface. Prints a
JSON object: connections that the first host's relay holds, seconds until all have connected, until all have agreed where to stop, and from
the end of one rank until all others were told which one it was; then what they were told. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[2] / "lightning_mfsdp/launch/relay.py"
AT_ONCE = 4  # ranks that connect at the same time
LOOPBACK = ["127.0.0.1"]


def loaded_relay() -> Any:
    """The module by itself: its package imports torch."""
    spec = importlib.util.spec_from_file_location("relay", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forked_relay(relay: Any, host: int, ranks: list[int], world_size: int | None) -> tuple[int, list[Any]]:
    """The process of a host's relay, and how it is reached."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    contact = [LOOPBACK, listener.getsockname()[1], f"token{host}"]
    pid = os.fork()
    if pid == 0:
        relay.Relay(listener, contact[2], f"node{host}", ranks, world_size).run()
        os._exit(0)
    listener.close()
    return pid, contact


def wait_for(lines: list[Any], key: str) -> list[Any]:
    """The message with this key that each end receives next; others are skipped."""
    received = []
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line.socket, selectors.EVENT_READ, line)
        while selector.get_map():
            for ready, _ in selector.select():
                messages = ready.data.receive()
                assert messages is not None, "a connection has ended"
                for message in messages:
                    if key in message:
                        received.append(message)
                        selector.unregister(ready.fileobj)
    return received


def measure(world_size: int, of_host: int) -> dict[str, Any]:
    relay = loaded_relay()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hosts = [list(range(start, min(start + of_host, world_size))) for start in range(0, world_size, of_host)]
    relays = [forked_relay(relay, host, ranks, None if host else world_size) for host, ranks in enumerate(hosts)]
    contacts = [contact for _, contact in relays]
    began = time.monotonic()

    def connected(rank: int) -> Any:
        host = rank // of_host
        return relay.connect(contacts[host], [rank], f"node{host}", contacts[0])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        lines = list(pool.map(connected, range(world_size)))
    met = time.monotonic()
    for line in lines:
        line.send({"at work": True})
    lines[-1].send({"stop": True, "requeue": False})
    wait_for(lines, "report")
    for line in lines:
        line.send({"begun": 3})
    stops = wait_for(lines, "stop after")
    agreed = time.monotonic()
    files = Path(f"/proc/{relays[0][0]}/fd")
    sockets = [file for file in files.iterdir() if os.readlink(file).startswith("socket:")]
    ended = time.monotonic()
    lines.pop().socket.close()
    told = wait_for(lines, "apart")
    until = time.monotonic()
    for line in lines:
        line.socket.close()
    for pid, _ in relays:
        os.waitpid(pid, 0)
    return {
        "endpoints": world_size,
        "hosts": len(hosts),
        "connections": len(sockets) - 1,  # the listener
        "met_s": round(met - began, 3),
        "agreed_s": round(agreed - met, 3),
        "told_s": round(until - ended, 3),
        "stops": sorted({stop["stop after"] for stop in stops}),
        "told": len(told),
        "failures": [json.loads(text) for text in {json.dumps(message["apart"]) for message in told}],
    }


if __name__ == "__main__":
    os.setpgid(0, 0)
    try:
        results = measure(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
    except BaseException:
        with contextlib.suppress(OSError):  # relays too, of which ranks may not have come
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
        raise
    sys.stdout.write(json.dumps(results) + "\n")
