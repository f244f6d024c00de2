"""Which test files execute which lines of the engine, and how each file fares on the tree as it is."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from tests.mutating import lines
from tests.mutating.runs import Outcome, copy_tree, is_over, run_files

LIMIT_S = 400.0


@dataclass
class Map:
    """What a run of each test file showed.

    Attributes:
        sources: Of each engine file, a hash of what it was.
        functions: Of each engine file, first and last line of each function.
        tests: Of each test file: "seconds", "kind" of outcome, "failed" tests, and "lines" of the engine, `None` where counting
            them makes it fail.
    """

    sources: dict[str, str] = field(default_factory=dict)
    functions: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hits: dict[str, dict[str, set[int]]] = {}

    def executes(self, test: str, file: str, line: int | None, function: str, source: bytes) -> bool:
        """Whether a test file executes a line; in another version of the file, its function. Who is not in the map is taken to.

        Args:
            test: A test file.
            file: Of the engine, relative to it.
            line: Where the statement begins; `None` outside functions, which everybody executes.
            function: By its qualified name.
            source: Of the file now.
        """
        if self.tests.get(test, {}).get("lines") is None or line is None or file not in self.sources:
            return True
        hits = self._of(test).get(file, set())
        if self.sources[file] == digest(source):
            return line in hits
        span = self.functions[file].get(function)
        return span is None or any(span[0] <= hit <= span[1] for hit in hits)

    def _of(self, test: str) -> dict[str, set[int]]:
        if test not in self._hits:
            packed: dict[str, str] = self.tests[test]["lines"]
            self._hits[test] = {file: unpacked(text) for file, text in packed.items()}
        return self._hits[test]

    def save(self, path: Path) -> None:
        text = {"sources": self.sources, "functions": self.functions, "tests": self.tests}
        path.with_suffix(".new").write_text(json.dumps(text, indent=0) + "\n")
        path.with_suffix(".new").replace(path)


def load(path: Path) -> Map:
    """A map that was saved, or an empty one."""
    return Map(**json.loads(path.read_text())) if path.exists() else Map()


def digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def packed(found: Sequence[int]) -> str:
    bits = sum(1 << number for number in found)
    return base64.b64encode(zlib.compress(bits.to_bytes(bits.bit_length() // 8 + 1, "little"))).decode()


def unpacked(text: str) -> set[int]:
    bits = int.from_bytes(zlib.decompress(base64.b64decode(text)), "little")
    return {number for number in range(bits.bit_length()) if bits >> number & 1}


def functions_of(source: bytes) -> dict[str, tuple[int, int]]:
    """First and last line of each function, by its qualified name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    found[name] = child.lineno, child.end_lineno or child.lineno
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


def make(root: Path, work: Path, path: Path, tests: Sequence[str], jobs: int, deadline: float) -> Map:
    """Run each test file that the map does not have yet; the map is saved after each, so a later call goes on."""
    made = load(path)
    engine = root / "lightning_mfsdp/engine"
    sources = {file.relative_to(engine).as_posix(): file.read_bytes() for file in sorted(engine.rglob("*.py"))}
    hashes = {name: digest(source) for name, source in sources.items()}
    if made.sources != hashes:
        made = Map(hashes, {name: functions_of(source) for name, source in sources.items()})
    saving = threading.Lock()
    folders: Queue[Path] = Queue()
    for number in range(jobs):
        folder = work / f"m{number}"
        shutil.rmtree(folder, ignore_errors=True)
        copy_tree(root, folder / "tree")
        (folder / "hook").mkdir()
        shutil.copy(lines.__file__, folder / "hook" / "sitecustomize.py")
        folders.put(folder)

    def run(test: str) -> None:
        if is_over(deadline):
            return
        folder = folders.get()
        try:
            outcome, hits = _hits_of(folder, test, deadline)
            if outcome.kind not in ("passed", "stopped"):  # are the marks in its way?
                said = outcome.said
                outcome = run_files(
                    folder / "tree",
                    [test],
                    scratch=folder / "t",
                    limit_of=lambda _: LIMIT_S,
                    deadline=deadline,
                    first_failure=False,
                )
                if outcome.kind == "passed":
                    hits = None
                    (work / f"{test.replace('/', '+')}.marks.log").write_text(said)
            if outcome.kind == "stopped":
                return
            with saving:
                made.tests[test] = {
                    "seconds": round(outcome.seconds, 1),
                    "kind": outcome.kind,
                    "failed": list(outcome.failed),
                    "lines": hits,
                }
                made.save(path)
            print(f"{test}: {outcome.kind} in {outcome.seconds:.0f} s", *outcome.failed, flush=True)
            if outcome.kind != "passed":
                (work / f"{test.replace('/', '+')}.log").write_text(outcome.said)
        finally:
            folders.put(folder)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run, test) for test in tests if test not in made.tests]:
            done.result()
    return made


def _hits_of(folder: Path, test: str, deadline: float) -> tuple[Outcome, dict[str, str] | None]:
    tree = folder / "tree"
    engine = tree / "lightning_mfsdp/engine"
    places = lines.offsets(engine)
    marks = folder / "lines"
    marks.write_bytes(bytes(places[""]))
    outcome = run_files(
        tree,
        [test],
        scratch=folder / "t",
        limit_of=lambda _: LIMIT_S,
        deadline=deadline,
        first_failure=False,
        environment={
            lines.ENGINE: str(engine),
            lines.FILE: str(marks),
            "PYTHONPATH": f"{folder / 'hook'}:{tree}",
        },
    )
    content = marks.read_bytes()
    names = [name for name in places if name]
    found = {}
    for name, after in zip(names, [*names[1:], ""], strict=True):
        begin, end = places[name], places[after]
        found[name] = packed([number for number, byte in enumerate(content[begin:end]) if byte])
    return outcome, {name: text for name, text in found.items() if unpacked(text)}
