"""ProcessStrategy: one process for each device. Who they are, how they start, how they connect and how they talk about small things."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp

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
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who we are."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Connect the processes, unless somebody has.

        Raises:
            ValueError: Another number of processes is connected than the Trainer was given.
        """
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(device)
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"{dist.get_world_size()} processes are connected but the Trainer was given {self.world_size} (num_nodes x devices); "
                "make them agree"
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object rank `src` has."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. `sync_grads` lets gradients flow back."""
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group, sync_grads)
        tensor = tensor.detach().contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, tensor, group=group)
        return torch.stack(pieces)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A metric over all ranks; what is no tensor comes back as it is."""
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor
