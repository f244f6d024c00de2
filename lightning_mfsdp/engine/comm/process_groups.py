"""Makes a default process group for a process that is alone, and says what device a mesh is for if the user passes none."""

from __future__ import annotations

import atexit
import logging
import os

import torch
import torch.distributed as dist

from lightning_mfsdp.base.errors import ShardingError

__all__ = ["accelerator_type", "init_alone"]

# How torchrun, srun and mpirun tell a process how many there are.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_log = logging.getLogger(__name__)


def init_alone() -> None:
    """Make a default process group of this process alone, and log that. It is destroyed when the interpreter exits.

    Raises:
        ShardingError: A launcher started this process as one of several, which must meet each other first.
    """
    for name in _SIZES:
        if os.environ.get(name, "1") != "1":
            raise ShardingError(
                f"fully_shard: torch.distributed has no process group, and this process is one of several ({name}={os.environ[name]}); "
                "call torch.distributed.init_process_group first"
            )
    device_type = accelerator_type()
    backend = dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    own_group = dist.group.WORLD
    # Not one that the program has made since.
    atexit.register(lambda: dist.destroy_process_group() if dist.group.WORLD is own_group else None)
    _log.warning(
        "fully_shard: torch.distributed had no process group, so one was made for this process alone (%s). For several processes start "
        "the program with torchrun and call torch.distributed.init_process_group first.",
        backend,
    )


def accelerator_type() -> str:
    """The device type of this machine's accelerator, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
