"""Takes mends out of a copy of the engine, one at a time, and has the fuzzer find each of the defects again.

    python tests/mends.py                    all of them
    python tests/mends.py 1 11d --minutes 5  some

Prints after how many seconds and with what each was found. What the fuzzer does not draw has tests of its own: layers that are added to a
sharded model, averages of models sharded differently, policies against precisions, buffers, what only CUDA shows, ranks that run different
sharded units, graphs, two optimizers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "tests")]


@dataclass(frozen=True)
class Mend:
    """What is taken out: `old`, which is once in the file, becomes `new`.

    Attributes:
        item: Which defect comes back.
        file: Of the engine.
    """

    item: str
    file: str
    old: str
    new: str


MENDS = (
    Mend("1", "core/unit.py", "        self.enter(shows=False)\n", "        self.enter()\n"),
    Mend(
        "1 in forward",
        "core/weights.py",
        "                if takes_over and self._spec.codec is None:\n",
        "                if False:\n",
    ),
    Mend(
        "2",
        "core/gradients.py",
        "        if reached is Sync.ALL:\n            return reached\n",
        "        return reached\n",
    ),
    Mend(
        "4",
        "core/reduction_schedule.py",
        "                if not (waits or zeros_unused):\n",
        "                if False:\n",
    ),
    Mend(
        "5",
        "core/unit.py",
        "that have gradients and accept writes.\n            self.unregister()\n",
        "that have gradients and accept writes.\n",
    ),
    Mend("8", "core/gradients.py", " and compat.accumulates(full):\n", " and False:\n"),
    Mend(
        "11b",
        "core/gradients.py",
        "            if is_reduced and index not in undecided:",
        "            if local.numel() and is_reduced and index not in undecided:",
    ),
    Mend("11b frozen", "core/reduction_schedule.py", " or group.gradients.held", ""),
    Mend("11c", "core/calls.py", "        self.hidden += 1\n", "        pass\n"),
    Mend("11d", "core/calls.py", "            self.expected += 1\n", "            pass\n"),
    Mend(
        "11e",
        "core/versions.py",
        "    def outdate(self, indices: Sequence[int]) -> None:\n",
        "    def outdate(self, indices: Sequence[int]) -> None:\n        return\n",
    ),
    # Issue "side doors": reads of resharded weights, layers called before the root, backwards that nobody noticed.
    Mend(
        "A1 versions",
        "core/versions.py",
        "        self._as_set = [self.resharded] * self._count\n",
        "        self._as_set = list(map(compat.version_of, self._parameters))\n        return\n",
    ),
    Mend(
        "A1 empty",
        "core/weights.py",
        "            for entry, nothing in zip(",
        "            for entry, nothing in () and zip(",
    ),
    Mend("A3", "core/context.py", "            if group.gradients.has_news:\n", "            if False:\n"),
    Mend("12", "core/functions.py", "            if any(inside):\n", "            if all(inside):\n"),
)


def path_of(mend: Mend, root: Path = ROOT) -> Path:
    return root / "lightning_mfsdp" / "engine" / mend.file


def without(mend: Mend, root: Path = ROOT) -> str:
    """The file's text as it was before the mend.

    Raises:
        ValueError: What is to be taken out is not there exactly once.
    """
    text = path_of(mend, root).read_text()
    if text.count(mend.old) != 1:
        raise ValueError(f"item {mend.item}: {mend.file} has {text.count(mend.old)} times {mend.old!r}, expected once")
    return text.replace(mend.old, mend.new)


def search(mend: Mend, minutes: float, seed: int) -> tuple[float, str]:
    """Seconds until the fuzzer found something, and what; infinity if it did not."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("lightning_mfsdp", "tests"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        path_of(mend, root).write_text(without(mend))
        command = [sys.executable, str(root / "tests/fuzz.py"), "--minutes", str(minutes), "--seed", str(seed)]
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = re.match(r"(differs|raised|hung|did not raise)[^{]*", line)
                if found:
                    process.kill()
                    return time.monotonic() - began, found.group(0).strip(" :")
        return float("inf"), "not found"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", help="of MENDS (all)")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    missed = 0
    print("| item | seconds | found as |\n|---|--:|---|", flush=True)
    for mend in MENDS:
        if given.items and mend.item not in given.items:
            continue
        seconds, what = search(mend, given.minutes, given.seed)
        missed += seconds == float("inf")
        print(f"| {mend.item} | {seconds:.0f} | {what} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
