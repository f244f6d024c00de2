"""Where the host's time of a settled step of the Trainer goes: `python tests/figures/trainer_time.py [CHECKOUT ...] [--accelerator cuda]`.

The model and the concerns are those of trainer_calls.py, which counts. Here py-spy (pip install py-spy) looks at rank 0 from outside, 1,000
times a second, while it trains: nothing is slowed down by what a call costs to count, and what C takes is time of the line that called it.
Checkouts and strategies take turns. The machine should do nothing else; what differs by less than two rounds of one checkout is noise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.multiprocessing
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from tests.figures import trainer_calls
from tests.figures.subjects import Package

STEPS = 200  # that are looked at
RATE = 1000  # looks a second
_FRAME = re.compile(r"(.*) \((.*?)(?::(\d+))?\)$")


class Watched(Callback):
    """Has py-spy look at this process from one settled step to another.

    Args:
        folder: Gets `stacks`, and `seconds` of a step.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._spy: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == trainer_calls.SETTLED:
            options = [
                "--rate",
                str(RATE),
                "--format",
                "raw",
                "--full-filenames",
                "--nonblocking",
                "--duration",
                "3600",
            ]
            command = [
                "py-spy",
                "record",
                "--pid",
                str(os.getpid()),
                "--output",
                str(self._folder / "stacks"),
                *options,
            ]
            self._spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(1.0)  # it begins
            self._began = time.perf_counter()
        elif trainer.global_step == trainer_calls.SETTLED + STEPS and self._spy is not None:
            seconds = (time.perf_counter() - self._began) / STEPS
            (self._folder / "seconds").write_text(str(seconds))
            self._spy.send_signal(2)  # it writes what it has seen
            self._spy.wait()
            self._spy = None


def run(rank: int, name: str, checkout: Path, accelerator: str, port: int, folder: str) -> None:
    """One rank trains; rank 0 is looked at."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    steps = trainer_calls.SETTLED + STEPS + 1
    trainer = Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=trainer_calls.strategy(name, Package(checkout), accelerator),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watched(folder)] if rank == 0 else [],
    )
    torch.manual_seed(0)
    tokens = torch.randint(trainer_calls.TOKENS, (4 * steps, trainer_calls.LENGTH + 1))
    trainer.fit(trainer_calls.Model(), DataLoader(tokens, batch_size=2))  # type: ignore[arg-type]


def concern_of(stack: str, package: str) -> str:
    """On whose behalf something runs, as in trainer_calls.py; `stack` has frames from the outermost on."""
    for frame in reversed(stack.split(";")):
        found = _FRAME.match(frame)
        file = found[2] if found else ""
        if file.startswith(package):
            parts = Path(file.removeprefix(package)).with_suffix("").parts
            return "/".join(parts if parts[0] == "engine" else parts[:1])
        if "/torch/optim/" in file:
            return "torch.optim"
        if file == trainer_calls.__file__:
            return "model"
        if "/lightning/" in file:
            return "backward" if "run_backward" in stack else "lightning"
    return "backward"


def times(name: str, checkout: Path, accelerator: str, keep: Path | None) -> tuple[float, Counter[str]]:
    """Milliseconds of a step, in all and by concern; `keep` gets the stacks that were seen."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (name, checkout, accelerator, port, folder), 2)
        milliseconds = 1e3 * float(Path(folder, "seconds").read_text())
        if keep is not None:
            shutil.copy(Path(folder, "stacks"), keep)
        seen: Counter[str] = Counter()
        for line in Path(folder, "stacks").read_text().splitlines():
            stack, count = line.rsplit(" ", 1)
            if "on_train_batch_start" not in stack:
                seen[concern_of(stack, f"{checkout.resolve()}/lightning_mfsdp/")] += int(count)
    looks = max(sum(seen.values()), 1)
    return milliseconds, Counter({concern: round(1e3 * milliseconds * n / looks) for concern, n in seen.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkouts", type=Path, nargs="*", default=[trainer_calls.HERE], help="repositories' roots (this one)"
    )
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--strategies", nargs="+", default=["mfsdp"], help="as in trainer_calls.py; others than mfsdp once a round"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder that gets the stacks of each run, for flame graphs")
    given = parser.parse_args()
    subjects = [("mfsdp", checkout) for checkout in given.checkouts if "mfsdp" in given.strategies]
    subjects += [(name, trainer_calls.HERE) for name in given.strategies if name != "mfsdp"]
    columns: list[str] = []
    found: list[tuple[float, Counter[str]]] = []
    for number in range(given.rounds):
        for name, checkout in subjects[:: 1 if number % 2 == 0 else -1]:
            columns.append(f"{name} {checkout.name}")
            keep = given.keep / f"{len(columns)}-{name}-{checkout.name}" if given.keep else None
            found.append(times(name, checkout, given.accelerator, keep))
            print(f"{columns[-1]}: {found[-1][0]:.1f} ms a step", flush=True)
    concerns = sorted({one for _, seen in found for one in seen}, key=lambda one: -found[0][1][one])
    print(f"\n| us a step | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
    for concern in concerns:
        print(f"| {concern} | {' | '.join(f'{seen[concern]:,}' for _, seen in found)} |")


if __name__ == "__main__":
    main()
