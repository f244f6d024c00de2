"""How fast ranks compute, and gather from each other: within a host over NVLink or PCIe, and all of them over the network."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_mfsdp.base import compat
from lightning_mfsdp.commands.doctor.ranks import RankFacts, outliers
from lightning_mfsdp.launch.checks import Finding

__all__ = [
    "all_gather_speed",
    "host_speed_findings",
    "network_rate",
    "network_speed_findings",
    "nvlink_rate",
    "product_speed",
    "product_speed_findings",
]

_GPU_BYTES, _CPU_BYTES = 64 * 2**20, 4 * 2**20  # that each rank sends
_GATHERED_BYTES = 2**32  # all of them, at most
_NVLINK_PART, _NETWORK_PART = 0.25, 0.1  # of what links carry, that an all-gather has at least where nothing is wrong
_TOOL_S = 30
_GPU_SIDE, _CPU_SIDE = 8192, 512  # of square matrices
_COMPUTE_PART = 0.85  # of the median of all GPUs; those of one kind differ by a few percent
_LINK = re.compile(r"Link \d+: ([\d.]+) GB/s")
_PORT_RATE = re.compile(r"([\d.]+) Gb/sec")


def product_speed(device: torch.device, seconds: float) -> float:
    """Operations a second of matrix products, in bfloat16 on a GPU and float32 on a CPU, over about so many seconds."""
    on_gpu = device.type == "cuda"
    side, dtype = (_GPU_SIDE, torch.bfloat16) if on_gpu else (_CPU_SIDE, torch.float32)
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))  # zeros would need less power
    product = torch.empty_like(left)

    def timed(times: int) -> float:
        _wait_for(device)
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=product)
        _wait_for(device)
        return time.perf_counter() - began

    timed(2)  # which loads the kernel
    times = max(1, int(seconds / max(timed(3) / 3, 1e-6)))
    return 2 * side**3 * times / timed(times)


def product_speed_findings(ranks: Sequence[RankFacts], speeds: Sequence[float]) -> list[Finding]:
    """GPUs that compute slowly. Processes on CPUs share their cores, so these are not compared.

    Args:
        ranks: All of them.
        speeds: Operations a second of each.
    """
    by_name = {f"rank {rank} on {ranks[rank].host}": speed for rank, speed in enumerate(speeds) if ranks[rank].gpu}
    median = sorted(by_name.values())[len(by_name) // 2] if by_name else 0.0
    return [
        Finding(
            f"{name} computes {by_name[name] / 1e12:.0f} TFLOP/s, and half of all ranks {median / 1e12:.0f} or more; in a step all wait "
            "for the slowest",
            "look there for other processes, for heat and for clocks that were lowered (`nvidia-smi -q -d PERFORMANCE`), or leave it out",
        )
        for name in outliers(by_name, factor=_COMPUTE_PART)
    ]


def all_gather_speed(group: dist.ProcessGroup, device: torch.device, seconds: float) -> float:
    """Bytes a second that each rank receives in all-gathers of a process group, over about so many seconds. Collective."""
    size = dist.get_world_size(group)
    own_bytes = min(_GPU_BYTES if device.type == "cuda" else _CPU_BYTES, _GATHERED_BYTES // size)
    own = torch.zeros(own_bytes, dtype=torch.uint8, device=device)
    gathered = torch.empty(size * own_bytes, dtype=torch.uint8, device=device)

    def timed(times: int) -> float:
        dist.all_reduce(own[:1], group=group)
        _wait_for(device)
        began = time.perf_counter()
        for _ in range(times):
            compat.all_gather_flat(gathered, own, group)
        _wait_for(device)
        return time.perf_counter() - began

    timed(2)  # which connects
    longest = torch.tensor([timed(3) / 3], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    times = max(1, int(seconds / max(float(longest), 1e-6)))
    return (size - 1) * own_bytes * times / timed(times)


def host_speed_findings(speeds: Mapping[str, float], nvlink: float | None) -> list[Finding]:
    """Hosts on which ranks gather slowly.

    Args:
        speeds: Bytes a second of a rank, by host.
        nvlink: Bytes a second of all NVLinks of a GPU; `None`: it has none.
    """
    findings = [
        Finding(
            f"an all-gather within host {host} has {speeds[host] / 1e9:.1f} GB/s, less than half of other hosts",
            "look there for other processes, for `nvidia-smi nvlink --status` and for clocks that were lowered "
            "(`nvidia-smi -q -d PERFORMANCE`), or leave the host out",
        )
        for host in outliers(speeds)
    ]
    slow = [host for host, speed in speeds.items() if nvlink is not None and speed < _NVLINK_PART * nvlink]
    if slow and nvlink is not None:
        findings.append(
            Finding(
                f"an all-gather within host {slow[0]} has {speeds[slow[0]] / 1e9:.1f} GB/s, and its NVLinks carry {nvlink / 1e9:.0f} GB/s",
                "look with NCCL_DEBUG=INFO whether NCCL sends by P2P, and unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL",
            )
        )
    return findings


def network_speed_findings(speed: float, rate: float | None) -> list[Finding]:
    """A network that hosts hardly use.

    Args:
        speed: Bytes a second that each rank receives in an all-gather of all.
        rate: Bytes a second of all InfiniBand and RoCE ports of a host; `None`: it has none.
    """
    if rate is None or speed >= _NETWORK_PART * rate:
        return []
    return [
        Finding(
            f"an all-gather of all ranks has {speed / 1e9:.1f} GB/s, and the InfiniBand or RoCE ports of a host have {rate / 1e9:.0f} GB/s",
            "look with NCCL_DEBUG=INFO whether NCCL uses NET/IB or NET/Socket, and set NCCL_IB_HCA; a container needs /dev/infiniband",
        )
    ]


def nvlink_rate() -> float | None:
    """Bytes a second that all NVLinks of a GPU of this host carry in one direction, as the driver says; `None` without them."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        command = ("nvidia-smi", "nvlink", "--status", "-i", "0")
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TOOL_S).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return _sum(_LINK.findall(answer), 1e9)


def network_rate(folder: Path = Path("/sys/class/infiniband")) -> float | None:
    """Bytes a second that all active InfiniBand and RoCE ports of this host carry in one direction; `None` without them."""
    rates: list[str] = []
    for port in sorted(folder.glob("*/ports/*")):
        try:
            is_active = "ACTIVE" in (port / "state").read_text()
            rate = (port / "rate").read_text()
        except OSError:  # a port that the driver hides
            continue
        rates += _PORT_RATE.findall(rate) if is_active else []
    return _sum(rates, 1e9 / 8)


def _sum(numbers: Sequence[str], unit: float) -> float | None:
    return sum(map(float, numbers)) * unit or None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
