"""Makes faults in copies of the engine, one at a time, and says which of them the tests of a push find.

    python tests/mutation.py --faults 60 --seed 1 --list                  what would be changed
    python tests/mutation.py --make-map map.json --jobs 8                 which test files execute which lines, once
    python tests/mutation.py --faults 60 --seed 1 --map map.json --jobs 8

Kinds of faults: a call is dropped or doubled, neighbors or arguments change places, a divisor or factor, a dtype, a comparison, a
boundary, a transition. They are drawn by a seed from all places of all files of the engine; see `tests/mutating/faults.py`.

A fault is caught by the first test that fails, if its file fails once more; by a test file that takes more than four times its time (at
least a minute); or because the tests cannot be imported. With a map only those files run that execute the statement, and tests that fail
without any fault are left out. The report is a file to which later calls add: those with the same report and seed go on where the last
ended, so `--deadline` may cut a run into pieces. When tests or the engine have changed, begin another report. It needs Linux, and uses
no GPU.
"""

# ruff: noqa: E402 - the path is mended first

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "tests")]

from tests.mutating import maps
from tests.mutating.faults import KINDS, Fault, draw
from tests.mutating.runs import STOP, copy_tree, is_over, run_files

ENGINE = "lightning_mfsdp/engine"
LEAST_LIMIT_S, TIMES, UNKNOWN_S = 60.0, 4, 20.0
FIRST_BATCH_S = 15.0  # files that share one pytest process, by their seconds; each batch is twice the one before
# Files of long runs come last, however much they execute.
LATE = ("tests/test_fuzz.py", "tests/clients/", "tests/examples/", "tests/stops/")


def sources(root: Path = ROOT) -> dict[str, bytes]:
    """Every file of the engine."""
    engine = root / ENGINE
    return {path.relative_to(engine).as_posix(): path.read_bytes() for path in sorted(engine.rglob("*.py"))}


def short_suite(root: Path = ROOT) -> list[str]:
    """The test files of a push, without those that need GPUs."""
    files = [path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob("test_*.py"))]
    return [file for file in files if not file.startswith("tests/gpu/") and not file.endswith("_gpu.py")]


