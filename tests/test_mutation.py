"""The maker of faults, and what tells whether tests find them. See tests/mutation.py."""

from __future__ import annotations

import ast
import hashlib
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest

from tests import mutation
from tests.mutating import lines, maps
from tests.mutating.faults import KINDS, NEEDS_GPU, Fault, draw, faults_in
from tests.mutating.runs import run_files

NUMBER = 40


@pytest.fixture(scope="module")
def sources() -> dict[str, bytes]:
    return mutation.sources()


@pytest.fixture(scope="module")
def drawn(sources: dict[str, bytes]) -> list[Fault]:
    return draw(sources, NUMBER, seed=1)


def some(sources: dict[str, bytes]) -> dict[str, bytes]:
    return {name: source for name, source in sources.items() if name.startswith("comm/")}


def test_a_seed_decides_which_faults_are_drawn(sources):
    few = some(sources)
    assert draw(few, NUMBER, seed=1) == draw(few, NUMBER, seed=1)
    assert draw(few, NUMBER, seed=1) != draw(few, NUMBER, seed=2)
    assert draw(few, NUMBER, seed=1)[:16] == draw(few, 16, seed=1)


def test_kinds_are_drawn_alike_and_no_place_twice(drawn):
    assert len(drawn) == NUMBER
    assert Counter(fault.kind for fault in drawn) == dict.fromkeys(KINDS, NUMBER // len(KINDS))
    for number, one in enumerate(drawn):
        others = [other for other in drawn[:number] if other.file == one.file]
        assert all(one.end <= other.start or other.end <= one.start for other in others)


def test_each_fault_is_another_program_with_as_many_lines(sources, drawn):
    for fault in drawn:
        source = sources[fault.file]
        changed = fault.applied(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), fault
        assert changed.count(b"\n") == source.count(b"\n"), fault
        assert fault.line == source[: fault.start].count(b"\n") + 1


LEFT_ALONE = b'''"""Sizes: 1 == 2."""
from typing import TYPE_CHECKING, Literal, Protocol
__all__ = ["f", "g"]
if TYPE_CHECKING:
    from a import b
class P(Protocol):
    size: int = 1
    def f(self) -> bool:
        return self.size == 1
class C:
    """Has 1 or 2."""
    kind: Literal[1, 2] = 1
    def f(self, x: Literal[1, 2]) -> "Literal[1] | None":
        """Returns 1 == 2."""
        y: Literal[3] | None
        assert x == 1, "expected 1"
        warnings.warn(f"{x == 1}", stacklevel=2)
        if x:
            raise ValueError(f"got {x + 1}, expected {1 if x == 1 else 2}" + "a" * 3)
'''


def test_what_only_people_and_checkers_read_is_left_alone():
    assert faults_in("a.py", LEFT_ALONE) == []


@pytest.mark.parametrize(
    ("statement", "kind", "after"),
    [
        ("axis.all_reduce(x)", "drop", "pass"),
        ("axis.all_reduce(x)", "double", "axis.all_reduce(x); axis.all_reduce(x)"),
        ("streams.wait(\n        event,\n    )", "drop", "pass"),
        ("a.b(x); pass\n    x.c()\n    x.d()", "swap", "x.d() x.c()"),
        ("axis.gather(whole, part)", "swap", "axis.gather(part, whole)"),
        ("a.b.copy_(c, non_blocking=True)", "swap", "c.copy_(a.b, non_blocking=True)"),
        ("return x * factor", "divisor", "x // factor"),
        ("return x * factor", "divisor", "1.0"),
        ("return x / n", "divisor", "x * n"),
        ("return torch.float32", "dtype", "torch.bfloat16"),
        ("return self.spec.main_dtype", "dtype", "self.spec.compute_dtype"),
        ("return x is None", "comparison", "(x is not None)"),
        ("return (\n        x < 1\n        and y\n    )", "comparison", "((x < 1) or y)"),
        ("return not x", "comparison", "bool(x)"),
        ("return x[n:]", "boundary", "(n) + 1"),
        ("return range(n)", "boundary", "(n) - 1"),
        ("return x[2]", "boundary", "1"),
        ("self.is_on = False", "transition", "True"),
        ("self.event = None", "transition", "pass"),
        ("self.count += n", "transition", "pass"),
    ],
)
def test_faults_of_each_kind(statement, kind, after):
    source = f"def f(self, x, y, n):\n    {statement}\n".encode()
    found = {fault.after: fault for fault in faults_in("a.py", source) if fault.kind == kind}
    assert after in found
    changed = found[after].applied(source)
    ast.parse(changed)
    assert changed.count(b"\n") == source.count(b"\n")
    assert (found[after].function, found[after].statement) == ("f", found[after].line) or "\n" in statement


@pytest.mark.parametrize(
    "statements",
    ["self.a = f(x); pass\n    self.b = g(x)", "y = f(x)\n    self.b.c(y)", "self.a.f(x)\n    self.b.g(y)"],
)
def test_neighbors_whose_order_does_not_matter_stay_in_place(statements):
    assert not [fault for fault in faults_in("a.py", f"def f():\n    {statements}\n".encode()) if fault.kind == "swap"]


def test_functions_that_need_a_gpu_are_in_the_engine_and_left_alone(sources):
    for place in NEEDS_GPU:
        file, function = place.split(":")
        assert function in maps.functions_of(sources[file]), place
        assert not [fault for fault in faults_in(file, sources[file]) if fault.function == function]


SOURCE = b'''"""Of a module."""
from __future__ import annotations
def f(x):
    """Of a function."""
    if x:
        return 1
    elif x is None:
        return 2
    return [
        3,
    ]
class C:
    def g(self):
        return 4
'''


def test_lines_that_ran_are_known(monkeypatch):
    marks = bytearray(40)
    monkeypatch.setitem(sys.modules, "sitecustomize", types.SimpleNamespace(marks=marks))
    names: dict[str, object] = {}
    exec(lines.marked(SOURCE, 20, "a.py"), names)
    assert not any(marks)
    assert names["f"](0) == [3]  # type: ignore[operator]
    assert [number - 20 for number, mark in enumerate(marks) if mark] == [5, 7, 9]
    assert names["f"].__doc__ == "Of a function."
    assert names["__doc__"] == "Of a module."


def test_a_map_knows_who_executes_a_line_or_in_another_version_the_function(tmp_path):
    run = {"seconds": 1.0, "kind": "passed", "failed": [], "lines": {"a.py": maps.packed([5, 7, 9])}}
    tests = {"tests/test_a.py": run, "tests/test_b.py": {**run, "lines": {}}, "tests/test_c.py": {**run, "lines": None}}
    digest = hashlib.sha256(SOURCE).hexdigest()[:16]
    maps.Map({"a.py": digest}, {"a.py": maps.functions_of(SOURCE)}, tests).save(tmp_path / "map.json")
    made = maps.load(tmp_path / "map.json")

    def who(line: int | None, function: str, source: bytes = SOURCE) -> str:
        names = ("a", "b", "c", "unknown")
        return " ".join(
            name for name in names if made.executes(f"tests/test_{name}.py", "a.py", line, function, source)
        )

    assert who(7, "f") == "a c unknown"
    assert who(6, "f") == "c unknown"
    assert who(None, "") == "a b c unknown"
    assert who(106, "f", SOURCE + b"\n") == "a c unknown"
    assert who(114, "C.g", SOURCE + b"\n") == "c unknown"
    assert who(1, "new", SOURCE + b"\n") == "a b c unknown"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("content", "kind", "test"),
    [
        ("def test_a(): pass", "passed", ""),
        ("def test_a(): pass\ndef test_b(): assert 0", "failed", "tests/test_it.py::test_b"),
        ("import nowhere", "import", "tests/test_it.py"),
        ("import subprocess\ndef test_a(): subprocess.run(['sleep', '100'])", "hung", "tests/test_it.py"),
    ],
)
def test_how_a_run_ends(tmp_path, content, kind, test):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(content)
    began = time.monotonic()
    limit_s = 3 if kind == "hung" else 100
    outcome = run_files(tmp_path, ["tests/test_it.py"], scratch=tmp_path / "t", limit_of=lambda _: limit_s)
    assert (outcome.kind, outcome.test) == (kind, test), outcome.said
    assert time.monotonic() - began < 90


