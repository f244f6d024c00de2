"""ProcessStrategy: one process for each device. Who they are, how they start, how they connect and how they talk about small things."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_mfsdp import communication
from lightning_mfsdp.lightning_api import Launcher, ParallelStrategy, sync_if_available

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision

__all__ = ["ProcessStrategy"]

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """What any strategy with one process per device needs, whatever it does with the model.

    Started by torchrun, SLURM or another cluster environment, or by Lightning, which runs the script again for every further device.

    Args:
        accelerator: CPU or CUDA.
        parallel_devices: One device for each local rank.
        cluster_environment: Where ranks and addresses come from.
        precision_plugin: As for any strategy.
        timeout: Of collectives; `None`: PyTorch's own.
        process_group_backend: `None`: what PyTorch uses for the device.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        precision_plugin: Precision | None,
        timeout: timedelta | None,
        process_group_backend: str | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        self.num_nodes = 1
        self._timeout = timeout
        self._process_group_backend = process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Lightning asks before it gives loaders a distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank sees data of its own."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Name of the communication backend; known once processes are connected, or where it was given."""
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # One process needs nobody to start it, which lets notebooks in.
        if not self.cluster_environment.creates_processes_externally and self.num_nodes * self.num_processes > 1:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who we are."""
        communication.set_world_ranks(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes, unless somebody has.

        Raises:
            ValueError: Another number of processes is connected than the Trainer was given.
        """
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._process_group_backend = communication.connect(
            self.cluster_environment, self.root_device, self._process_group_backend, self._timeout
        )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        communication.barrier(self.root_device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object rank `src` has."""
        return communication.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. `sync_grads` lets gradients flow back."""
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group, sync_grads)
        return communication.all_gather(tensor, group)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A metric over all ranks; what is no tensor comes back as it is."""
        return sync_if_available(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor
