"""The scripts that count, on a package small enough to count by hand."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_mfsdp import MFSDPStrategy
from tests.figures import code, gpu_rows, trainer_calls, walked
from tests.helpers.distributed import run_distributed
from tests.helpers.programs import run_forked

SMALL = {
    "__init__.py": '"""A package."""\n',
    "engine/__init__.py": "",
    "engine/unit.py": '''"""One unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import Group


class Unit:
    """Docstring of
    two lines."""

    def __init__(self) -> None:
        self.group: Group | None = None  # not a line of its own
        self.fixed = 1

    # a line of its own
    def attach(self, group: Group) -> None:
        self.group = group
        self.live = True
        group.unit, group.names[0] = self, "a"
        group.options.on = False
''',
    "engine/group.py": "from .unit import Unit\nclass Group:\n    def f(self):\n        def g():\n            pass\n",
    "other.py": "def f():\n    from lightning_mfsdp.engine import unit\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in SMALL.items():
        path = tmp_path / "lightning_mfsdp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_lines_are_of_one_kind_each(checkout: Path) -> None:
    (unit,) = (file for file in code.sources(checkout) if file.name.endswith("engine.unit"))
    lines = unit.lines()
    assert (lines.code, lines.docstrings, lines.comments, lines.blank) == (13, 3, 1, 7)
    assert lines.total == len(SMALL["engine/unit.py"].splitlines())


def test_circles_are_found_with_and_without_imports_for_type_checkers(checkout: Path) -> None:
    files = code.sources(checkout)
    circle = ["lightning_mfsdp.engine.group", "lightning_mfsdp.engine.unit"]
    assert code.circles(code.import_edges(files, for_type_checkers=True)) == [circle]
    assert code.circles(code.import_edges(files, for_type_checkers=False)) == []
    assert code.import_edges(files, for_type_checkers=False)["lightning_mfsdp.other"] == {circle[1]}


def test_state_is_counted_as_the_rules_say(checkout: Path) -> None:
    state = code.state_of(code.sources(checkout))
    assert state.after_construction == {"Unit.group", "Unit.live"}
    assert state.flags == {"Unit.live"}
    assert state.may_be_none == {"Unit.group"}
    assert [place.split()[1] for place in state.into_others] == ["group.unit", "group.options.on"]


def test_the_report_has_every_part(checkout: Path) -> None:
    report = code.report(checkout)
    assert "- Functions: 5, median 3 lines" in report
    assert "| all | 5 |" in report
    assert "Circles of imports, all imports: 1: 2 files (engine.group, engine.unit)" in report


# Of one unit, none to be exceeded.
MOST = {"forward": {"python": 60, "c": 41}, "backward": {"python": 104, "c": 53}}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What calls.py finds, in a process of its own."""
    program = tmp_path_factory.mktemp("calls") / "count.py"
    calls = Path(__file__).with_name("calls.py")
    program.write_text(f"""
import runpy
import warnings

warnings.simplefilter("ignore")
runpy.run_path({str(calls)!r}, run_name="__main__")
""")
    found: dict[str, Any] = json.loads(run_forked(program, "--json").splitlines()[-1])
    return found


@pytest.mark.parametrize("span", MOST)
def test_a_unit_makes_few_calls(span: str, counted: dict[str, Any]) -> None:
    found = counted["mfsdp"][span]
    assert {key: found[key] for key in MOST[span] if found[key] > MOST[span][key]} == {}


def trainer_calls_of_a_rank(rank: int, world: int) -> Counter[str]:
    return trainer_calls.train(rank, MFSDPStrategy())


def test_a_step_of_the_trainer_makes_few_calls_for_each_parameter_and_unit() -> None:
    """Of the package alone: what the model, PyTorch and the Trainer call is theirs."""
    calls, _ = run_distributed(trainer_calls_of_a_rank, 2)
    assert min(calls["torch.optim"], calls["model"], calls["lightning"], calls["engine/core/unit"]) > 100
    ours = {
        concern: number for concern, number in calls.items() if concern not in ("torch.optim", "model", "lightning")
    }
    assert sum(ours.values()) <= 6_200, ours
    assert calls["torch.optim"] <= 600, "a unit has one or two tensors to step, and not one for each parameter"


def test_calls_are_counted_for_every_engine(counted: dict[str, Any]) -> None:
    found = counted
    for engine in ("mfsdp", "fsdp2"):
        forward, backward, step = (found[engine][span] for span in ("forward", "backward", "step"))
        assert 0 < forward["python"] < step["python"]
        assert 0 < backward["python"] < step["python"]
        assert set(forward["files"]) | set(backward["files"]) <= set(step["files"])
    step = found["mfsdp"]["step"]
    rooms = {
        Path(file).relative_to(Path(__file__).resolve().parents[2] / "lightning_mfsdp").parts[0]
        for file in step["files"]
    }
    assert rooms == {"base", "engine"}
    assert found["plain"]["step"]["python"] == 0 < found["plain"]["step"]["everything"]


def test_rows_on_gpus_are_read_from_what_the_benchmark_prints(tmp_path: Path) -> None:
    row = gpu_rows.ROWS[0]
    printed = 'noise\nRESULT {"median_ms": 10.0, "step_ms": 11.0, "peak_gib": 2.5, "reserved_gib": 3.0}\n'
    old = gpu_rows.result_of(row, printed, tmp_path, 0)
    assert old == gpu_rows.Result(10.0, 2.5, 3.0)
    new = gpu_rows.Result(9.0, 2.0, 2.5)
    slower = gpu_rows.Result(12.0, 2.5, 3.5)
    line = gpu_rows.line(row, {"OLD": [old, slower], "NEW": [new, new]})
    assert line == "| 300m eager | 11.00 | 2.50 | 3.50 | 9.00 | 2.00 | 2.50 | 0.8182 | 1.2000 | 1.2000 |"
    failed = gpu_rows.result_of(row, "RuntimeError: out of memory\n", tmp_path, 1)
    assert "out of memory" in gpu_rows.line(row, {"NEW": [failed]})


TOY = {
    "box.py": '''"""A box."""

