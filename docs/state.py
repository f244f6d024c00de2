"""Writes docs/design/state.md, the table of what the engine's core remembers and which functions write it: `python docs/state.py`.

A write is an assignment to an attribute, to a place in it (`self._places[key] = value`), or the call of a method that changes it
(`self._places.clear()`), after construction. Whose attribute it is follows from the class around it, from the name of the variable
(`unit`, `group.weights`), or from an attribute that only one of the classes has. What an attribute means stands in the docstring of its
class, or in a comment behind or before its assignment in the constructor.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ENGINE = DOCS.parent / "lightning_mfsdp/engine"
PAGE = DOCS / "design/state.md"

# From the root to a call, and the file of each.
CLASSES = {
    "Context": "core/context.py",
    "Backward": "core/backward.py",
    "Writes": "core/writes.py",
    "Optimizers": "core/writes.py",
    "Schedule": "core/schedule.py",
    "ReductionSchedule": "core/reduction_schedule.py",
    "Unit": "core/unit.py",
    "Shown": "core/call.py",
    "Calls": "core/calls.py",
    "Recomputations": "core/calls.py",
    "Call": "core/call.py",
    "Weights": "core/weights.py",
    "Versions": "core/versions.py",
    "Gradients": "core/gradients.py",
    "Client": "core/storage.py",
    "Slot": "core/storage.py",
    "SideDoors": "core/side_doors.py",
}
OF_VARIABLES = {
    "unit": "Unit",
    "nested": "Unit",
    "weights": "Weights",
    "group.weights": "Weights",
    "call": "Call",
    "context": "Context",
    "self.calls": "Calls",
    "unit.calls": "Calls",
    "self.backward": "Backward",
    "self.writes": "Writes",
    "client": "Client",
    "self.client": "Client",
    "slot": "Slot",
    "group.gradients": "Gradients",
    "shown": "Shown",
    "self.shown": "Shown",
    "self.reductions": "ReductionSchedule",
    "context.reductions": "ReductionSchedule",
}
OF_OTHERS = (
    *(
        "self",
        "lane",
        "self._lane",
        "self.place.values",
        "past",
        "place",
        "values",
        "made",
        "wrapped",
    ),
    *("gradient", "parameter", "tensor", "whole", "part"),
)
CHANGES = frozenset(
    (
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
    )
) | {"setdefault", "update"}
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
INTRODUCTION = """# What the core remembers

The state of the engine's core: every attribute of these classes that changes after construction, in the order of the code, what it
means, and the functions that replace it or change what it contains. A function without a class or file before it is a method of the
class itself. `python docs/state.py` writes this page from the code, and a test compares the two.

Before you add an attribute, look here for one that implies it; before you write one from a further place, look for a
function that writes it already.
"""


def classes_and_functions(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST]]:
    """Every function that stands in a class or a file, with the class around it ("" outside) and its name; nested ones count to it."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (
                (node.name, one.name, one)
                for one in node.body
                if isinstance(one, ast.FunctionDef)
            )
        elif isinstance(node, ast.FunctionDef):
            yield "", node.name, node


def writes(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Variable and attribute of each write."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = [
                one for one in node.targets if isinstance(one, ast.Subscript)
            ]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
        ):
            targets = (
                [node.func.value]
                if isinstance(node.func.value, ast.Attribute)
                else []
            )
        while targets:
            target = targets.pop(0)
            if isinstance(target, (ast.Tuple, ast.List)):
                targets = [*target.elts, *targets]
            elif isinstance(target, ast.Subscript):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield ast.unparse(target.value), target.attr


def meanings(node: ast.ClassDef, source: str) -> dict[str, str]:
    """What the docstring says of each attribute, and comments behind assignments in the constructor."""
    said = {}
    constructor = next((one for one in node.body if _is_constructor(one)), node)
    before = ""
    for line in source.splitlines()[
        constructor.lineno - 1 : constructor.end_lineno
    ]:
        assigned, _, behind = line.partition("  # ")
        comment = behind or before
        if comment and assigned.startswith("        self."):
            targets = assigned.split(" = ")[:-1] or [assigned]
            said.update(
                (name, comment)
                for target in targets
                for name in re.findall(r"self\.(\w+)", target)
            )
        before = (
            line.strip().removeprefix("# ") if line.strip().startswith("# ") else ""
        )
    _, _, listed = (ast.get_docstring(node) or "").partition("Attributes:\n")
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", listed, re.M):
        said[name] = " ".join(text.split())
    return said


def _is_constructor(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in CONSTRUCTORS


def table(engine: Path = ENGINE) -> dict[str, list[tuple[str, str, list[str]]]]:
    """By class: attribute, meaning, and the functions that write it."""
    trees = {
        path.relative_to(engine).as_posix(): ast.parse(path.read_text())
        for path in sorted(engine.rglob("*.py"))
    }
    own: dict[str, dict[str, None]] = {name: {} for name in CLASSES}
    said: dict[str, dict[str, str]] = {}
    for name, file in CLASSES.items():
        node = next(
            one
            for one in trees[file].body
            if isinstance(one, ast.ClassDef) and one.name == name
        )
        source = (engine / file).read_text()
        said[name] = meanings(node, source)
        own[name] |= {
            one.target.id: None
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        for method in sorted(node.body, key=_is_constructor, reverse=True):
            own[name] |= {
                attribute: None
                for variable, attribute in writes(method)
                if variable == "self"
            }
    owners = Counter(
        attribute for attributes in own.values() for attribute in attributes
    )
    found: dict[tuple[str, str], dict[str, None]] = {}
    for file, tree in trees.items():
        for around, name, function in classes_and_functions(tree):
            if around in CLASSES and name in CONSTRUCTORS:
                continue
            label = f"{around}.{name}" if around else f"{Path(file).stem}.{name}"
            for variable, attribute in writes(function):
                of = (
                    around if variable == "self" else OF_VARIABLES.get(variable, "")
                )
                if not of and owners[attribute] == 1 and variable not in OF_OTHERS:
                    of = next(one for one in CLASSES if attribute in own[one])
                if of in CLASSES and attribute in own[of]:
                    found.setdefault((of, attribute), {})[label] = None
    return {
        of: [
            (name, said[of].get(name, ""), sorted(found[of, name]))
            for name in own[of]
            if (of, name) in found
        ]
        for of in CLASSES
    }


def page() -> str:
    """The page's text."""
    lines = [INTRODUCTION]
    for of, rows in table().items():
        lines += [
            f"## {of}\n",
            f"[{CLASSES[of]}](../../lightning_mfsdp/engine/{CLASSES[of]})\n",
            "| attribute | what it is | written by |",
        ]
        lines += ["|---|---|---|"]
        for name, meaning, written_by in rows:
            functions = ", ".join(
                f"`{one.removeprefix(of + '.')}`" for one in written_by
            )
            lines.append(f"| `{name}` | {meaning} | {functions} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
