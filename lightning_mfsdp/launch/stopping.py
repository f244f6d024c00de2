"""How SIGTERM on any rank stops a fit on all ranks after the same batch, and the one method of Lightning's replaced for it.

Lightning's handler of SIGTERM broadcasts from rank 0 in the middle of whatever runs, and its epoch loop broadcasts before every batch
and waits for the device. Only rank 0's signal has an effect, and the others wait forever. There is no hook for either. So while a fit
trains, the handler only sets a flag that `peers.py` passes on, and the epoch loop of this Trainer checks it before every batch. Both
are restored at the end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_mfsdp._lightning_api import SIGTERMException, Trainer
from lightning_mfsdp.launch.peers import Peers

__all__ = ["Stopping"]

METHOD = "_broadcast_sigterm_tensor"


class Stopping:
    """Between the start and the end of an entry point.

    Args:
        trainer: The Trainer of the entry point.
        peers: The other ranks; `None` for one alone.
        lost: Raises an error with what is known of failed ranks.

    Attributes:
        agreed: All ranks stop here, after the same batch.
    """

    def __init__(self, trainer: Trainer, peers: Peers | None, lost: Callable[[], None]) -> None:
        self.agreed = False
        self._trainer, self._peers, self._lost = trainer, peers, lost
        self._asked = self._trains = False
        self._handler: Any = None
        self._replaces_method = False

    def begin(self, *, trains: bool) -> None:
        """Lightning has installed its handler, and no batch was begun. `trains`: batches of training follow."""
        loop: Any = self._trainer.fit_loop.epoch_loop
        if not callable(getattr(type(loop), METHOD, None)):
            raise RuntimeError(
                f"this version of Lightning has no {type(loop).__name__}.{METHOD}, which lightning_mfsdp replaces so that SIGTERM on one "
                "rank stops all. Install lightning>=2.6,<2.7"
            )
        if trains and self._peers is not None and not self._replaces_method:
            setattr(loop, METHOD, self._before_batch)
            self._replaces_method = True
        if self._handler is None and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._trains = self._trains or trains

    def end(self) -> None:
        """Restore what was replaced. A signal that came after the last batch is passed to the next handler."""
        self._trains = False
        if self._replaces_method:
            delattr(self._trainer.fit_loop.epoch_loop, METHOD)
            self._replaces_method = False
        if self._handler is not None:
            own, self._handler = self._handler, None
            before: Any = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
            signal.signal(signal.SIGTERM, own)
            if self._asked and not self._trainer.interrupted:  # an exception ends the process anyway; it must be seen
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
                os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        before: Any = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if callable(before):
            before(number, frame)
        if not self._trains:  # there is nothing to save
            raise SIGTERMException
        self._asked = True
        if self._peers is not None:
            self._peers.ask_to_stop()
        else:
            self._trainer._signal_connector.received_sigterm = True

    def _before_batch(self) -> None:
        """In place of Lightning's broadcast."""
        assert self._peers is not None
        self._lost()
        if not self._peers.may_begin_batch():
            self.agreed = True
            raise SIGTERMException
