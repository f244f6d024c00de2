"""Figures of the package's text: `python tests/figures/code.py [CHECKOUT]`. It shows and judges nothing.

How things are counted:

- **Lines.** A line with any token of code is code, also inside a statement of several lines. Lines of a docstring (a string that stands
  alone as a statement) and lines with nothing but a comment are apart.
- **Circles.** An edge for every import of a file of the package: at the top, inside functions, relative, and under `if TYPE_CHECKING`.
  `from package import name` leads to the file `name` where there is one, else to the package's `__init__`. Circles are strongly
  connected components of two files or more, once with all edges and once without those for type checkers.
- **Functions.** Every `def`, nested ones too, from its `def` line (decorators apart) to its last line; "code" leaves docstring, comments
  and blanks out.
- **State** (of `engine`). A write is a target of an assignment, of an augmented or annotated one with a value, of `for`, `with` or `del`.
  *Written after construction*: pairs of class and attribute that a method other than `__init__`, `__new__` and `__post_init__` writes
  through its first argument. *Flags*: those of them that are annotated bool, or are only ever given True, False, `not`, a comparison or
  `isinstance`. *May be None*: those of them that are annotated with None or given None anywhere in the class. *Into another object*: writes
  to an attribute of anything but the method's own first argument, by how often they stand in the text.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeAlias

PACKAGE = "lightning_mfsdp"
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Edges: TypeAlias = dict[str, set[str]]


@dataclass(frozen=True)
class Lines:
    """How many of each kind."""

    code: int
    docstrings: int
    comments: int
    blank: int

    @property
    def total(self) -> int:
        return self.code + self.docstrings + self.comments + self.blank


@dataclass
class Source:
    """One file: its kinds of lines by number, and its tree."""

    path: Path
    name: str
    tree: ast.Module
    code: set[int]
    docstrings: set[int]
    comments: set[int]
    length: int

    def lines(self, first: int = 1, last: int | None = None) -> Lines:
        wanted = set(range(first, (last or self.length) + 1))
        code, texts = self.code & wanted, (self.docstrings - self.code) & wanted
        comments = (self.comments - self.code - self.docstrings) & wanted
        return Lines(len(code), len(texts), len(comments), len(wanted) - len(code) - len(texts) - len(comments))


def read(path: Path, name: str) -> Source:
    """Parse a file and sort its lines."""
    text = path.read_text()
    tree = ast.parse(text, filename=str(path))
    texts: set[int] = set()
    starts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            starts.add((node.lineno, node.col_offset))
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(span)
        elif token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in texts):
            code.update(span)
    return Source(path, name, tree, code, texts, comments, len(text.splitlines()))


def sources(checkout: Path) -> list[Source]:
    """Every file of the package, by its dotted name."""
    found = []
    for path in sorted((checkout / PACKAGE).rglob("*.py")):
        parts = path.relative_to(checkout).with_suffix("").parts
        found.append(read(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return found


# -- imports -----------------------------------------------------------------------------------------------------------


def type_checking_blocks(tree: ast.Module) -> set[int]:
    """Ids of nodes under `if TYPE_CHECKING`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }


def import_edges(files: Iterable[Source], *, for_type_checkers: bool) -> Edges:
    """What each file imports of the package."""
    files = list(files)
    names = {file.name: file for file in files}
    edges: Edges = {name: set() for name in names}
    for file in files:
        skipped = set() if for_type_checkers else type_checking_blocks(file.tree)
        for node in ast.walk(file.tree):
            if id(node) not in skipped:
                edges[file.name].update(target for target in _targets(node, file, names) if target != file.name)
    return edges


