"""Ranks that save or load together: an error on one of them is raised on all, so that none waits for the others forever."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TypeVar, cast

import torch.distributed as dist

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.sockets import network_of_host
from lightning_mfsdp.base.tree import RANKS, SAVES, Tree, tree_of_all_ranks

__all__ = [
    "SEEN_WITHIN",
    "FailedRanksError",
    "Ranks",
    "on_all_ranks",
    "on_hosts",
    "reason_of",
    "root_of",
    "same_on_all",
]

T = TypeVar("T")
V = TypeVar("V")

# How long a rank may take to see what another one has written, if nothing else was set.
SEEN_WITHIN = timedelta(seconds=30)
_SHOWN = 3  # in messages
_MOST_PROBLEMS = 8  # that all ranks are told of


def root_of(error: BaseException) -> BaseException:
    """The operating system's message, if that caused an error: torch.save hides a full disk behind a position in its file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


class FailedRanksError(RuntimeError):
    """Something failed on some ranks, and therefore on all.

    Attributes:
        failures: Class and text of the error, by rank.
    """

    def __init__(self, failures: Mapping[int, tuple[str, str]]) -> None:
        super().__init__("; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in list(failures.items())[:4]))
        self.failures = failures


def reason_of(error: BaseException) -> str:
    """What happened, on one line."""
    return str(error) if isinstance(error, FailedRanksError) else f"{type(error).__name__}: {error}"


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
        ranks.problems(f"{type(error).__name__}: {error}")
        raise
    for rank, problem in ranks.problems("").items():
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
    """All ranks of the default process group, or this process alone. What they exchange goes through rank 0, over a tree of connections.

    Args:
        sees_within: How long each may take to see in a folder what another one has written there.
        tree: Their connections; `None`: those for the thread that trains.
    """

    def __init__(self, sees_within: timedelta = SEEN_WITHIN, tree: Tree | None = None) -> None:
        self.sees_within = sees_within
        self._tree = tree or _tree(RANKS)
        self.size, self.rank = self._tree.size, self._tree.rank

    @classmethod
    def patient(cls, sees_within: timedelta = SEEN_WITHIN) -> Ranks:
        """All ranks, over connections of their own: they wait as long as one of them writes, perhaps in another thread. Collective."""
        return cls(sees_within, _tree(SAVES))

    @classmethod
    def alone(cls) -> Ranks:
        """This process, whatever others there are."""
        return cls(tree=Tree.alone())

    def to_first(self, item: T) -> list[T] | None:
        """What every rank has, by rank, on rank 0; `None` on the others."""
        return self._tree.to_first(item)

    def for_each(self, items: Sequence[T] | None) -> T:
        """Of what rank 0 has for every rank, by rank, that for this one."""
        return self._tree.for_each(items)

    def decide(self, item: T, judge: Callable[[list[T]], V]) -> V:
        """What rank 0 concludes from what every rank has, on all ranks.

        Args:
            item: What this one has.
            judge: Is given those of all, by rank.
        """
        items = self.to_first(item)
        return self.first("comparing ranks", lambda: judge(items or []))

    def together(self, action: Callable[[], T]) -> T:
        """Run something on every rank.

        Returns:
            Its result here.

        Raises:
            FailedRanksError: On all ranks, if it failed on any; there from its error.
        """
        value, problem = None, ("", "")
        cause: Exception | None = None
        try:
            value = action()
        except Exception as error:  # whatever it is, the other ranks must be notified
            cause, problem = error, (type(error).__name__, str(error))
        failures = self.decide(problem, _failures)
        if failures:
            raise FailedRanksError(failures) from cause
        return cast(T, value)

    def is_first_on_host(self) -> bool:
        """Whether this is the first of the ranks that see the same files. Collective."""
        hosts = self.to_first(_view_of_files())
        return self.for_each(None if hosts is None else _are_first(hosts))

    def share(self, item: T, *, wanted: bool) -> T | None:
        """What rank 0 passes, on the ranks that want it; `None` on the others."""
        wishes = self.to_first(wanted)
        return self.for_each(None if wishes is None else [item if wish else None for wish in wishes])

    def problems(self, problem: T) -> dict[int, T]:
        """What is not empty of what the ranks pass, by rank, the first few; the same on all ranks."""
        return self.decide(problem, _first_problems)

    def first(self, doing: str, action: Callable[[], T]) -> T:
        """Run something on rank 0 alone.

        Returns:
            Its result, on all ranks.

        Raises:
            RuntimeError: On all ranks, if it failed; on rank 0 from its error.
        """
        value, problem = None, ""
        cause: Exception | None = None
        if self.rank == 0:
            try:
                value = action()
            except Exception as error:  # whatever it is, the other ranks must be notified
                root = root_of(error)
                cause, problem = error, f"{type(root).__name__}: {root}"
        value, problem = self._tree.from_first((value, problem))
        if problem:
            raise RuntimeError(f"{doing}: rank 0 failed with {problem}") from cause
        return cast(T, value)


def _tree(name: str) -> Tree:
    """That of all ranks; of this process where there are no others, or where the fake backend simulates them."""
    world = dist.group.WORLD if dist.is_initialized() else None
    is_alone = world is None or world.size() == 1 or not compat.carries_data(world)
    return Tree.alone() if is_alone else tree_of_all_ranks(name)


def _view_of_files() -> tuple[str, ...]:
    """Equal for processes that see the same files: of one host, in one namespace of mounts."""
    try:
        return (*network_of_host(), os.readlink("/proc/self/ns/mnt"))
    except OSError:  # not on every system
        return network_of_host()


def _are_first(hosts: list[tuple[str, ...]]) -> list[bool]:
    seen: set[tuple[str, ...]] = set()
    return [host not in seen and not seen.add(host) for host in hosts]  # type: ignore[func-returns-value]


def _failures(problems: list[tuple[str, str]]) -> dict[int, tuple[str, str]]:
    failed = ((rank, problem) for rank, problem in enumerate(problems) if problem[0])
    return dict(islice(failed, _MOST_PROBLEMS))


def _first_problems(problems: list[T]) -> dict[int, T]:
    return dict(islice(((rank, problem) for rank, problem in enumerate(problems) if problem), _MOST_PROBLEMS))


def same_on_all(what: str, path: str | None, ranks: Ranks) -> None:
    """Compare a path of a checkpoint that every rank was given, before any of them reads. Collective.

    Args:
        what: The argument's name.
        path: As it was given to this rank; `None` where nothing is to be read.
        ranks: All of them.

    Raises:
        ValueError: On all ranks, if they differ; names ranks, hosts and values.
    """
    values = ranks.decide((path, socket.gethostname()), _differing)
    if values:
        raise ValueError(
            f"{what} differs between ranks, so nothing was read: {values}. All ranks load the same checkpoint, or none does. A file that "
            "exists on one node alone is no basis for it: let rank 0 decide for all, or store it where every node sees it"
        )


def _differing(paths: list[tuple[str | None, str]]) -> str:
    """Which ranks have which of several paths; empty if all have the same."""
    by_path: dict[str | None, list[int]] = {}
    for rank, (value, _) in enumerate(paths):
        by_path.setdefault(value, []).append(rank)
    if len(by_path) == 1:
        return ""
    hosts = [host for _, host in paths]
    return "; ".join(f"{value!r} on {on_hosts(some, hosts)}" for value, some in list(by_path.items())[:_SHOWN])
