"""Jobs of SLURM as Lightning sees them: ranks with SLURM's variables, and a `scontrol` that does what SLURM's does to a running job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from tests.lightning.models import Classifier, dataset, full_state, make_trainer
from tests.stops.faults import End, note, run_faulty

BATCHES, EPOCHS = 6, 2

# It notes its arguments and, like SLURM, ends the job with SIGTERM. A file "refuses" makes it fail.
SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/scontrol
if [ -e {folder}/refuses ]; then echo "Requested operation is presently disabled" >&2; exit 1; fi
kill -TERM $(cat {folder}/pid-*) 2> /dev/null
exit 0
"""


@dataclass(frozen=True)
class Moment:
    """When a signal comes.

    Attributes:
        hook: Of a callback, in which it is sent.
        batch: Number of the call of this hook at which it is sent, from 0.
        after_s: Seconds from there, for a moment that no hook has.
        number: The signal.
        times: How many, one after the other.
        ranks: On which; `None`: all.
        agree: The ranks agree before any of them goes on, so that they stop after the batch that runs.
        workers: To the processes that each rank has started, instead of itself.
    """

    hook: str
    batch: int = 0
    after_s: float = 0.0
    number: int = signal.SIGUSR1
    times: int = 1
    ranks: tuple[int, ...] | None = None
    agree: bool = False
    workers: bool = False


@dataclass
class Job:
    """What all starts of a job have in common.

    Attributes:
        folder: Its default_root_dir, its checkpoints and its notes.
        world: Ranks.
        trainer: Options of the Trainer.
        strategy: Options of the strategy.
        savers: Makes callbacks, given the folder.
        environment: Options of SLURMEnvironment; `None`: no SLURM.
        variables: More variables.
        workers: Of the training loader.
        ckpt_path: That of `fit`.
        evaluates: `validate` instead of `fit`.
    """

    folder: Path
    world: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    savers: Callable[[Path], list[Callback]] | None = None
    environment: dict[str, Any] | None = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    workers: int = 0
    ckpt_path: str | None = None
    evaluates: bool = False

    def start(self, *moments: Moment) -> list[End]:
        """Start it, or start it again, until it ends or is requeued."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "end.pt").unlink(missing_ok=True)
        for pid in self.folder.glob("pid-*"):
            pid.unlink()
        return run_faulty(_main, self.world, self, moments)

    def weights(self) -> dict[str, Tensor] | None:
        """At the end of the training; `None` if it did not get there."""
        path = self.folder / "end.pt"
        return torch.load(path) if path.exists() else None

    @property
    def requeues(self) -> list[str]:
        """Arguments of all calls of scontrol."""
        path = self.folder / "scontrol"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def saved(self) -> list[str]:
        """Checkpoints, those that were not completed included."""
        return sorted(path.name for path in self.folder.iterdir() if "ckpt" in path.name)


class Noisy(Classifier):
    """Dropout, which differs between ranks and batches, and a schedule by step."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([self.dropout(batch[0]), batch[1]])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Signals(Callback):
    """Sends a signal to its own process."""

    def __init__(self, moment: Moment, rank: int) -> None:
        self.moment, self.left = moment, moment.batch
        if moment.ranks is None or rank in moment.ranks:
            setattr(self, moment.hook, self._hook)

    def _hook(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left != -1:
            return
        if self.moment.after_s:
            timer = threading.Timer(self.moment.after_s, self._send)
            timer.daemon = True
            timer.start()
            return
        self._send()
        peers = trainer.strategy._peers
        if self.moment.agree and peers is not None:
            with peers._changed:
                peers._changed.wait_for(lambda: peers._stop_after is not None)

    def _send(self) -> None:
        processes = [os.getpid()]
        if self.moment.workers:
            processes = [child.pid for child in multiprocessing.active_children() if child.pid]
            assert processes
        for _ in range(self.moment.times):
            for process in processes:
                os.kill(process, self.moment.number)


def noted(ends: list[End], what: str) -> list[list[Any]]:
    """Of each rank, what it noted under a word."""
    return [[values for word, *values in end.notes if word == what] for end in ends]


class Reads(Callback):
    """Notes the samples of each batch that was completed, and at which step a batch was validated or the run saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        note(self.folder, trainer.global_rank, ["batch", batch[0][:, 0].tolist()])

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        note(self.folder, trainer.global_rank, ["validation", trainer.global_step])

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        note(self.folder, trainer.global_rank, ["saved", trainer.global_step])


def _main(rank: int, world: int, notes: Path, job: Job, moments: tuple[Moment, ...]) -> None:
    folder = job.folder
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    plugins = []
    if job.environment is not None:
        commands = folder / "bin"
        if rank == 0:
            commands.mkdir(exist_ok=True)
            (commands / "scontrol").write_text(SCONTROL.format(folder=folder))
            (commands / "scontrol").chmod(stat.S_IRWXU)
        of_slurm = {"JOB_ID": 4711, "JOB_NAME": "train", "NODELIST": "localhost", "NNODES": 1, "NTASKS": world}
        of_slurm |= {"NTASKS_PER_NODE": world, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in of_slurm.items()})
        os.environ.update(PATH=f"{commands}:{os.environ['PATH']}", **job.variables)
        plugins = [SLURMEnvironment(**job.environment)]
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "use_distributed_sampler": True, **job.trainer}
    savers = job.savers(folder) if job.savers else []
    trainer = make_trainer(
        folder,
        world,
        strategy=MFSDPStrategy(**job.strategy),
        plugins=plugins,
        enable_checkpointing=bool(savers),
        callbacks=[Reads(notes), *savers, *(Signals(moment, rank) for moment in moments)],
        **settings,
    )
    torch.manual_seed(11)
    model = Noisy()
    torch.manual_seed(100 + rank)
    forked: dict[str, Any] = {"num_workers": job.workers, "multiprocessing_context": "fork"} if job.workers else {}
    data = DataLoader(dataset(BATCHES * 4 * world), batch_size=4, shuffle=True, **forked)
    held_out = DataLoader(dataset(3 * 4 * world), batch_size=4)
    if job.evaluates:
        trainer.validate(model, held_out)
        return
    try:
        trainer.fit(model, data, held_out, ckpt_path=job.ckpt_path)
    except SIGTERMException as stop:
        note(notes, rank, ["exit code", stop.code])
        raise
    weights = full_state(model)
    if rank == 0:
        torch.save(weights, folder / "end.pt")
    note(notes, rank, ["end", trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]])
