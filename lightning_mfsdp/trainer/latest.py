"""`latest_checkpoint`: what a restart goes on from, of all checkpoints that earlier starts of its run have left.

A run begins with a fit that is given no checkpoint, and every fit that is given one of its checkpoints belongs to it. Each checkpoint has
the run's id and when it began (`RUN`). In a folder with checkpoints of several runs, that which began last is meant.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_mfsdp._lightning_api import ModelCheckpoint, OnExceptionCheckpoint
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.location import META_FILE, Location, beside
from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_hosts, same_on_all
from lightning_mfsdp.checkpoint.io.remote import names_in
from lightning_mfsdp.checkpoint.io.shared_folder import NotSharedError, see_on_all
from lightning_mfsdp.launch.processes import ProcessStrategy
from lightning_mfsdp.trainer.data_position import DATA_POSITIONS

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["RUN", "Choice", "choose", "latest_checkpoint", "new_run"]

RUN = "training_run"  # key in checkpoints
_SUFFIX = ".ckpt"  # of what ModelCheckpoint saves
_REPLACED = re.compile(
    r"\.mfsdp-old-(.+)-ckpt-[0-9a-f]{8}"
)  # names of `beside`, of those that a save replaces, such as last.ckpt
_SHOWN = 8  # in messages


def new_run() -> dict[str, Any]:
    """What checkpoints of a run that begins now have under `RUN`."""
    return {"id": uuid.uuid4().hex[:12], "began": time.time()}


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint with which training can go on.

    Attributes:
        location: Where it is.
        step: Optimizer steps before it.
        run: Id of its run; empty if it has none.
        began: When the run began, in seconds since 1970; 0 if it has none.
        place: How far it is among those of its step: whether it has the place inside the epoch, epochs, batches.
    """

    location: Location
    step: int
    run: str
    began: float
    place: tuple[bool, int, int]

    @property
    def order(self) -> tuple[Any, ...]:
        """Greater for the one to go on from; of copies, that with the last name."""
        return self.step, self.place, str(self.location)


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        path: Of the checkpoint; `None` if there is none.
        step: Optimizer steps before it.
        run: Id of its run.
        passed_by: What else there is, with the reason why it was not chosen, by path.
        later: Of these, paths of checkpoints of other runs that have more steps.
    """

    path: str | None = None
    step: int = 0
    run: str = ""
    passed_by: dict[str, str] = field(default_factory=dict)
    later: list[str] = field(default_factory=list)


def choose(folders: Sequence[str], run: str | None = None, *, weights_only: bool | None = None) -> Choice:
    """The complete checkpoint of a run with the highest global step; of several, one that has the place inside the epoch. On one rank.

    Args:
        folders: Paths or URLs. What lies deeper in them is not looked at.
        run: Its id; `None`: the run that began last.
        weights_only: As for `torch.load`.

    Raises:
        ValueError: No checkpoint belongs to the run of that id.
    """
    passed_by: dict[str, str] = {}
    candidates: list[_Candidate] = []
    for folder in folders:
        _finish_replacements(folder)
    for path in dict.fromkeys(path for folder in folders for path in _paths_in(folder)):
        candidate = _read(locate(path), weights_only)
        if isinstance(candidate, _Candidate):
            candidates.append(candidate)
        elif candidate:
            passed_by[path] = candidate
    runs = {candidate.run: candidate.began for candidate in candidates}
    if run is not None and run not in runs:
        raise ValueError(
            f"run={run!r}: no checkpoint in {', '.join(folders)} is of that run; there are those of {list(runs) or 'none'}"
        )
    if run is None:
        run = max(runs, key=lambda name: (runs[name], name), default="")
    chosen: _Candidate | None = None
    for candidate in sorted(candidates, key=lambda candidate: candidate.order, reverse=True):
        path = str(candidate.location)
        if candidate.run != run:
            passed_by[path] = f"step {candidate.step} of another run, {candidate.run or 'without an id'}"
        elif chosen is not None:
            passed_by[path] = f"step {candidate.step}"
        elif problem := _problem(candidate.location, weights_only):
            passed_by[path] = f"step {candidate.step}, incomplete: {problem}"
        else:
            chosen = candidate
    step = -1 if chosen is None else chosen.step
    return Choice(
        None if chosen is None else str(chosen.location),
        max(step, 0),
        run,
        passed_by,
        [str(candidate.location) for candidate in candidates if candidate.run != run and candidate.step > step],
    )


def _paths_in(folder: str) -> list[str]:
    """What may be a checkpoint in a folder. What lies beside one while it is replaced begins with a dot."""
    return [f"{folder.rstrip('/')}/{name}" for name in sorted(names_in(folder)) if not name.startswith(".")]


def _finish_replacements(folder: str) -> None:
    """Where a save was killed between the two renames of file systems that cannot exchange directories, do the second."""
    for hidden in names_in(folder):
        match = _REPLACED.fullmatch(hidden)
        name = f"{match.group(1)}{_SUFFIX}" if match else ""
        if match and beside(name, "old") == hidden and (recovered := locate(f"{folder}/{name}").recover()):
            rank_zero_warn(
                f"{folder}/{name}: a save was interrupted while it replaced this checkpoint; taking {recovered}, which is complete"
            )


def _read(location: Location, weights_only: bool | None) -> _Candidate | str:
    """A checkpoint, or why training cannot go on from what is there; empty if it is none."""
    looks_like_one = str(location).endswith(_SUFFIX)
    content: Any
    try:
        if location.is_sharded():
            content = location.read_file(META_FILE, weights_only)
        elif location.is_file() and looks_like_one:
            content = location.read_file(None, weights_only)
        else:
            return f"incomplete: no {META_FILE}" if looks_like_one else ""
    except Exception as error:  # a damaged pickle may raise anything
        return f"unreadable: {error}"
    if not isinstance(content, Mapping) or not {"global_step", "loops", "lr_schedulers"}.issubset(content):
        return "it has weights only"
    run, loop = content.get(RUN, {}), content["loops"].get("fit_loop", {})
    place = any(position is not None for position in content.get(DATA_POSITIONS, ()))
    return _Candidate(
        location,
        content["global_step"],
        run.get("id", ""),
        run.get("began", 0.0),
        (place, _total(loop, "epoch_progress", "completed"), _total(loop, "epoch_loop.batch_progress", "processed")),
    )


def _total(loop: Mapping[str, Any], progress: str, count: str) -> int:
    number: int = loop.get(progress, {}).get("total", {}).get(count, 0)
    return number


def _problem(location: Location, weights_only: bool | None) -> str:
    """What is wrong with the files of a checkpoint, as this rank sees them; empty if nothing."""
    return str(Directory.look_over(location, weights_only=weights_only)[1]) if location.is_sharded() else ""


def latest_checkpoint(
    trainer: Trainer,
    folder: str | os.PathLike[str] | None = None,
    *,
    run: str | None = None,
    weights_only: bool | None = None,
) -> str | None:
    """The checkpoint that a restart goes on from, for `trainer.fit(model, ckpt_path=latest_checkpoint(trainer))`. Collective.

    Of the complete checkpoints of a run it is that with the highest global step, whenever its files were written; of several with that
    step, one that has the place inside the epoch. Rank 0 decides for all ranks, and logs what it passed by and why. The processes are
    connected for that, and with Lightning's own launcher they are started.

    A run begins with a fit without a checkpoint, and all fits that went on from its checkpoints belong to it. If there are checkpoints of
    several runs, that which began last is meant.

    Args:
        trainer: With `MFSDPStrategy`.
        folder: Path or URL with the checkpoints. `None`: the `dirpath` of the Trainer's ModelCheckpoints, and its `default_root_dir`.
        run: Id of another run, as the log names it, or `torch.load(path + "/meta.pt")["training_run"]["id"]`.
        weights_only: As for `fit`, which is given the same.

    Returns:
        Its path; `None` if there is none: the run begins.

    Raises:
        ValueError: No folder is known, or ranks were given different ones.
        RuntimeError: On all ranks: rank 0 cannot list the folder, or finds no checkpoint of `run` in it.
        NotSharedError: Ranks do not see the same checkpoints; names ranks and hosts.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ProcessStrategy):
        raise TypeError(
            f"latest_checkpoint: expected a Trainer with MFSDPStrategy, whose checkpoints it compares, got {type(strategy).__name__}"
        )
    folders = _folders(trainer) if folder is None else [os.fspath(folder)]
    strategy.connect_processes()
    ranks = Ranks(sees_within=strategy.shared_folder_timeout)  # type: ignore[attr-defined]
    where = ", ".join(folders)
    same_on_all("the folder of latest_checkpoint", where, ranks)
    choice = ranks.first(f"looking for checkpoints in {where}", lambda: choose(folders, run, weights_only=weights_only))
    _check_seen(folders, choice, ranks, looks=strategy.local_rank == 0)
    _tell(where, choice)
    return choice.path


