"""How the processes of a run connect and exchange small objects; the same under the Trainer and under Fabric."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_mfsdp._lightning_api import default_process_group_backend, init_dist_connection, reset_seed
from lightning_mfsdp.base import compat
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.base.tree import RANKS, SAVES, tree_of_all_ranks
from lightning_mfsdp.launch.checks import start_findings
from lightning_mfsdp.launch.meeting import meet
from lightning_mfsdp.launch.peers import Peers

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = [
    "all_gather",
    "barrier",
    "break_off",
    "broadcast",
    "connect",
    "peers",
    "set_world_ranks",
    "store_of_this_start",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CONNECTED: list[Peers] = []  # this process's peers in the newest process group; one at most

_UNABORTED_S = 1.5  # for the program to report its own error
_MEETING_TIMEOUT = timedelta(minutes=30)  # as PyTorch's own for gloo: nodes of a large job start minutes apart


def set_world_ranks(environment: ClusterEnvironment | None, num_processes: int, num_nodes: int) -> None:
    """Set this process's rank in a cluster environment and in Lightning's rank-zero helpers. `num_processes`: on each node."""
    if environment is None:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
        return
    environment.set_global_rank(environment.node_rank() * num_processes + environment.local_rank())
    environment.set_world_size(num_nodes * num_processes)
    rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]


def connect(
    environment: ClusterEnvironment,
    device: torch.device,
    backend: str | None,
    timeout: timedelta | None,
    *,
    world_size: int,
) -> str:
    """Connect the processes, unless they are connected.

    Args:
        environment: Source of ranks and addresses; it has ours.
        device: Of this rank.
        backend: `None`: what PyTorch uses for the device.
        timeout: Of collectives; `None`: PyTorch's own.
        world_size: Number of processes that the run was configured for, num_nodes x devices.

    Returns:
        The backend.

    Raises:
        ValueError: Another number of processes was started, or is connected.
    """
    # Lightning compares them for torchrun and SLURM alone, and data are divided among `world_size` ranks.
    if environment.world_size() != world_size:
        raise ValueError(
            f"{type(environment).__name__}: {environment.world_size()} processes were started but the Trainer or Fabric was given "
            f"{world_size} (num_nodes x devices); make them agree"
        )
    if not dist.is_initialized() and environment.local_rank() == 0:  # before they connect, which a finding may prevent
        for finding in start_findings(device.type, world_size):
            _log.warning(f"{socket.gethostname()}: {finding}. Run `lightning-mfsdp doctor` for all checks")
    reset_seed()
    backend = backend or default_process_group_backend(device)
    options: dict[str, Any] = {"timeout": timeout, "device_id": device if device.type == "cuda" else None}
    if not dist.is_initialized() and environment.world_size() > 1:
        options["store"] = store_of_this_start(environment, timeout or _MEETING_TIMEOUT)
    init_dist_connection(environment, backend, **options)
    if dist.get_world_size() != world_size:
        raise ValueError(
            f"{dist.get_world_size()} processes are connected but the Trainer or Fabric was given {world_size} (num_nodes x devices); make "
            "them agree"
        )
    return backend


def store_of_this_start(environment: ClusterEnvironment, timeout: timedelta) -> compat.Store:
    """Where the processes exchange addresses: it contains nothing of an earlier start of the same job. Collective."""
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    rank, world_size = environment.global_rank(), environment.world_size()
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return meet(store, rank, world_size, timeout)


def peers() -> Peers | None:
    """The channel for failures and SIGTERM outside of collectives; `None` for a single rank. Collective, the first time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return kept("peers", _connected_peers)


def _connected_peers() -> Peers | None:
    tree_of_all_ranks(SAVES)  # now, because a firewall should not be met by the first save, hours later
    connected = Peers.connected(tree_of_all_ranks(RANKS))
    while _CONNECTED:
        _CONNECTED.pop().close()
    if connected is not None:
        if dist.get_backend() not in ("gloo", "mpi"):
            connected.abort = compat.abort_process_groups
        atexit.register(_end_or_abort, connected)  # before Lightning's own, which waits for the other ranks
        _CONNECTED.append(connected)
    return connected


def _end_or_abort(peers: Peers) -> None:
    """At the end of a process: tell the others, and if its program raised, wait for none of them."""
    if peers.is_closed:
        return
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) and not peers.has_failed:
        peers.program_ends()
        return
    if peers.abort is None:  # gloo notices by itself
        return
    if isinstance(error, BaseException):
        peers.failed(None, f"{type(error).__name__}: {error}")
    if not compat.abort_process_groups():
        _end_process()


def break_off(error: BaseException) -> None:
    """Stop waiting for other ranks.

    If NCCL does not abort, everything on the GPU would wait forever, the end of a run as well: then the process is ended soon.

    Args:
        error: The error that the program raises meanwhile.
    """
    if dist.is_initialized() and dist.get_backend() not in ("gloo", "mpi"):  # this may be its last message
        _log.warning(
            f"rank {dist.get_rank()} aborts its communicators, because it failed with {type(error).__name__}: {error}. Look for the "
            "first error in the output of all ranks"
        )
    if compat.abort_process_groups():
        return

    def end() -> None:
        time.sleep(_UNABORTED_S)
        if not dist.is_initialized():  # late, but finished
            return
        try:
            traceback.print_exception(error)
        finally:
            _end_process()

    threading.Thread(target=end, name="mfsdp-end", daemon=True).start()


def _end_process() -> NoReturn:
    """End the process at once with exit code 1: no handler runs, and nothing waits."""
    try:
        rank = dist.get_rank() if dist.is_initialized() else ""
        _log.warning(
            f"rank {rank} is ended: communicators cannot be aborted, and what waits for them would wait forever. Look for the first "
            "error in the "
            "output of all ranks"
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # also if a stream is closed
        os._exit(1)


def barrier(device: torch.device) -> None:
    """Wait until all ranks have called this; on a CUDA device the host waits, too. Without a process group nothing happens."""
    if (everyone := dist.group.WORLD) is not None:
        dist.barrier(device_ids=[device.index] if compat.uses_nccl(everyone, device) else None)


def broadcast(obj: T, src: int = 0) -> T:
    """The object that rank `src` passes, on all ranks; it is pickled. Collective."""
    if not dist.is_initialized():
        return obj
    objects = [obj]
    dist.broadcast_object_list(objects, src)
    return objects[0]


def all_gather(tensor: Tensor, group: Any | None = None) -> Tensor:
    """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. No gradients flow back."""
    tensor = tensor.detach().contiguous()
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor, group=group)
    return torch.stack(pieces)
