"""What is wrong with a host, as far as it shows without other ranks, without writing, and in about a millisecond.

Runs look at this before they connect; `lightning-mfsdp doctor` begins with it.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = [
    "Finding",
    "files_needed",
    "interface_findings",
    "loader_file_findings",
    "open_file_findings",
    "shared_memory_findings",
    "start_findings",
    "variable_findings",
]

# That rank 0 and its relay may have open: those of a program, and those of connections to each other rank (3 were counted).
_FILES, _FILES_PER_RANK = 1024, 8
_LOADER_FILES = 4096
_SHARED_MEMORY = "/dev/shm"
_SHARED_MEMORY_BYTES = 2**30  # containers have 64 MiB unless they are told otherwise
_FREE_BYTES = 64 * 2**20

_YES = ("1", "true", "yes", "on", "y", "t")
_UNSET = "unset it, or set it for debugging only"
# Variables that make a GPU or the host wait, the values that do, what they do, and what to do instead.
_SLOW = (
    ("CUDA_LAUNCH_BLOCKING", _YES, "the host waits for each kernel, so that nothing overlaps", _UNSET),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("1",),
        "all kernels share one queue, in which collectives wait for computation and computation for them",
        "unset it: the engine orders its work by streams and needs no single queue",
    ),
    ("AMD_SERIALIZE_KERNEL", ("1", "2", "3"), "kernels run one at a time", _UNSET),
    ("HIP_LAUNCH_BLOCKING", _YES, "the host waits for each kernel, so that nothing overlaps", _UNSET),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _YES,
        "each tensor is allocated by the driver, for which the GPU waits",
        _UNSET,
    ),
    ("TORCH_NCCL_BLOCKING_WAIT", _YES, "the host waits for each collective", "unset it: failures are told without it"),
    ("NCCL_BLOCKING_WAIT", _YES, "the host waits for each collective", "unset it: failures are told without it"),
    ("TORCH_DISTRIBUTED_DEBUG", ("detail",), "each collective is preceded by another that compares all ranks", _UNSET),
    ("NCCL_P2P_DISABLE", _YES, "GPUs of a host send through its memory instead of NVLink", "unset it where GPUs have NVLink"),
    ("NCCL_IB_DISABLE", _YES, "hosts send over TCP instead of InfiniBand or RoCE", "unset it where hosts have either"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something that slows a run down, or ends it.

    Attributes:
        what: What is wrong, where, and what follows from it.
        advice: What to do.
    """

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


def start_findings(device_type: str, world_size: int) -> list[Finding]:
    """What a run can find before its processes connect. Nothing is written, and no other rank is asked.

    Args:
        device_type: That the run computes on; variables for GPUs do not matter to a CPU.
        world_size: How many ranks connect.
    """
    return [
        *(variable_findings(os.environ) if device_type != "cpu" else []),
        *(interface_findings(os.environ) if world_size > 1 else []),
        *open_file_findings(resource.getrlimit(resource.RLIMIT_NOFILE)[1], world_size),
        *shared_memory_findings(),
    ]


def variable_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Environment variables that make the GPU or the host wait."""
    return [
        Finding(f"{name}={environment[name]}, with which {effect}", advice)
        for name, values, effect, advice in _SLOW
        if environment.get(name, "").lower() in values
    ]


def interface_findings(environment: Mapping[str, str], interfaces: Collection[str] | None = None) -> list[Finding]:
    """Variables that name network interfaces which this host does not have.

    Args:
        environment: Variables by name.
        interfaces: Names of the interfaces of this host. `None`: those that the system lists.
    """
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    findings = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environment.get(name, "")
        if not text or text.startswith("^"):  # NCCL: all but these
            continue
        is_prefix = name.startswith("NCCL") and not text.startswith("=")
        wanted = tuple(text.removeprefix("=").split(","))
        if not any(interface.startswith(wanted) if is_prefix else interface in wanted for interface in interfaces):
            has = ", ".join(sorted(interfaces))
            findings.append(
                Finding(f"{name}={text} names no interface of this host, which has {has}", "set it to one of them, or unset it")
            )  # fmt: skip
    return findings


def files_needed(world_size: int) -> int:
    """How many files rank 0 may have open at once: store, channel for failures and process groups take some for each rank."""
    return _FILES + _FILES_PER_RANK * world_size


def open_file_findings(limit: int, world_size: int) -> list[Finding]:
    """A limit of open files (`ulimit -n`) under which ranks cannot all connect. `limit`: -1 if there is none."""
    needed = files_needed(world_size)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    return [
        Finding(
            f"a process may open {limit} files, and with {world_size} ranks it may need {needed}",
            f"raise the limit with `ulimit -n {max(needed, 65536)}`, `--ulimit nofile=` of a container or LimitNOFILE of the service "
            "that starts it",
        )
    ]


def loader_file_findings(limit: int) -> list[Finding]:
    """A limit of open files that workers of a DataLoader may reach. `limit`: -1 if there is none."""
    if limit == resource.RLIM_INFINITY or limit >= _LOADER_FILES:
        return []
    return [
        Finding(
            f"a process may open {limit} files unless it raises its limit, and a DataLoader keeps one open for each tensor of its workers",
            "write `ulimit -n 65536` into the script that starts the run",
        )
    ]


def shared_memory_findings(folder: str = _SHARED_MEMORY) -> list[Finding]:
    """Shared memory that is too small for data loaders' workers and for NCCL, or almost full."""
    try:
        status = os.statvfs(folder)
    except OSError:  # not on every system
        return []
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    if size >= _SHARED_MEMORY_BYTES and free >= _FREE_BYTES:
        return []
    return [
        Finding(
            f"{folder} has {size >> 20} MiB, of which {free >> 20} MiB are free, and workers of a DataLoader end with a bus error where "
            "it is full",
            "give the container `--shm-size=16g` or `--ipc=host` (Kubernetes: an emptyDir with `medium: Memory` there), or delete "
            "what dead processes have left in it",
        )
    ]
