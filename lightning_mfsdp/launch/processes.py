"""ProcessStrategy: what any strategy with a process for each device needs: ranks, starting, connecting, failures, small collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_mfsdp._lightning_api import Launcher, ParallelStrategy, SIGTERMException, sync_if_available
from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.launch import communication
from lightning_mfsdp.launch.elastic import ElasticEnvironment
from lightning_mfsdp.launch.slurm import requeue_signal
from lightning_mfsdp.launch.stopping import Stopping

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision

    from lightning_mfsdp.launch.peers import Peers

__all__ = ["ProcessStrategy", "with_others"]

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="ProcessStrategy")

# What Lightning calls the first barrier of a run, right after it has installed its handlers of signals.
RUN_BEGINS = "run-stage"


class ProcessStrategy(ParallelStrategy):
    """What any strategy with one process per device needs, whatever it does with the model.

    Started by torchrun, SLURM or another cluster environment, or by Lightning, which runs the script again for every further device.

    Args:
        accelerator: CPU or CUDA.
        parallel_devices: One device for each local rank.
        cluster_environment: Source of ranks and addresses.
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
        self._num_nodes = 1
        self._timeout = timeout
        self._process_group_backend = process_group_backend
        self._peers: Peers | None = None
        self._stopping: Stopping | None = None
        self._together: bool | None = None
        self._explained: Exception | None = None

    @property
    def is_distributed(self) -> bool:
        """Lightning reads it before it sets a distributed sampler on loaders."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device that this rank computes on."""
        assert self.parallel_devices is not None
        if self.local_rank >= (given := len(self.parallel_devices)):
            raise ValueError(
                f"local rank {self.local_rank} has no device: devices={given} was given, and the launcher has started more "
                'processes here. Pass devices="auto", or as many as it starts (torchrun --nproc-per-node)'
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """The Trainer's; an `ElasticEnvironment`, which the Trainer sets before, knows better."""
        environment = self.cluster_environment
        if isinstance(environment, ElasticEnvironment):
            environment.refuse_other(num_nodes)
            num_nodes = environment.num_nodes
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node, each with one device."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def configured_world_size(self) -> int:
        """Number of ranks that the run was configured for: num_nodes x devices."""
        return self.num_nodes * self.num_processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank sees data of its own."""
        return {"num_replicas": self.configured_world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Name of the communication backend; known once processes are connected, or if it was given."""
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # A single process needs no launcher, so notebooks work.
        if not self.cluster_environment.creates_processes_externally and self.configured_world_size > 1:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Set this process's rank in the cluster environment and in Lightning's rank-zero helpers."""
        communication.set_world_ranks(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes, unless they are connected.

        Raises:
            ValueError: Another number of processes is connected than the Trainer was configured for.
        """
        self._connect()
        self._peers = communication.peers()
        self._together = None
        if self._peers is not None:
            self._peers.work_begins()

    def connect_processes(self) -> None:
        """Connect the processes before an entry point of the Trainer does so; Lightning's launcher runs the script for the others first.

        Raises:
            ValueError: As `setup_environment`.
        """
        if isinstance(self._launcher, Launcher):
            self._launcher.launch(self._connect)
        elif (
            self._launcher is None
        ):  # otherwise each entry point forks processes, which all have what this one has decided
            self._connect()

    def _connect(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._process_group_backend = communication.connect(
            self.cluster_environment,
            self.root_device,
            self._process_group_backend,
            self._timeout,
            world_size=self.configured_world_size,
        )

    # -- when something stops a run ------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        # The property `trainer` raises where a module has none yet.
        return self.lightning_module._trainer if self.lightning_module is not None else None

    def _expect_signals(self, *, trains: bool) -> Stopping:
        if self._stopping is None:
            signal = requeue_signal(self.cluster_environment)
            self._stopping = Stopping(self._trainer, self._peers, self._raise_failure_of_another, signal)
        self._stopping.begin(trains=trains)
        return self._stopping

    def on_train_start(self) -> None:
        """Have a signal on any rank stop all of them after the same batch."""
        self._expect_signals(trains=True)

    def on_validation_start(self) -> None:
        """SIGTERM ends a run, unless it trains: then this validation is completed."""
        self._expect_signals(trains=False).evaluates(True)

    def on_validation_end(self) -> None:
        """The validation is complete, so training may stop again."""
        if self._stopping is not None:
            self._stopping.evaluates(False)

    @property
    def _is_alone(self) -> bool:
        """Whether this rank ends by an exception that not all ranks have: it must not wait for the others, who may wait for it.

        Queries the others, once.
        """
        trainer = self._trainer
        if self._peers is None or trainer is None or not trainer.interrupted:
            return False
        if self._together is None:
            error = sys.exc_info()[1]
            stopped = isinstance(error, SIGTERMException) and self._stopping is not None and self._stopping.agreed
            missed = error is None or isinstance(error, CollectiveError) or compat.is_lost_connection(error)
            self._together = stopped or self._peers.failed(None if missed else self._place(), _described(error), error)
        return not self._together

    def _place(self) -> list[int]:
        """Numbers that are equal on ranks that have done the same."""
        assert self._peers is not None
        return [self._trainer.global_step, self._peers.begun]

    def on_exception(self, exception: BaseException) -> None:
        """Notify the other ranks, unless that was done for a callback that tried to save; and stop waiting for them."""
        if self._is_alone:
            communication.break_off(exception)

    def _raise_failure_of_another(self) -> None:
        failure = self._peers.failure_of_another if self._peers is not None else None
        if failure is not None:
            raise CollectiveError(self._in_words(failure, ""))

    @contextmanager
    def _with_others(self) -> Generator[None, None, None]:
        """Context around collective work: if it fails because another rank is missing, the error explains what is known of that."""
        try:
            yield
        except Exception as error:
            missed = isinstance(error, CollectiveError) or compat.is_lost_connection(error)
            if self._peers is None or not missed or error is self._explained:
                raise
            self._peers.failed(None, _described(error), error)
            failure = self._peers.failure_of_another
            explained = CollectiveError(self._in_words(failure or "no rank said that it failed", str(error)))
            self._explained = explained
            raise explained from error

    def _in_words(self, failure: str, seen: str) -> str:
        trainer = self._trainer
        when = f" in step {trainer.global_step}" if trainer is not None else ""
        return f"rank {self.global_rank} ends{when}: {failure}" + (f".\nIt was seen here as {seen}" if seen else "")

    def teardown(self) -> None:
        """Restore what was replaced for signals; failures of other ranks no longer concern this one."""
        if self._stopping is not None:
            stopping, self._stopping = self._stopping, None
            stopping.end()
        if self._peers is not None:
            self._peers.work_ends()

    # -- small objects -------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this. The first one of a run, which Lightning names, takes over signals as well."""
        if name == RUN_BEGINS:
            self._expect_signals(trains=False)
        if self._is_alone:
            return
        with self._with_others():
            communication.barrier(self.root_device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object that rank `src` passes, on all ranks; it is pickled. Collective."""
        if self._is_alone:
            return obj
        with self._with_others():
            return communication.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensor of every rank, stacked: `[world_size, *tensor.shape]`. `sync_grads` lets gradients flow back."""
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group, sync_grads)
        with self._with_others():
            return communication.all_gather(tensor, group)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A metric over all ranks; anything else is returned unchanged."""
        if not isinstance(tensor, Tensor) or self._is_alone:
            return tensor
        with self._with_others():
            return sync_if_available(tensor, group, reduce_op)


def _described(error: BaseException | None) -> str:
    """Description for other ranks: type and first lines."""
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")


def with_others(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method in which all ranks save or load: where one is missing, the error says which failed, as far as that is known.

    Only of errors that are about ranks for certain: storage behind a network loses connections, too, and a program may go on after that.
    """

    @wraps(method)
    def explained(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except CollectiveError:
            with self._with_others():
                raise

    return explained
