"""Processes that execute descriptions for as long as a run lasts: a group for each number of ranks, started again when it fails."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.fuzzing.description import Description, from_json, to_json
from tests.fuzzing.joining import join, make_mesh
from tests.helpers.lasting_ranks import forking

TIMEOUT_S = 20.0
START_S = 120.0
GRACE_S = 3.0  # for the other ranks, once one has failed


@dataclass
class Outcome:
    """What the ranks of one execution came back with.

    Attributes:
        events: By rank; `None` for one that did not finish.
        errors: By rank, the traceback of what it raised, or where it hung.
        messages: By rank, type and text of what it raised.
        left: By rank, bytes of tensors that outlived the model.
        hung: None raised and some did not finish.
        raised: Ranks that raised and are alive.
    """

    events: list[Any] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    messages: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    hung: bool = False
    raised: set[int] = field(default_factory=set)


class Workers:
    """Groups of 1 to 4 ranks. Use it in a `with` block."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._groups: dict[tuple[str, int], _Group] = {}
        self.restarts = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        for group in self._groups.values():
            group.stop()
        self._groups.clear()

    def begin(self, case: Description) -> None:
        """Have the ranks of a case start with it."""
        key = device, ranks = case.configuration.device, case.configuration.ranks
        if key not in self._groups:
            self._groups[key] = _Group(device, ranks)
            self._groups[key].wait_until_ready()
        self._groups[key].send(to_json(case))

    def finish(self, case: Description, timeout_s: float | None = None) -> Outcome:
        """Wait for what the ranks come back with; a group that failed is gone afterwards."""
        key = case.configuration.device, case.configuration.ranks
        group = self._groups[key]
        outcome = group.receive(timeout_s or self._timeout_s)
        if outcome.errors and not (len(outcome.raised) == case.configuration.ranks and group.is_in_step()):
            self._groups.pop(key).stop()
            self.restarts += 1
        return outcome


class _Group:
    """Connected processes that wait for programs."""

    def __init__(self, device: str, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = forking() if device == "cpu" else mp.get_context("spawn")  # a driver does not survive a fork
        self._processes, self._pipes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, device, self._folder.name, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def wait_until_ready(self) -> None:
        """Start-up does not count as hanging."""
        for pipe in self._pipes:
            if not pipe.poll(START_S):
                raise TimeoutError(f"a worker did not start within {START_S} s")
            pipe.recv_bytes()

    def send(self, text: str) -> None:
        for pipe in self._pipes:
            pipe.send(text)

    def receive(self, timeout_s: float) -> Outcome:
        ranks = len(self._pipes)
        outcome = Outcome(events=[None] * ranks, left=[0] * ranks)
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting.values()), left):
                rank = self._pipes.index(pipe)
                waiting.pop(rank)
                try:
                    answer = torch.load(io.BytesIO(pipe.recv_bytes()), map_location="cpu", weights_only=False)
                except EOFError:
                    answer = {"message": "died", "error": f"exit code {self._processes[rank].exitcode}"}
                if answer.get("alive"):
                    outcome.raised.add(rank)
                if "error" in answer:
                    outcome.errors[rank], outcome.messages[rank] = answer["error"], answer["message"]
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    outcome.events[rank], outcome.left[rank] = answer["events"], answer["left"]
        outcome.hung = bool(waiting) and not outcome.errors
        for rank in waiting:
            outcome.errors[rank] = self._stack(rank)
            outcome.messages[rank] = "hung" if outcome.hung else "waited for a rank that failed"
        return outcome

    def is_in_step(self) -> bool:
        """Whether the ranks' collectives still meet, after all of them have raised."""
        self.send("")
        return not self.receive(GRACE_S).errors

    def _stack(self, rank: int) -> str:
        process = self._processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        path = Path(self._folder.name, f"stack-{rank}")
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, ranks: int, device: str, folder: str, pipe: Any) -> None:
    """A worker: programs come in, events go out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stack = open(Path(folder, f"stack-{rank}"), "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack)
    _silence()
    join(rank, ranks, device, folder)
    # All there are, before anything is compared with what was there.
    meshes = {outer: make_mesh(outer, ranks, device) for outer in range(ranks + 1) if not outer or not ranks % outer}
    gc.collect()
    gc.freeze()
    pipe.send_bytes(b"ready")
    while True:
        try:
            text = pipe.recv()
        except EOFError:
            os._exit(0)
        answer = _answer(from_json(text), rank, meshes) if text else _meet(ranks, device)
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        pipe.send_bytes(buffer.getvalue())


def _silence() -> None:
    import logging

    for name in ("lightning.pytorch", "lightning.fabric", "lightning_mfsdp", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _answer(case: Description, rank: int, meshes: dict[int, Any]) -> dict[str, Any]:
    from tests.fuzzing.running import run_loop
    from tests.fuzzing.sharded import EngineRun
    from tests.fuzzing.trainer import run_trainer

    before = _tensors()
    try:
        mesh = meshes[case.configuration.outer]
        raw = case.program.loop == "raw"
        events = run_loop(EngineRun(case, rank, mesh)) if raw else run_trainer(case, rank, mesh)
    except Exception as error:
        return {"message": f"{type(error).__name__}: {error}", "error": traceback.format_exc(), "alive": True}
    kept = {id(value) for event in events for _, value in event.values.values()}
    left = 0
    for pause in (0.0, 0.02, 0.1, 0.5):  # threads of gloo still hold for a moment what they have sent
        time.sleep(pause)
        gc.collect()
        left = sum(size for key, size in _tensors().items() if key not in before and key not in kept)
        if not left:
            break
    return {"events": events, "left": left}


def _meet(ranks: int, device: str) -> dict[str, Any]:
    gc.collect()
    if not dist.is_initialized():  # a strategy ends it where a fit raises
        return {"message": "", "error": "apart"}
    number = torch.full((7,), 3.0, device=device)
    dist.all_reduce(number)
    return {"events": None, "left": 0} if bool((number == 3 * ranks).all()) else {"message": "", "error": "apart"}


def _tensors() -> dict[int, int]:
    """Bytes by identity of all tensors that Python knows of."""
    return {
        id(found): found.untyped_storage().nbytes()
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor)
        and type(found) in _PLAIN
        # A jvp that raised leaves tensors without storage in its traceback.
        and not torch._C._functorch.is_functorch_wrapped_tensor(found)
    }


_PLAIN = (torch.Tensor, torch.nn.Parameter)