@dataclass
class Check:
    """One call of the script.

    Attributes:
        tests: Test files that may run.
        seconds: How long each takes.
        known: What each executes.
        deadline: When to stop, by `time.monotonic`.
        limit_s: The least that a test file may take, whatever its time.
        report: Where verdicts are kept.
        deselected: Tests that fail without a fault.
    """

    tests: list[str]
    seconds: dict[str, float]
    known: maps.Map
    deadline: float
    limit_s: float
    report: Path
    deselected: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def limit_of(self, file: str) -> float:
        return max(self.limit_s, TIMES * self.seconds.get(file, UNKNOWN_S))

    def files_for(self, fault: Fault, source: bytes) -> list[str]:
        """Test files that execute the fault: first those that speak of what it changes, the engine's, and short ones."""
        folder, _, module = fault.file.removesuffix(".py").rpartition("/")
        names = {name for name in fault.function.split(".") if len(name) > 6}
        words = {f"test_{module.rstrip('s')}", f"{folder}.{module}".replace("/", "."), *names}

        def cost(test: str) -> tuple[bool, float]:
            text = test + (ROOT / test).read_text()
            weight = (1.0 if test.startswith("tests/engine/") else 5.0) / (1 + 4 * sum(word in text for word in words))
            return test.startswith(LATE), weight * (self.seconds.get(test, UNKNOWN_S) + 2)

        found = [
            test
            for test in self.tests
            if self.known.executes(test, fault.file, fault.statement, fault.function, source)
        ]
        return sorted(found, key=cost)

    def batch_of(self, files: Sequence[str], room_s: float) -> list[str]:
        """The first of the files, as many as take so long."""
        total, count = 0.0, 0
        while count < len(files) and total < room_s:
            total += self.seconds.get(files[count], UNKNOWN_S)
            count += 1
        return list(files[:count])

    def entries(self) -> dict[str, dict[str, Any]]:
        """What is in the report."""
        if not self.report.exists():
            return {}
        found: dict[str, dict[str, Any]] = json.loads(self.report.read_text())
        return found

    def note(self, key: str, entry: dict[str, Any]) -> None:
        """Put one fault's entry into the report."""
        with self.lock:
            text = json.dumps({**self.entries(), key: entry}, indent=1) + "\n"
            self.report.with_suffix(".new").write_text(text)
            self.report.with_suffix(".new").replace(self.report)

    def decide(self, folder: Path, key: str, fault: Fault) -> dict[str, Any]:
        """Run tests with a fault until one fails, in a folder that has a copy of the repository."""
        entry = {**described(fault), "verdict": "undecided", "seconds": 0.0, "passed": [], "unreliable": []}
        before = self.entries().get(key)
        if before is not None and all(before.get(name) == value for name, value in described(fault).items()):
            entry = before
        if entry["verdict"].startswith("caught") or is_over(self.deadline):
            return entry
        path = folder / "tree" / ENGINE / fault.file
        source = path.read_bytes()
        files = self.files_for(fault, source)
        if entry["verdict"] == "survived" and set(files) <= set(entry["passed"]):
            return entry
        entry["verdict"] = "undecided"
        path.write_bytes(fault.applied(source))
        began = time.monotonic()
        try:
            self._run(folder, entry, files)
        finally:
            path.write_bytes(source)
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - began, 1)
        self.note(key, entry)
        return entry

    def _run(self, folder: Path, entry: dict[str, Any], files: list[str]) -> None:
        entry["files"] = len(files)
        left = [file for file in files if file not in entry["passed"]]
        room_s = FIRST_BATCH_S
        while left:
            batch, room_s = self.batch_of(left, room_s), 2 * room_s
            outcome = run_files(
                folder / "tree",
                batch,
                scratch=folder / "t",
                limit_of=self.limit_of,
                deadline=self.deadline,
                deselected=self.deselected,
            )
            done = len(batch)
            if outcome.kind in ("stopped", "failed"):
                done = batch.index(outcome.at) if outcome.at in batch else 0
            entry["passed"] += batch[:done]
            if outcome.kind == "passed":
                left = left[done:]
                continue
            if outcome.kind == "stopped":
                return
            entry["test"] = outcome.test
            if outcome.kind == "failed":
                failed = batch[done]
                again = run_files(
                    folder / "tree",
                    [failed],
                    scratch=folder / "t",
                    limit_of=self.limit_of,
                    deadline=self.deadline,
                    deselected=self.deselected,
                )
                if again.kind == "stopped":
                    entry["test"] = ""
                    return
                if again.kind == "passed":
                    entry["unreliable"].append(outcome.test)
                    entry["passed"].append(failed)
                    left = left[done + 1 :]
                    continue
            else:
                entry["passed"] = [file for file in entry["passed"] if file not in batch]
            entry["verdict"] = {"failed": "caught", "hung": "caught: hung", "import": "caught: import"}[outcome.kind]
            return
        entry["verdict"] = "survived"
        entry["test"] = ""


def described(fault: Fault) -> dict[str, Any]:
    """What tells a fault from others."""
    names = ("file", "line", "kind", "function", "before", "after")
    return {name: getattr(fault, name) for name in names}


def table(faults: Sequence[tuple[int, Fault]], entries: dict[str, dict[str, Any]], seed: int) -> str:
    """All faults with their verdicts, and totals."""
    rows = [
        "| number | place | kind | before | after | verdict | test | seconds |",
        "|--:|---|---|---|---|---|---|--:|",
    ]
    verdicts: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    for number, fault in faults:
        entry = entries.get(key_of(seed, number), {})
        if any(entry.get(name) != value for name, value in described(fault).items()):
            entry = {}
        verdict = entry.get("verdict", "undecided")
        verdicts[verdict] += 1
        by_kind.setdefault(fault.kind, Counter())[verdict.split(":")[0]] += 1
        texts = [_shown(text) for text in (fault.before, fault.after)]
        cells = [
            number,
            f"{fault.file}:{fault.line}",
            fault.kind,
            *texts,
            verdict,
            entry.get("test", ""),
            entry.get("seconds", 0),
        ]
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    rows.append("")
    rows += [f"{kind}: {dict(by_kind[kind])}" for kind in KINDS if kind in by_kind]
    caught = sum(count for verdict, count in verdicts.items() if verdict.startswith("caught"))
    rows.append(f"{caught} of {len(faults)} caught; {dict(verdicts)}")
    return "\n".join(rows)


def _shown(text: str) -> str:
    short = text if len(text) < 90 else f"{text[:87]}..."
    return "`" + short.replace("|", "\\|").replace("`", "'") + "`"


def key_of(seed: int, number: int) -> str:
    return f"{seed}/{number}"


