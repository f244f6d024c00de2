"""Whether the folder for checkpoints is shared, moves files as a save needs it, and how fast it takes them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_mfsdp.checkpoint.io.local import exchange, remove
from lightning_mfsdp.checkpoint.io.shared_folder import see_until
from lightning_mfsdp.commands.doctor.ranks import Exchange, RankFacts, first_of_hosts, outliers
from lightning_mfsdp.launch.checks import Finding

__all__ = ["Storage", "speed_findings", "storage_findings", "storage_of_rank", "tried_renames"]

_CHUNK_BYTES = 16 * 2**20
_MOST_BYTES = 2**30  # that a host writes
_SEEN_S = 10.0  # network file systems remember for seconds what a folder held
_LATE_S = 1.0
_SLOW_BYTES = 200e6  # a second, of all hosts together
_FREE_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Storage:
    """What a rank found of a folder; ranks that are not the first of their host look at nothing.

    Attributes:
        problem: Why the folder cannot be used, or why what rank 0 wrote is not seen; empty if it is.
        late_s: After how long it was seen.
        write_speed: Bytes a second that the host wrote, while the others wrote as well; 0: not measured.
        free_bytes: Space left.
        exchanges: Whether two folders can be exchanged in one operation; of rank 0.
    """

    problem: str = ""
    late_s: float = 0.0
    write_speed: float = 0.0
    free_bytes: int = 0
    exchanges: bool = True


def storage_of_rank(folder: Path, ranks: Sequence[RankFacts], channel: Exchange, seconds: float) -> list[Storage]:
    """What each rank finds of a folder; what was written into it is deleted. Collective.

    Args:
        folder: Where checkpoints will go; it is made if it is not there.
        ranks: All of them.
        channel: Between them.
        seconds: For which hosts write, all at the same time.
    """
    is_first = channel.rank in first_of_hosts(ranks)
    own, problem, exchanges = "", "", True
    if channel.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix=".mfsdp-doctor-", dir=folder)
            exchanges = tried_renames(Path(own))
        except OSError as error:
            problem = f"rank 0 failed: {error}"
    own, problem = channel.gather((own, problem))[0]
    found = Storage(problem=problem)
    if is_first and not problem:
        found = _looked_at(folder, Path(own), f"written-by-{channel.rank}", seconds, exchanges)
    every = [Storage(**fields) for fields in channel.gather(asdict(found))]
    if channel.rank == 0 and own:
        remove(Path(own))
    return every


def tried_renames(folder: Path) -> bool:
    """Move files and folders as a save does. Returns whether two folders can be exchanged in one operation.

    Raises:
        OSError: The file system cannot.
    """
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    (folder / "replaced").write_text("old")
    (folder / "second/file").replace(folder / "replaced")
    if (folder / "replaced").read_text() != "second":
        raise OSError(
            f"{folder}: a file was replaced by another, and still has its old content; save to another file system"
        )
    (folder / "second").rename(folder / "moved")
    exchanges = exchange(folder / "first", folder / "moved")
    return exchanges and (folder / "moved/file").read_text() == "first"


def storage_findings(folder: Path, ranks: Sequence[RankFacts], found: Sequence[Storage]) -> list[Finding]:
    """What is wrong with a folder.

    Args:
        folder: Its path.
        ranks: All of them.
        found: What each rank found.
    """
    by_host = {first: found[first] for first in first_of_hosts(ranks)}
    problems = {ranks[first].host: storage.problem for first, storage in by_host.items() if storage.problem}
    if problems:
        host, problem = next(iter(problems.items()))
        many = f" and {len(problems) - 1} more hosts" if len(problems) > 1 else ""
        return [
            Finding(
                f"{folder} cannot hold checkpoints of this run: {problem} (host {host}{many})",
                "name a folder that all hosts mount and this user may write to",
            )
        ]
    late = max(storage.late_s for storage in by_host.values())
    free = by_host[0].free_bytes
    findings = speed_findings(folder, {ranks[first].host: storage.write_speed for first, storage in by_host.items()})
    if late > _LATE_S:
        findings.append(
            Finding(
                f"{folder}: hosts see what another wrote after {late:.1f} s, for which each save and load waits",
                "shorten the attribute cache of the mount (NFS: `actimeo=1`, or `noac`)",
            )
        )
    if free < _FREE_BYTES:
        findings.append(
            Finding(
                f"{folder} has {free / 2**30:.1f} GiB left, and a checkpoint with Adam takes 12 bytes for each parameter",
                "make room, or keep fewer checkpoints (`ModelCheckpoint(save_top_k=...)`)",
            )
        )
    return findings


def speed_findings(folder: Path, speeds: dict[str, float]) -> list[Finding]:
    """Slow writes: of all hosts together, or of one beside the others. `speeds`: bytes a second by host."""
    together = sum(speeds.values())
    findings = [
        Finding(
            f"host {host} writes {speeds[host] / 1e6:.0f} MB/s to {folder}, less than half of other hosts, and a save waits for it",
            "look there for another mount, a slower network or other processes that write",
        )
        for host in outliers(speeds)
    ]
    if together < _SLOW_BYTES:
        minutes = 12 * 8e9 / together / 60
        findings.append(
            Finding(
                f"{folder} takes {together / 1e6:.0f} MB/s of all hosts, so a checkpoint of 8 billion parameters with Adam takes "
                f"{minutes:.0f} minutes",
                "use a faster folder, or `MFSDPStrategy(async_save=True)`, which trains meanwhile",
            )
        )
    return findings


def _looked_at(folder: Path, own: Path, name: str, seconds: float, exchanges: bool) -> Storage:
    def look() -> str:
        try:
            os.listdir(own.parent)  # which asks the server of a network file system
            return "" if "moved" in os.listdir(own) else f"{own} has not the folder that rank 0 has renamed"
        except OSError as error:
            return f"it does not see what rank 0 wrote: {error}"

    problem, late_s = see_until(look, _SEEN_S)
    if problem:
        return Storage(problem=problem)
    try:
        return Storage(
            late_s=late_s,
            write_speed=_write_speed(own / name, seconds),
            free_bytes=shutil.disk_usage(folder).free,
            exchanges=exchanges,
        )
    except OSError as error:
        return Storage(problem=str(error))


def _write_speed(path: Path, seconds: float) -> float:
    """Bytes a second, until they are durable."""
    chunk = os.urandom(_CHUNK_BYTES)  # which no file system compresses
    began, written = time.perf_counter(), 0
    with path.open("wb") as file:
        while written < _MOST_BYTES and (not written or time.perf_counter() < began + seconds):
            file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            written += len(chunk)
    return written / (time.perf_counter() - began)
