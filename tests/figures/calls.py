"""Calls and files of a unit and of a step: `python tests/figures/calls.py [CHECKOUT]`.

A chain of four units of four parameters under a root (five units), over a fake process group of two ranks: every collective is called
and none moves a byte, in one process and one thread, so the numbers are the same in every run of one Python and one torch.
After warm-up steps, one step is watched by `sys.setprofile`:

- **Python calls**: events `call` whose code is in the engine's folder or the package's `base`; **C calls**: events `c_call` out of such
  code.
- **files**: which of these files the Python calls went to, all and without those of `base` (which older commits had in the engine's
  folder).
- **changes of file**: how often a Python call of the engine went to another file than the one before it.
- One unit is the third block. Its forward is the call of the block; its backward is what autograd runs between two borders, one behind
  the block's result and one before its input. What it does for its neighbors (gathers in advance, reductions that are due) counts; what
  they do for it does not.
- **all calls**: Python and C calls of the whole process, wherever they are from: host time as a number without noise.

The same is shown for torch's FSDP2 (its folder `_fully_shard`) and, for all calls, for plain PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend

from tests.figures.subjects import Chain, Package, Phase, Subject, Watched, batch, fsdp2, plain

BLOCKS, WARM_UP = 4, 6
HERE = Path(__file__).resolve().parents[2]
BASE = ("compat", "containers", "errors", "initialize", "materialize", "streams", "tree")


@dataclass
class Count:
    """What happened in one span."""

    python: int = 0
    c: int = 0
    everything: int = 0
    changes: int = 0
    files: list[str] = field(default_factory=list)
    last: str = ""


class Profile:
    """Counts calls while it is on."""

    def __init__(self, *folders: Path) -> None:
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._count = Count()

    def begin(self) -> None:
        self._count = Count()
        sys.setprofile(self._see)

    def end(self) -> Count:
        sys.setprofile(None)
        self._count.everything -= 1  # of setprofile itself
        return self._count

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_call"):
            return
        count, file = self._count, frame.f_code.co_filename
        count.everything += 1
        if not file.startswith(self._folders):
            return
        if event == "c_call":
            count.c += 1
            return
        count.python += 1
        if file not in count.files:
            count.files.append(file)
        count.changes += file != count.last
        count.last = file


def spans(subject: Subject, *folders: Path) -> dict[str, Count]:
    """Counts of one unit's forward and backward and of a whole step."""
    x, profile, found = batch(), Profile(*folders), dict[str, Count]()
    for _ in range(WARM_UP):
        subject.step(x)
    gc.collect()
    gc.disable()  # finalizers would count where they happen to run
    profile.begin()
    subject.step(x)
    found["step"] = profile.end()

    def begin(_: Phase) -> None:
        profile.begin()

    def end(phase: Phase) -> None:
        found[phase] = profile.end()

    model = subject.model
    assert isinstance(model, Chain)
    model.watched = Watched(BLOCKS // 2, begin, end)
    subject.step(x)
    model.watched = None
    gc.enable()
    return found


def measure(checkout: Path) -> dict[str, dict[str, Count]]:
    """By engine and span."""
    dist.init_process_group("fake", rank=0, world_size=2)
    package = Package(checkout)
    fsdp_folder = Path(torch.distributed.fsdp.__file__).parent / "_fully_shard"
    ours = checkout.resolve() / "lightning_mfsdp"
    engines: dict[str, tuple[Callable[[int], Subject], tuple[Path, ...]]] = {
        "mfsdp": (package.subject, (ours / "engine", ours / "base")),
        "fsdp2": (fsdp2, (fsdp_folder,)),
        "plain": (plain, (Path("/nowhere"),)),
    }
    found = {name: spans(build(BLOCKS), *folders) for name, (build, folders) in engines.items()}
    dist.destroy_process_group()
    return found


def table(found: dict[str, dict[str, Count]]) -> str:
    """Markdown."""
    lines = [
        "| engine | span | Python calls | C calls | files | without base | changes of file | all calls |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    words = {"forward": "one unit, forward", "backward": "one unit, backward", "step": f"a step of {BLOCKS + 1} units"}
    for engine, counts in found.items():
        for span, label in words.items():
            one = counts[span]
            files = [Path(file).stem for file in one.files]
            core = [name for name in files if name not in BASE]
            cells = (one.python, one.c, len(files), len(core), one.changes, one.everything)
            lines.append(f"| {engine} | {label} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=HERE, help="the repository's root (this one)")
    parser.add_argument("--json", action="store_true", help="all that was counted, with names of files in their order")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.checkout)
    if arguments.json:
        plain_data = {engine: {span: asdict(one) for span, one in counts.items()} for engine, counts in found.items()}
        print(json.dumps(plain_data))
        return
    print(table(found))
    print(f"\nPython {platform.python_version()}, torch {torch.__version__}")
    for span in ("forward", "backward"):
        names = [Path(file).stem for file in found["mfsdp"][span].files]
        print(f"Files of one unit, {span}: {', '.join(names)}")


if __name__ == "__main__":
    main()