def chosen(faults: Sequence[Fault], only: Sequence[int], part: str) -> list[tuple[int, Fault]]:
    """Faults with their numbers, from 1: those of `only`, and of those every n-th."""
    index, count = (int(number) for number in part.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"--part {part}: expected i/n with i from 1 to n")
    numbered = [(number, fault) for number, fault in enumerate(faults, 1) if not only or number in only]
    return numbered[index - 1 :: count]


def usable(check: Check, folder: Path) -> None:
    """Leave out test files that cannot be imported here, and tests that fail as it is."""
    for file in list(check.tests):
        known = check.known.tests.get(file)
        if known is not None and known["kind"] in ("import", "hung"):
            print(f"left out: {file} ({known['kind']} without any fault)", flush=True)
            check.tests.remove(file)
        elif known is not None:
            check.deselected += known["failed"]
    for test in check.deselected:
        print(f"left out: {test} (fails without any fault)", flush=True)
    unknown = [file for file in check.tests if file not in check.known.tests]
    if unknown:
        outcome = run_files(
            folder / "tree",
            unknown,
            scratch=folder / "t",
            limit_of=lambda _: 400.0,
            first_failure=False,
            arguments=["--collect-only", "-q"],
        )
        for file in sorted({test.split("::")[0] for test in outcome.failed}):
            print(f"left out: {file} (cannot be imported here)", flush=True)
            check.tests.remove(file)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of faults")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th fault, from the i-th")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at a time, each in a copy of the repository")
    parser.add_argument("--tests", nargs="*", default=[], help="test files (those of a push)")
    parser.add_argument("--limit", type=float, default=LEAST_LIMIT_S, help="seconds a test file may take at least")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the script stops")
    parser.add_argument("--map", type=Path, help="which test files execute which lines")
    parser.add_argument(
        "--make-map", type=Path, metavar="FILE", help="make the map, or go on with it, and try no fault"
    )
    parser.add_argument("--work", type=Path, help="for the copies (a temporary folder); keep the path short")
    parser.add_argument("--report", type=Path, default=Path("mutation.json"), help="verdicts; later calls add to them")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    deadline = time.monotonic() + given.deadline
    durations: dict[str, float] = json.loads((ROOT / "tests/durations.json").read_text())
    tests = given.tests or short_suite()
    faults = chosen(draw(sources(), given.faults, given.seed), given.only, given.part)
    if given.list:
        for number, fault in faults:
            print(
                f"{number}. {fault.file}:{fault.line} {fault.kind} in {fault.function}: {fault.before} -> {fault.after}"
            )
        return 0
    work = given.work or Path(tempfile.mkdtemp(prefix="mut-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        if given.make_map:
            tests.sort(key=lambda test: -durations.get(test, UNKNOWN_S))
            made = maps.make(ROOT, work, given.make_map, tests, given.jobs, deadline)
            missing = [test for test in tests if test not in made.tests]
            print(f"{len(made.tests)} test files in the map, {len(missing)} missing")
            return 1 if missing else 0
        known = maps.load(given.map) if given.map else maps.Map()
        measured = {test: entry["seconds"] for test, entry in known.tests.items()}
        check = Check(tests, {**durations, **measured}, known, deadline, given.limit, given.report)
        return tried(check, work, faults, given.seed, given.jobs)
    finally:
        if given.work is None:
            shutil.rmtree(work, ignore_errors=True)


def tried(check: Check, work: Path, faults: list[tuple[int, Fault]], seed: int, jobs: int) -> int:
    """Try faults side by side; 0 if each is caught."""
    folders: Queue[Path] = Queue()
    for number in range(jobs):
        folder = work / f"j{number}"
        shutil.rmtree(folder, ignore_errors=True)
        copy_tree(ROOT, folder / "tree")
        folders.put(folder)
    usable(check, work / "j0")

    def decide(number: int, fault: Fault) -> None:
        folder = folders.get()
        try:
            entry = check.decide(folder, key_of(seed, number), fault)
        finally:
            folders.put(folder)
        test = entry.get("test", "")
        ran = f"{len(entry['passed'])} of {entry.get('files', 0)} files passed"
        print(
            f"{number}. {fault.file}:{fault.line} {fault.kind}: {entry['verdict']} {test} ({entry['seconds']} s, {ran})",
            flush=True,
        )

    with ThreadPoolExecutor(jobs) as pool:
        for running in [pool.submit(decide, *one) for one in faults]:
            running.result()
    print(table(faults, check.entries(), seed), flush=True)
    entries = check.entries()
    return (
        0
        if all(entries.get(key_of(seed, number), {}).get("verdict", "").startswith("caught") for number, _ in faults)
        else 1
    )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOP.set())
    sys.exit(main())