def _folders(trainer: Trainer) -> list[str]:
    savers = [
        saver for saver in trainer.checkpoint_callbacks if isinstance(saver, (ModelCheckpoint, OnExceptionCheckpoint))
    ]
    folders = [saver.dirpath for saver in savers if saver.dirpath]
    if len(folders) < len(savers):
        raise ValueError(
            "latest_checkpoint: a ModelCheckpoint of the Trainer has no dirpath, so each start saves into a folder of its own; give it "
            "one, or give latest_checkpoint the folder"
        )
    return list(dict.fromkeys(str(folder) for folder in [*folders, trainer.default_root_dir]))


def _check_seen(folders: Sequence[str], choice: Choice, ranks: Ranks, *, looks: bool) -> None:
    """No node has checkpoints that rank 0 does not see, and all ranks see the chosen one. Collective."""
    own = [path for folder in folders for path in _paths_in(folder) if path.endswith(_SUFFIX)] if looks else []
    more = ranks.decide((own, socket.gethostname()), _seen_elsewhere)
    if more is not None:
        where, path, first_host = more
        raise NotSharedError(
            f"{where} can see {path}, and rank 0 on {first_host} cannot, so nothing was read. "
            "Have all nodes mount the same storage at that path, or give latest_checkpoint the folder that all nodes share"
        )
    if choice.path is not None:
        folder, name = os.path.split(choice.path)
        see_on_all(folder, name, lambda: names_in(folder), ranks, what="nothing was read")