from toy.helper import helper


def doubled(function):
    def twice(self, value):
        return function(self, 2 * value)

    return twice


class Box:
    """Docstring of
    two lines."""

    def __init__(self) -> None:
        self.value = 0  # not a line of its own

    # a line of its own
    @doubled
    def put(
        self, value: int
    ) -> None:
        """Docstring."""
        if value < 0:
            raise ValueError

        self.value = helper(value)
        self.value += helper(value)

    def never(self) -> None:
        pass
''',
    "helper.py": "def helper(value):\n    return (lambda one: one + 1)(value)\n",
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, text in TOY.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_walk_is_counted_as_the_rules_say(toy: Path) -> None:
    with walked.Watch([toy]) as walk:
        box = importlib.import_module("toy.box").Box()  # what runs while a module is imported does not count
        box.put(1)
    box.put(2)
    found = walk.figures({"toy": toy})
    assert found.functions == {
        "toy/box": {"Box.__init__": 1, "twice": 1, "Box.put": 1},
        "toy/helper": {"helper": 2},
    }
    assert found.changes == 2  # to the first file, then to the other, where the second call stays
    assert found.read == 2 + 2 + 8 + 2
    assert found.run == 1 + 1 + 3 + 1
    assert found.names == ["Box", "helper", "put", "twice"]
    assert found.row == (2, 2, 4, 14, 6, 4)
    assert walk.figures({"half": toy / "helper.py"}).row == (1, 1, 1, 2, 1, 1)


@pytest.mark.nightly
def test_a_parameter_walks_through_the_engine_and_through_fsdp2() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("walks.py")), "parameter", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    columns = json.loads(done.stdout.splitlines()[-1])["parameter"]
    for one, file in {"ours": "lightning_mfsdp/engine/core/weights", "FSDP2": "_fully_shard/_fsdp_param"}.items():
        spans = columns[one]
        assert file in spans["all"]["functions"]
        assert 0 < spans["third step"]["run"] < spans["third step"]["read"] < spans["all"]["read"]
        assert set(spans["third step"]["names"]) < set(spans["all"]["names"])
