"""Ranks that save or load together: an error on one of them is raised on all, so that none waits for the others forever."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.base.kept_groups import kept

__all__ = ["SEEN_WITHIN", "Ranks", "on_all_ranks", "on_hosts", "reason_of", "root_of", "same_on_all"]

T = TypeVar("T")

# How long a rank may take to see what another one has written, if nothing else was set.
SEEN_WITHIN = timedelta(seconds=30)
# No write takes this long. A rank that has died is detected at once, by its broken connections.
_PATIENCE = timedelta(days=7)
_SHOWN = 3  # in messages


def root_of(error: BaseException) -> BaseException:
    """The operating system's message, if that caused an error: torch.save hides a full disk behind a position in its file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def reason_of(error: BaseException) -> str:
    """What happened, on one line; of errors that torch.distributed.checkpoint collected, on which ranks."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    failures = list(error.failures.items())
    return "; ".join(f"rank {rank}: {type(cause[0]).__name__}: {cause[0]}" for rank, cause in failures[:4])


@contextmanager
def on_all_ranks(doing: str) -> Iterator[None]:
    """An error inside on one rank is raised on all, at the end of the context. Collective; nothing inside may be.

    Args:
        doing: Begins the message of ranks that met no error themselves.

    Raises:
        RuntimeError: On those ranks; with the number of another rank and its error.
    """
    ranks = Ranks()
    try:
        yield
    except Exception as error:
        ranks.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, problem in enumerate(ranks.gather("")):
        if problem:
            raise RuntimeError(f"{doing}: rank {rank} failed, so all do: {problem}")


def on_hosts(numbers: Sequence[int], hosts: Sequence[str]) -> str:
    """Some ranks, with the names of their machines, for messages."""
    by_host: dict[str, list[int]] = {}
    for number in numbers:
        by_host.setdefault(hosts[number], []).append(number)
    parts = [f"{_numbered(ranks)} on {host}" for host, ranks in list(by_host.items())[:_SHOWN]]
    left_out = len(by_host) - _SHOWN
    return ", ".join(parts) + (f" and those on {left_out} more nodes" if left_out > 0 else "")


def _numbered(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


class Ranks:
    """All ranks, through the default process group or another one that holds all of them; or this process alone.

    Args:
        group: For communication from another thread, which must not mix with that of training. `None`: the default group.
        sees_within: How long each may take to see in a folder what another one has written there.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, sees_within: timedelta = SEEN_WITHIN) -> None:
        self.group = group
        self.sees_within = sees_within
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    @classmethod
    def patient(cls, sees_within: timedelta = SEEN_WITHIN) -> Ranks:
        """All ranks, through a separate group over host memory, in which they wait as long as one of them writes. Collective.

        The default group times out, and with NCCL ends the process, when a collective takes longer than its timeout.
        """
        if not dist.is_initialized():
            return cls(sees_within=sees_within)
        return cls(kept("saves", lambda: compat.new_group(backend="gloo", timeout=_PATIENCE)), sees_within)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Around communication of all ranks.

        Raises:
            CollectiveError: Another rank did not join it.
        """
        try:
            yield
        except Exception as error:
            if not compat.is_lost_connection(error):
                raise
            raise CollectiveError(
                f"rank {self.rank}: a save or load of all ranks failed, because another rank is gone or does something else. Look for the "
                "first error in the output of the others"
            ) from error

    def gather(self, item: T) -> list[T]:
        """What every rank has, by rank."""
        if self.size == 1:
            return [item]
        everyones: list[Any] = [None] * self.size
        with self.joining():
            dist.all_gather_object(everyones, item, group=self.group)
        return everyones

    def first(self, doing: str, action: Callable[[], T]) -> T:
        """Run something on rank 0 alone.

        Returns:
            Its result, on all ranks.

        Raises:
            RuntimeError: On all ranks, if it failed; on rank 0 from its error.
        """
        result: list[Any] = [None, ""]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                result[0] = action()
            except Exception as error:  # whatever it is, the other ranks must be notified
                root = root_of(error)
                cause, result[1] = error, f"{type(root).__name__}: {root}"
        if self.size > 1:
            with self.joining():
                dist.broadcast_object_list(result, src=0, group=self.group)
        if result[1]:
            raise RuntimeError(f"{doing}: rank 0 failed with {result[1]}") from cause
        value: T = result[0]
        return value


def same_on_all(what: str, path: str | None, ranks: Ranks) -> None:
    """Compare a path of a checkpoint that every rank was given, before any of them reads. Collective.

    Args:
        what: The argument's name.
        path: As it was given to this rank; `None` where nothing is to be read.
        ranks: All of them.

    Raises:
        ValueError: On all ranks, if they differ; names ranks, hosts and values.
    """
    paths = ranks.gather((path, socket.gethostname()))
    by_path: dict[str | None, list[int]] = {}
    for rank, (value, _) in enumerate(paths):
        by_path.setdefault(value, []).append(rank)
    if len(by_path) > 1:
        hosts = [host for _, host in paths]
        values = "; ".join(f"{value!r} on {on_hosts(some, hosts)}" for value, some in list(by_path.items())[:_SHOWN])
        raise ValueError(
            f"{what} differs between ranks, so nothing was read: {values}. All ranks load the same checkpoint, or none does. A file that "
            "exists on one node alone is no basis for it: let rank 0 decide for all, or store it where every node sees it"
        )
