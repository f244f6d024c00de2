"""Numbers of nodes that a launcher decides, and that change while torchrun runs a job: `torchrun --nnodes=1:4`."""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mfsdp._lightning_api import SLURMEnvironment, TorchElasticEnvironment

__all__ = ["ElasticEnvironment", "launched_nodes"]


def launched_nodes() -> int:
    """The number of nodes on which a launcher has started this job, for `Trainer(num_nodes=launched_nodes())`; 1 without a launcher.

    torchrun, SLURM's srun and Open MPI's mpirun say how many there are.
    """
    if TorchElasticEnvironment.detect():
        return int(os.environ["GROUP_WORLD_SIZE"])
    if SLURMEnvironment.detect():
        return int(os.environ["SLURM_NNODES"])
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return int(os.environ["OMPI_COMM_WORLD_SIZE"]) // int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    return 1


class ElasticEnvironment(TorchElasticEnvironment):
    """Processes of torchrun on a number of nodes that changes: `Trainer(strategy="mfsdp", plugins=[ElasticEnvironment()])`.

    The strategy takes the number of nodes from torchrun, so `num_nodes` of the Trainer or Fabric is left out. For configuration files, too,
    which cannot call `launched_nodes`.

    Raises:
        RuntimeError: torchrun did not start this process.
    """

    def __init__(self) -> None:
        super().__init__()
        if not self.detect():
            raise RuntimeError(
                "ElasticEnvironment: torchrun did not start this process, so the number of nodes is unknown. Run the script with "
                "torchrun --nnodes=1:4, or leave the plugin out"
            )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank_zero_warn(
                "ElasticEnvironment: torchrun cannot take a node in again with the store that its agents share: each waits for an address "
                "and fails. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on all nodes"
            )

    @property
    def num_nodes(self) -> int:
        """Of this start; torchrun starts all processes again when it changes."""
        return int(os.environ["GROUP_WORLD_SIZE"])

    def refuse_other(self, num_nodes: int) -> None:
        """Raise a ValueError if the Trainer or Fabric was given another number of nodes than its default, 1, or this one."""
        if num_nodes not in (1, self.num_nodes):
            raise ValueError(
                f"num_nodes={num_nodes} beside ElasticEnvironment, which takes the number of nodes from torchrun, now {self.num_nodes}; "
                "leave num_nodes out, or the plugin"
            )