def _targets(node: ast.AST, file: Source, names: dict[str, Source]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            own = file.name.split(".") + (["__init__"] if file.path.name == "__init__.py" else [])
            module = ".".join([*own[: -node.level], *([module] if module else [])])
        for alias in node.names:
            target = f"{module}.{alias.name}" if f"{module}.{alias.name}" in names else module
            if target in names:
                yield target


def circles(edges: Edges) -> list[list[str]]:
    """Strongly connected components of two files or more, the largest first."""

    def reached(start: str, graph: Edges) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting.extend(new)
        return seen

    back: Edges = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets:
            back[target].add(name)
    found, done = [], set[str]()
    for name in edges:
        if name not in done:
            together = reached(name, edges) & reached(name, back)
            done |= together
            if len(together) > 1:
                found.append(sorted(together))
    return sorted(found, key=len, reverse=True)


# -- functions and state -----------------------------------------------------------------------------------------------


def functions(file: Source) -> Iterator[tuple[FunctionNode, str]]:
    """Every function with its qualified name."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[FunctionNode, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child, prefix + child.name
                yield from inside(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from inside(child, f"{prefix}{child.name}.")
            else:
                yield from inside(child, prefix)

    return inside(file.tree, "")


def written(function: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Attributes that are assigned or deleted inside, each with its new value where it is plain."""

    def attributes(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
        if isinstance(target, ast.Attribute):
            yield target, value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = list(value.elts)
            for one, its in zip(target.elts, values, strict=True):
                yield from attributes(one, its)
        elif isinstance(target, ast.Starred):
            yield from attributes(target.value, None)

    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from attributes(target, node.value)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            yield from attributes(node.target, node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield from attributes(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from attributes(node.optional_vars, None)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                yield from attributes(target, None)


@dataclass
class State:
    """Attributes of classes, as `Class.attribute`, and places of writes, as `file:line`."""

    after_construction: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    may_be_none: set[str] = field(default_factory=set)
    into_others: list[str] = field(default_factory=list)


def state_of(files: Iterable[Source]) -> State:
    """See the rules at the top."""
    found = State()
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                _add_class(found, node)
        owners: dict[int, str] = {}  # the nearest enclosing method's own object, for every write inside it
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                for method in methods(node):
                    owners.update((id(target), own_name(method)) for target, _ in written(method))
        for target, _ in written(file.tree):
            if ast.unparse(target.value) != owners.get(id(target)):
                found.into_others.append(f"{file.path.name}:{target.lineno} {ast.unparse(target)}")
    return found


def methods(node: ast.ClassDef) -> list[FunctionNode]:
    return [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]


def own_name(method: FunctionNode) -> str:
    """The name a method has for its object, usually self; none for static ones."""
    arguments = [*method.args.posonlyargs, *method.args.args]
    is_static = any(ast.unparse(one) == "staticmethod" for one in method.decorator_list)
    return arguments[0].arg if arguments and not is_static else ""


def _add_class(found: State, node: ast.ClassDef) -> None:
    annotations: dict[str, str] = {
        one.target.id: ast.unparse(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    values: dict[str, list[ast.expr | None]] = {}
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            values.setdefault(one.target.id, []).append(one.value)
    later = set()
    for method in methods(node):
        own = own_name(method)
        for statement in ast.walk(method):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Attribute):
                annotations[statement.target.attr] = ast.unparse(statement.annotation)
        for target, value in written(method):
            if ast.unparse(target.value) == own:
                values.setdefault(target.attr, []).append(value)
                if method.name not in CONSTRUCTORS:
                    later.add(target.attr)
    for name in later:
        label, kind, given = f"{node.name}.{name}", annotations.get(name, ""), values[name]
        found.after_construction.add(label)
        if kind == "bool" or (not kind and all(map(_is_truth, given))):
            found.flags.add(label)
        if "None" in kind or kind.startswith("Optional") or any(map(_is_none, given)):
            found.may_be_none.add(label)


def _is_truth(value: ast.expr | None) -> bool:
    return (
        (isinstance(value, ast.Constant) and isinstance(value.value, bool))
        or isinstance(value, ast.Compare)
        or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))
        or (isinstance(value, ast.Call) and ast.unparse(value.func) == "isinstance")
    )


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


# -- the report --------------------------------------------------------------------------------------------------------


def add(lines: Iterable[Lines]) -> Lines:
    total = Lines(0, 0, 0, 0)
    for one in lines:
        total = Lines(
            total.code + one.code,
            total.docstrings + one.docstrings,
            total.comments + one.comments,
            total.blank + one.blank,
        )
    return total


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """Markdown; the first column is words, the others are numbers."""
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |" for row in lines
    )


def room_of(file: Source) -> str:
    parts = file.name.split(".")
    inner = parts[1:] if file.path.name == "__init__.py" else parts[1:-1]
    return "/".join(inner) or "."


def report(checkout: Path) -> str:
    """Everything, in Markdown."""
    files = sources(checkout)
    rooms: dict[str, list[Source]] = {}
    for file in files:
        rooms.setdefault(room_of(file), []).append(file)
    row: Callable[[str, list[Source]], tuple[object, ...]] = lambda name, some: (  # noqa: E731
        name,
        len(some),
        *((total := add(file.lines() for file in some)).total, total.code, total.docstrings, total.comments),
    )
    parts = [
        table(
            ("room", "files", "lines", "code", "docstrings", "comments"),
            [
                *(row(name, rooms[name]) for name in sorted(rooms, key=lambda name: -len(rooms[name]))),
                row("all", files),
            ],
        )
    ]
    everything, running = (import_edges(files, for_type_checkers=kind) for kind in (True, False))
    said = []
    for label, edges in (("all imports", everything), ("without those for type checkers", running)):
        found = circles(edges)
        sizes = "; ".join(
            f"{len(one)} files ({', '.join(name.removeprefix(PACKAGE + '.') for name in one)})" for one in found
        )
        said.append(f"- Circles of imports, {label}: {len(found)}{': ' + sizes if found else ''}")
    inside = {name: one for one in circles(everything) for name in one}
    only_types = [
        (name, target)
        for name, targets in everything.items()
        for target in targets - running[name]
        if name in inside and target in inside[name]
    ]
    said.append(f"- Imports for type checkers inside circles: {len(only_types)}")
    all_functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, file.lines(node.lineno, node.end_lineno).code, file, name)
        for file in files
        for node, name in functions(file)
    ]
    said.append(
        f"- Functions: {len(all_functions)}, median {median(one[0] for one in all_functions):g} lines, "
        f"{median(one[1] for one in all_functions):g} of them code"
    )
    state = state_of(file for file in files if file.name.startswith(f"{PACKAGE}.engine"))
    said += [
        f"- Attributes of the engine's classes written after construction: {len(state.after_construction)}; "
        f"flags among them: {len(state.flags)}; may be None: {len(state.may_be_none)}",
        f"- Writes into another object's attributes in the engine: {len(state.into_others)}",
    ]
    parts.append("\n".join(said))
    parts.append(
        table(
            ("largest files", "lines", "code"),
            [
                (file.name.removeprefix(PACKAGE + "."), file.length, file.lines().code)
                for file in sorted(files, key=lambda file: -file.length)[:10]
            ],
        )
    )
    parts.append(
        table(
            ("largest functions", "lines", "code"),
            [
                (f"{file.name.removeprefix(PACKAGE + '.')} `{name}`", length, code)
                for length, code, file, name in sorted(all_functions, key=lambda one: -one[0])[:10]
            ],
        )
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("checkout", type=Path, nargs="?", default=here, help="the repository's root (this one)")
    parser.add_argument("--names", action="store_true", help="list the attributes and writes that were counted, too")
    arguments = parser.parse_args()
    print(report(arguments.checkout.resolve()))
    if arguments.names:
        state = state_of(
            file for file in sources(arguments.checkout.resolve()) if file.name.startswith(f"{PACKAGE}.engine")
        )
        for label, names in vars(state).items():
            print(f"\n{label}: " + ", ".join(sorted(names)))


if __name__ == "__main__":
    sys.exit(main())
