"""A link between two network namespaces that delays and loses packets: `python -S slow_link.py NAME NAME DELAY_MS LOSS_PERCENT`.

Each gets a TUN device `slow` with an address, 10.78.0.1 and 10.78.0.2, and this process carries packets from one to the other: kernels
without netem delay none. Prints "ready", and runs until it is ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_AT_ONCE = 64  # packets that are read of one device before the other has its turn


def made_device(name: str, address: str) -> int:
    """A device in a namespace; its packets are read from and written to the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as own, Path(f"/run/netns/{name}").open() as other:
        if libc.setns(other.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"no entry into namespace {name}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"slow", _IFF_TUN | _IFF_NO_PI))
        libc.setns(own.fileno(), 0)
    subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "slow"], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "slow", "mtu", "1400", "up"], check=True)
    return device


def carry(devices: tuple[int, int], delay_s: float, loss: float) -> None:
    """Packets from each device to the other."""
    chance = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []  # when it arrives, which packet, where, and what
    read = 0
    while True:
        wait_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for device in select.select(devices, (), (), wait_s)[0]:
            other = devices[devices[0] == device]
            try:
                for _ in range(_AT_ONCE):
                    packet = os.read(device, 65536)
                    if chance.random() >= loss:
                        read += 1
                        heapq.heappush(waiting, (time.monotonic() + delay_s, read, other, packet))
            except BlockingIOError:
                continue
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            try:
                os.write(device, packet)
            except BlockingIOError:  # its queue is full: this one is lost, too
                continue


if __name__ == "__main__":
    first, second = (made_device(name, f"10.78.0.{number}") for number, name in enumerate(sys.argv[1:3], 1))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry((first, second), float(sys.argv[3]) / 1000, float(sys.argv[4]) / 100)
