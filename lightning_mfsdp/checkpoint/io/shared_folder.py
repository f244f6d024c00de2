"""Whether all ranks see the folder that they are about to write to, and whether rank 0 then sees what they have written.

Each node writes its own files. If a path leads to another storage on every node, each write succeeds and no folder holds them all.
So rank 0 puts an empty file of a new name into the folder, and every rank looks for it. They list folders instead of asking for names:
network file systems remember for up to a minute that a name was not there, and a listing asks the server. What is not seen at once is
looked for again.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_hosts

__all__ = [
    "TOKEN",
    "NotSharedError",
    "View",
    "see_on_all",
    "see_until",
    "token_name",
    "warn_if_late",
    "writers_of",
]

TOKEN = ".mfsdp-seen-"
_NOTABLE_S = 1.0  # a later view is worth a warning
_LONGEST_PAUSE_S = 1.0
_WRITER = re.compile(r"__(\d+)_")  # in the name of a file that a rank wrote


class NotSharedError(RuntimeError):
    """Ranks do not see in a folder what others put there."""


@dataclass(frozen=True)
class View:
    """What one rank sees of a folder.

    Attributes:
        host: Name of its machine.
        problem: Why it does not see the token; empty if it does.
        waited_s: How long it looked.
    """

    host: str
    problem: str
    waited_s: float


def token_name() -> str:
    """A name that nothing else has."""
    return f"{TOKEN}{secrets.token_hex(8)}"


def see_until(
    look: Callable[[], str],
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[str, float]:
    """Look again and again, at growing intervals, until there is no problem or time is over.

    Args:
        look: Returns a problem, or nothing.
        limit_s: At least one look is taken, and the last one at its end.
        clock: In seconds.
        wait: For so many seconds.

    Returns:
        The last problem, and how long this took in seconds.
    """
    began, pause_s = clock(), 0.05
    while True:
        problem, now = look(), clock()
        if not problem or now >= began + limit_s:
            return problem, now - began
        wait(min(pause_s, began + limit_s - now))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def see_on_all(folder: str, token: str, names: Callable[[], Collection[str]], ranks: Ranks, *, what: str) -> list[View]:
    """Have every rank look for a file that rank 0 has put into a folder. Collective.

    Args:
        folder: Its path, for messages.
        token: The file's name.
        names: Lists the folder.
        ranks: All of them, and how long each looks.
        what: What does not happen without it, for the message.

    Returns:
        What each rank saw, by rank, on rank 0; nothing on the others.

    Raises:
        NotSharedError: On all ranks, if one does not see it; names nodes and the path.
    """

    def look() -> str:
        try:
            return "" if token in names() else "its listing has no such file"
        except Exception as error:  # of whatever class an object store has; raised here, the others would wait
            return f"{type(error).__name__}: {error}"

    problem, waited_s = see_until(look, ranks.sees_within.total_seconds())
    views = ranks.to_first(View(socket.gethostname(), problem, waited_s)) or []
    blind, first_host, reason = ranks.first(f"comparing what ranks see in {folder}", lambda: _blind(views))
    if blind:
        raise NotSharedError(
            f"{what}: {blind} did not see within {ranks.sees_within.total_seconds():g} s what rank 0 on {first_host} put into {folder} "
            f"({reason}). Every node writes its part there: mount the same storage at that path on all, choose another path, or raise "
            "shared_folder_timeout if it shows new names later"
        )
    return views


def _blind(views: Sequence[View]) -> tuple[str, str, str]:
    """Ranks that did not see it, with hosts, and empty if all did; the host of rank 0; and why the first of them did not."""
    blind = [rank for rank, view in enumerate(views) if view.problem]
    return (_on(blind, views), views[0].host, views[blind[0]].problem) if blind else ("", views[0].host, "")


def warn_if_late(folder: object, views: Sequence[View], ranks: Ranks) -> None:
    """On rank 0, after the others need nothing of it: they do not learn of a warning that is an error."""
    late = [rank for rank, view in enumerate(views) if view.waited_s > _NOTABLE_S]
    if late and ranks.rank == 0:
        longest_s = max(view.waited_s for view in views)
        warnings.warn(
            f"{folder}: {_on(late, views)} saw only after {longest_s:.1f} s what rank 0 on {views[0].host} put there. After "
            f"{ranks.sees_within.total_seconds():g} s a save fails; raise shared_folder_timeout if this file system may take longer",
            stacklevel=3,
        )


def writers_of(files: Iterable[str], views: Sequence[View]) -> str:
    """The ranks that have written files of `torch.distributed.checkpoint`, with their hosts."""
    writers = {int(match.group(1)) for name in files if (match := _WRITER.match(name))}
    return _on(sorted(rank for rank in writers if rank < len(views)), views)


def _on(ranks: Sequence[int], views: Sequence[View]) -> str:
    return on_hosts(ranks, [view.host for view in views])
