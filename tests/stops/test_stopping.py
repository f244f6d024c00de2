"""What is replaced for SIGTERM, and only while a fit trains."""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_mfsdp.launch.stopping import METHOD, Stopping
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, loader, make_trainer, seeded, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def test_lightnings_epoch_loop_has_the_method_that_is_replaced() -> None:
    method = getattr(_TrainingEpochLoop, METHOD, None)
    assert callable(method), (
        f"Lightning renamed _TrainingEpochLoop.{METHOD}: find what broadcasts SIGTERM before each batch"
    )
    assert list(inspect.signature(method).parameters) == ["self"]
    assert f"self.{METHOD}()" in inspect.getsource(_TrainingEpochLoop.advance), "and it is called before each batch"
    assert "broadcast" in inspect.getsource(method)


def test_a_lightning_without_the_method_is_refused() -> None:
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=object()))
    with pytest.raises(RuntimeError, match=rf"has no object.{METHOD}, which lightning_mfsdp replaces"):
        Stopping(trainer, None, lambda: None).begin(trains=True)


class Looks(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def look(self, trainer: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        self.seen.append((METHOD in vars(trainer.fit_loop.epoch_loop), "Stopping" in repr(handler)))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look(trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look(trainer)


class Forks(Callback):
    """A process of the program that it terminates."""

    status = 0

    def on_train_batch_end(self, *_: Any) -> None:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # it must not outlive a failed test
            os.write(tell, b".")  # Python forgets signals that come while it forks
            try:
                while True:
                    pass
            finally:
                os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        self.status = os.waitpid(child, 0)[1]
        os.close(ready)
        os.close(tell)


def forking(rank: int, world: int) -> tuple[int, int]:
    strict_warnings()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
    forks = Forks()
    trainer = make_trainer("", world, callbacks=[forks], max_steps=2)
    trainer.fit(seeded(), loader(4, 16))
    return os.WTERMSIG(forks.status), trainer.global_step


def test_a_forked_process_ends_by_sigterm_and_stops_no_rank() -> None:
    assert run_distributed(forking, 2) == [(signal.SIGTERM, 2)] * 2


def entry_points(rank: int, world: int) -> list[Any]:
    strict_warnings()
    before, found = signal.getsignal(signal.SIGTERM), []
    for name in ("fit", "validate"):
        looks = Looks()
        trainer = make_trainer("", world, callbacks=[looks], max_steps=1)
        getattr(trainer, name)(seeded(), loader(4, 8))
        looks.look(trainer)
        found.append((looks.seen, signal.getsignal(signal.SIGTERM) is before))
    return found


def test_what_is_replaced_is_put_back() -> None:
    for fitted, validated in run_distributed(entry_points, 2):
        assert fitted == ([(True, True), (False, False)], True)
        assert validated == ([(False, True), (False, True), (False, False)], True)