def check_of(folder: Path, tests: list[str]) -> mutation.Check:
    seconds = {
        "tests/engine/test_layout.py": 10.0,
        "tests/lightning/test_fit.py": 10.0,
        "tests/engine/test_meta.py": 10.0,
    }
    return mutation.Check(tests, seconds, maps.Map(), float("inf"), 60.0, folder / "report.json")


def test_files_that_speak_of_the_changed_one_come_first(tmp_path):
    tests = [
        "tests/test_fuzz.py",
        "tests/lightning/test_fit.py",
        "tests/engine/test_meta.py",
        "tests/engine/test_layout.py",
    ]
    check = check_of(tmp_path, tests)
    fault = Fault("layout/layout.py", 1, "drop", "", None, 0, 1, "", "", "")
    files = check.files_for(fault, b"")
    assert files == tests[::-1]
    assert [check.batch_of(files, room_s) for room_s in (5, 15, 1000)] == [files[:1], files[:2], files]
    assert [check.limit_of(file) for file in ("tests/engine/test_layout.py", "tests/test_new.py")] == [60.0, 80.0]


def test_verdicts_are_kept_as_long_as_the_fault_is_the_same(tmp_path, drawn):
    check = check_of(tmp_path, [])
    check.note("1/1", {**mutation.described(drawn[0]), "verdict": "caught", "test": "tests/test_a.py::test_a"})
    check.note("1/2", {**mutation.described(drawn[0]), "verdict": "caught"})
    assert check.decide(tmp_path, "1/1", drawn[0])["verdict"] == "caught"
    shown = mutation.table([(1, drawn[0]), (2, drawn[1])], check.entries(), seed=1)
    assert "tests/test_a.py::test_a" in shown
    assert shown.endswith("1 of 2 caught; {'caught': 1, 'undecided': 1}")


def test_parts_are_every_nth_fault(drawn):
    assert [number for number, _ in mutation.chosen(drawn[:7], [], "2/3")] == [2, 5]
    assert [number for number, _ in mutation.chosen(drawn[:7], [3, 6], "1/1")] == [3, 6]
    with pytest.raises(ValueError, match="expected i/n"):
        mutation.chosen(drawn, [], "4/3")


def test_the_short_suite_has_no_tests_for_gpus():
    files = mutation.short_suite()
    assert "tests/engine/test_layout.py" in files
    assert not [file for file in files if "gpu" in file]
