"""docs/design/state.md says of every attribute of the core what it means and who writes it, as the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_state", ROOT / "docs/state.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


def test_the_page_is_what_the_script_writes() -> None:
    assert script.PAGE.read_text() == script.page(), "the core has changed: python docs/state.py"


def test_every_attribute_has_a_meaning() -> None:
    unsaid = [f"{of}.{name}" for of, rows in script.table().items() for name, meaning, _ in rows if not meaning]
    assert not unsaid, "say what they are, in the docstring of the class or behind the assignment in its constructor"


def test_writes_are_found_wherever_they_stand() -> None:
    found = {(of, name): functions for of, rows in script.table().items() for name, _, functions in rows}
    assert found["Weights", "leases"] == ["Unit._end_lease", "Unit.unshard"]  # of another class, by the variable's name
    assert found["Weights", "stays"] == [
        "Weights._refuse_late_write",
        "Weights.abandon",
        "Weights.let_go",
        "Weights.stay",
    ]
    assert found["Unit", "keeps_unsharded"] == ["Unit.abandon", "Unit.begin_step", "Unit.end_step"]
    assert ("Unit", "_modules") not in found  # in the constructor alone