def _seen_elsewhere(views: list[tuple[list[str], str]]) -> tuple[str, str, str] | None:
    """Ranks that see what rank 0 does not, with hosts; the first path of that; and the host of rank 0."""
    hosts, of_first = [host for _, host in views], set(views[0][0])
    more = {rank: path for rank, (paths, _) in enumerate(views) for path in paths if path not in of_first}
    return (on_hosts(list(more), hosts), next(iter(more.values())), hosts[0]) if more else None


def _tell(where: str, choice: Choice) -> None:
    text = _summary(where, choice)
    if choice.later:
        rank_zero_warn(
            f"{text}. Other runs have more steps: give run=ID to go on from one of them, or another folder to each run"
        )
    elif choice.path is None and choice.passed_by:
        rank_zero_warn(f"{text}. So training begins; give latest_checkpoint another folder if that is not meant")
    else:
        rank_zero_info(text)


def _summary(where: str, choice: Choice) -> str:
    parts = [f"{path} ({reason})" for path, reason in choice.passed_by.items()]
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    passed_by = f"; passed by: {'; '.join(parts[:_SHOWN])}{more}" if parts else ""
    if choice.path is None:
        return f"no checkpoint to go on from in {where}{passed_by}"
    run = f" of run {choice.run}" if choice.run else ""
    return f"going on from {choice.path}, step {choice.step}{run}{passed_by}"
