"""Runs test files in a copy of the repository, in processes that all end with the run."""

from __future__ import annotations

import compileall
import importlib.util
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# They compare the text of the engine with a copy of some lines, and would find every change of those without running anything.
DESELECTED = ("tests/test_fuzz.py::test_mends_that_the_fuzzer_is_tried_without_are_in_the_code",)
NOT_COPIED = (
    ".git",
    ".venv",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "lightning_logs",
    "checkpoints",
    "mfsdp-runs",
    "site",
    "shared",
)
MARKER = "MUTATION_RUN"
POLL_S = 0.3
STOP = threading.Event()  # no run goes on: somebody ends this process
_CURRENT = re.compile(r"^(tests/[\w/]+\.py)::", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: "passed", "failed", "import" (no test could be collected), "hung" or "stopped" (the time of the caller is over).
        test: The first that failed, or the file that hung.
        failed: All that failed.
        at: The file that ran last.
    """

    kind: str
    seconds: float
    test: str = ""
    failed: tuple[str, ...] = ()
    at: str = ""
    said: str = ""


def is_over(deadline: float) -> bool:
    """Whether runs stop now."""
    return STOP.is_set() or time.monotonic() > deadline


def copy_tree(root: Path, folder: Path) -> None:
    """Have a copy of the repository, with compiled files that are checked by content: two edits in one second do not mix."""
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "lightning_mfsdp", quiet=2, invalidation_mode=checked)


def run_files(
    tree: Path,
    files: Sequence[str],
    *,
    scratch: Path,
    limit_of: Callable[[str], float],
    deadline: float = float("inf"),
    first_failure: bool = True,
    deselected: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Outcome:
    """Run test files one after the other in one pytest process, without GPUs.

    Args:
        tree: Of the repository.
        files: Of tests, or names of tests.
        scratch: For what pytest prints and what tests write; emptied afterwards.
        limit_of: Seconds that a file may take.
        deadline: When to stop, by `time.monotonic`.
        first_failure: Stop there.
        deselected: Names of tests to leave out.
        environment: Variables beside those of this process.
        arguments: What else pytest is told.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    name = uuid.uuid4().hex
    own = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tree),
        "TMPDIR": str(scratch),
        MARKER: name,
        **(environment or {}),
    }
    own.pop("MFSDP_NIGHTLY", None)
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short", "-p", "no:cacheprovider", *options()]
    command += ["-x"] if first_failure else []
    command += [part for test in (*DESELECTED, *deselected) for part in ("--deselect", test)]
    began = time.monotonic()
    log = scratch / "log"
    kind = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, *files],
            cwd=tree,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        at, since = "", began
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            current = _CURRENT.findall(_tail(log))
            if current and current[-1] != at:
                at, since = current[-1], now
            if is_over(deadline) or now - since > limit_of(at or files[0]) + (0 if at else 60):
                kind = "stopped" if is_over(deadline) else "hung"
                break
        end_all(name)
        process.wait()
    said = log.read_text(errors="replace")
    shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - began
    if kind:
        return Outcome(kind, seconds, at or files[0], at=at, said=said)
    at = next(reversed(_CURRENT.findall(said)), "")
    failed = tuple(match.strip() for match in _FAILED.findall(said))
    if process.returncode in (0, 5):
        return Outcome("passed", seconds, at=at, said=said)
    first = failed[0] if failed else at or files[0]
    return Outcome("failed" if at else "import", seconds, first, failed, at, said)


def options() -> list[str]:
    """What pytest is told where plugins that the configuration speaks of are not installed."""
    if importlib.util.find_spec("pytest_timeout") is not None:
        return []
    return ["-o", "addopts=--strict-markers -ra", "-W", "ignore::pytest.PytestConfigWarning"]


def end_all(name: str) -> None:
    """Kill the processes of one run: they have its name in the environment that they started with."""
    wanted = f"{MARKER}={name}".encode()
    for _ in range(3):  # who is killed may have started another just now
        found = [number for number in _processes() if wanted in _environment(number)]
        for number in found:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return
        time.sleep(0.1)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(number: int) -> list[bytes]:
    try:
        return Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def _tail(path: Path, size: int = 20000) -> str:
    with path.open("rb") as opened:
        opened.seek(max(0, path.stat().st_size - size))
        return opened.read().decode(errors="replace")
