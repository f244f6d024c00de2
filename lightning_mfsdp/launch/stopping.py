"""Lets a signal on any rank stop a fit on all ranks after the same batch; replaces one method of Lightning's epoch loop for that.

The signals are SIGTERM and, in a SLURM job, the one that asks for a requeue (SIGUSR1, unless SLURMEnvironment was given another).

Lightning's handler of SIGTERM broadcasts from rank 0 in the middle of whatever runs, and its epoch loop broadcasts before every batch
and waits for the device. Only rank 0's signal has an effect, and the others wait forever. Its handler of the requeue signal saves a
checkpoint in the middle of whatever runs. There is no hook for any of them. So the handlers here only set a flag that `peers.py` passes
on, and while a fit trains, the epoch loop of this Trainer checks it before every batch. A rank alone has no others to agree with: there
Lightning's own flag is set, between batches. All is restored at the end.

However long the batch and the save take, nothing here ends them; a second SIGTERM does (second_sigterm.py).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_mfsdp._lightning_api import SIGTERMException, Trainer, TrainerFn
from lightning_mfsdp.launch import slurm
from lightning_mfsdp.launch.peers import Peers
from lightning_mfsdp.launch.second_sigterm import SecondSigterm

__all__ = ["Stopping"]

_log = logging.getLogger(__name__)

METHOD = "_broadcast_sigterm_tensor"


class Stopping:
    """Between the start and the end of an entry point.

    Args:
        trainer: The Trainer of the entry point.
        peers: The other ranks; `None` for one alone.
        raise_failure: Raises an error with what is known of failed ranks.
        requeue_signal: The signal that asks for a requeue, if one does.

    Attributes:
        agreed: All ranks stop here, after the same batch.
        requeue_signal: As given.
    """

    def __init__(
        self,
        trainer: Trainer,
        peers: Peers | None,
        raise_failure: Callable[[], None],
        requeue_signal: int | None = None,
    ) -> None:
        self.agreed = False
        self.requeue_signal = requeue_signal
        self._trainer, self._peers, self._raise_failure = trainer, peers, raise_failure
        self._asked = self._asked_to_end = self._asked_to_requeue = False
        self._trains = self._evaluates = self._has_ended = False
        self._handled: list[int] = []
        self._process = os.getpid()
        self._replaces_method = False
        self._second: SecondSigterm | None = None

    @property
    def requeues(self) -> bool:
        """Whether the job is to be requeued; known to this rank before the others, unless all have agreed."""
        return self._asked_to_requeue or (self._peers is not None and self._peers.requeue)

    def requeue_was_tried(self) -> None:
        """The job was put back into the queue, or could not be; a later signal may ask for it again."""
        self._asked_to_requeue = False
        if self._peers is not None:
            self._peers.requeue = False

    def begin(self, *, trains: bool) -> None:
        """Lightning has installed its handlers, and no batch was begun. `trains`: batches of training follow."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        if not callable(getattr(type(loop), METHOD, None)):
            raise RuntimeError(
                f"this version of Lightning has no {type(loop).__name__}.{METHOD}, which lightning_mfsdp replaces so that SIGTERM on one "
                "rank stops all. Install lightning>=2.6,<2.7"
            )
        if trains and self._peers is not None and not self._replaces_method:
            setattr(loop, METHOD, self._before_batch)
            self._replaces_method = True
        if not self._handled and threading.current_thread() is threading.main_thread():
            for number in self._signals():
                signal.signal(number, self._on_signal)
                self._handled.append(number)
            if not slurm.is_job():
                self._second = SecondSigterm(self._on_signal, tells=self._trainer.is_global_zero)
        self._trains = self._trains or trains
        self._show_lightning()

    def evaluates(self, evaluates: bool) -> None:
        """An evaluation begins or ends. Inside a fit it is completed before training stops."""
        self._evaluates = evaluates
        self._show_lightning()

    def end(self) -> None:
        """Restore what was replaced. SIGTERM that came after the last batch is passed to the next handler."""
        stopped = (self.agreed or self._asked) and self._trainer.interrupted
        self._trains, self._has_ended = False, True
        if self._replaces_method:
            delattr(self._trainer.fit_loop.epoch_loop, METHOD)
            self._replaces_method = False
        if (
            stopped
        ):  # this process ends, and SIGTERM that belongs to the first must not kill it; Lightning restores the handlers
            if self._second is not None:  # the program may catch the exception and go on
                self._second.release()
                self._second = None
            return
        if self._second is not None:
            self._second.close()
            self._second = None
        for number in self._handled:
            signal.signal(number, self._before(number) or signal.SIG_DFL)
        if self._trainer.interrupted:  # an exception ends the process anyway; it must be seen
            return
        if self.requeues and self._trainer.is_global_zero:
            name = signal.Signals(self.requeue_signal or 0).name
            _log.warning(
                f"{name} came when there was nothing left to train, so the job is not requeued; submit it again if the program does more"
            )
        if self._asked_to_end:
            os.kill(os.getpid(), signal.SIGTERM)

    def _signals(self) -> set[int]:
        """SIGTERM, and the one that asks for a requeue if Lightning has taken it: it leaves a signal to a handler of the program."""
        signals: set[int] = {signal.SIGTERM}
        if self.requeue_signal is not None and self._before(self.requeue_signal) in (None, signal.SIG_DFL):
            signals.add(self.requeue_signal)
        return signals

    def _before(self, number: int) -> Any:
        """The handler that was installed before Lightning's own, `None` if Lightning does not know of one."""
        handlers: dict[int, Any] = self._trainer._signal_connector._original_handlers
        return handlers.get(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork has this handler, too
            _in_fork(number)
            return
        if number == signal.SIGTERM and self._second is not None:
            self._second.note_first()
        before = self._before(number)
        if callable(before):
            before(number, frame)
        if self._has_ended:
            return
        requeue = number == self.requeue_signal
        if not self._trains and not (requeue and self._trainer.state.fn == TrainerFn.FITTING):
            if requeue and self._trainer.is_global_zero:
                slurm.requeue()
            raise SIGTERMException  # there is nothing to save
        self._asked = True
        self._asked_to_requeue = self._asked_to_requeue or requeue
        self._asked_to_end = self._asked_to_end or not requeue
        if self._peers is not None:
            self._peers.ask_to_stop(requeue=requeue)
        else:
            self._show_lightning()

    def _show_lightning(self) -> None:
        """Set the flag by which Lightning's loops end, where no other rank has to agree: not in a validation or before the first batch."""
        if self._peers is None:
            stops = self._asked and self._trains and not self._evaluates
            self._trainer._signal_connector.received_sigterm = stops

    def _before_batch(self) -> None:
        """What the epoch loop calls before every batch, in place of Lightning's broadcast.

        Raises:
            SIGTERMException: All ranks stop here, which ends the fit as Lightning's own does.
        """
        assert self._peers is not None
        self._raise_failure()
        if not self._peers.may_begin_batch():
            self.agreed = True
            raise SIGTERMException


def _in_fork(number: int) -> None:
    """What a process does that was forked with a handler of its parent, such as a loader's worker: SLURM signals all of a job's processes.

    It ends by SIGTERM as any other, and lives on where a requeue is asked for: its parent trains until all ranks stop.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
