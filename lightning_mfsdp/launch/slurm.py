"""SLURM's requeue: which signal asks for it, as Lightning's SLURMEnvironment says, and how a job is put back into the queue."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from lightning_mfsdp._lightning_api import SLURMEnvironment

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = ["RequeueError", "is_job", "requeue", "requeue_signal"]


class RequeueError(RuntimeError):
    """The job could not be put back into the queue."""


def is_job() -> bool:
    """Whether SLURM ends this process when its time is up, whatever has started it in the job."""
    return "SLURM_JOB_ID" in os.environ


def requeue_signal(environment: ClusterEnvironment | None) -> int | None:
    """The signal after which this job is to be saved and requeued; `None`: it is not a SLURM job, or `auto_requeue` is off."""
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue() -> str:
    """Put this job back into the queue. SLURM then ends it, with SIGTERM. By one rank.

    Returns:
        The job.

    Raises:
        RequeueError: SLURM did not do it.
    """
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        problem = f"exit code {done.returncode}: {done.stderr.strip()[:200]}" if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        raise RequeueError(
            f"`scontrol requeue {job}` failed ({problem}), so the job is not in the queue again. Submit it again. scontrol must be "
            "on PATH on the node of rank 0, in its container too, and the job be submitted with --requeue"
        )
    return job
