"""Walks through the code, counted: what a reader follows who wants to know how something happens.

A walk is every call of a function of a library, in the order in which they are made, watched by `sys.settrace`. How things are counted:

- **Library.** Python files below the folders that are named for a walk. Calls of other code (torch, the Trainer's loops, the model) are
  not followed. What runs while a module is imported does not count.
- **Files**: those a call went to.
- **Changes of file**: how often a call went to another file than the call before it in the same thread.
- **Functions**: those that ran, methods and nested functions too. Lambdas and comprehensions belong to the text around them.
- **Lines read**: lines of code of these functions from the first decorator to the end, without docstrings, comments and blank lines
  (as `tests/figures/code.py` sorts lines). A nested function's lines count once.
- **Lines run**: lines of code that ran.
- **Names to know**: different names of these functions and of the classes they are written in, without those of the kind `__init__`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from tests.figures import code

Folders: TypeAlias = Mapping[str, Path]
COLUMNS = ("files", "changes of file", "functions", "lines read", "lines run", "names to know")


@dataclass(frozen=True)
class Function:
    """A function in the text of a file.

    Attributes:
        names: Its own and, of a method, its class's.
        lines: Those of code.
    """

    names: tuple[str, ...]
    lines: frozenset[int]


@cache
def _functions(path: str) -> dict[tuple[int, str], Function]:
    """By first line, that of a decorator where there is one, and name."""
    source = code.read(Path(path), path)
    found = {}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                lines = set(range(first, (child.end_lineno or child.lineno) + 1)) & source.code
                names = (child.name, owner) if owner else (child.name,)
                found[first, child.name] = Function(names, frozenset(lines))
                inner = ""
            elif isinstance(child, ast.ClassDef):
                inner = child.name
            visit(child, inner)

    visit(source.tree, "")
    return found


@cache
def _code_lines(path: str) -> frozenset[int]:
    return frozenset(code.read(Path(path), path).code)


@dataclass(frozen=True)
class Figures:
    """What one walk comes by in one library.

    Attributes:
        files: In the order in which they are first visited.
        functions: Of each file, those that ran, by how often.
    """

    files: list[str]
    changes: int
    functions: dict[str, dict[str, int]]
    read: int
    run: int
    names: list[str]

    @property
    def row(self) -> tuple[int, ...]:
        """In the order of `COLUMNS`."""
        functions = sum(len(one) for one in self.functions.values())
        return (len(self.files), self.changes, functions, self.read, self.run, len(self.names))


@dataclass
class Walk:
    """Calls in their order, each with its thread, and the lines that ran."""

    calls: list[tuple[int, CodeType]] = field(default_factory=list)
    lines: set[tuple[str, int]] = field(default_factory=set)

    def figures(self, folders: Folders) -> Figures:
        """Of the files below some folders, each of which stands for its path in names of files."""
        labels = {f"{path}/" if path.is_dir() else str(path): label for label, path in folders.items()}

        def label(path: str) -> str:
            for start, name in labels.items():
                if path.startswith(start):
                    return f"{name}/{path[len(start) :]}".rstrip("/").removesuffix(".py")
            return ""

        last: dict[int, str] = {}
        changes, names, functions = 0, set[str](), dict[str, Counter[str]]()
        read = set[tuple[str, int]]()
        for thread, one in self.calls:
            path = one.co_filename
            if not (file := label(path)):
                continue
            counts = functions.setdefault(file, Counter())
            changes += last.get(thread, "") != file
            last[thread] = file
            known = _functions(path).get((one.co_firstlineno, one.co_name))
            if known is None:  # a lambda or a comprehension
                lines = {number for *_, number in one.co_lines() if number is not None}
                read.update((path, number) for number in lines & _code_lines(path))
                continue
            counts[".".join(reversed(known.names))] += 1
            names.update(name for name in known.names if not (name.startswith("__") and name.endswith("__")))
            read.update((path, number) for number in known.lines)
        run = sum(bool(label(path)) and number in _code_lines(path) for path, number in self.lines)
        tables = {file: dict(counts) for file, counts in functions.items()}
        return Figures(list(functions), changes, tables, len(read), run, sorted(names))

    def __or__(self, other: Walk) -> Walk:
        return Walk(self.calls + other.calls, self.lines | other.lines)


class Watch:
    """A context that writes down what this thread, and those that it starts, call below some folders.

    Attributes:
        walk: What was seen so far.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._starts = tuple(f"{one}/" if one.is_dir() else str(one) for one in folders)
        self.walk = Walk()
        self._is_on = False

    def __enter__(self) -> Walk:
        self._is_on = True
        self._before = sys.gettrace(), threading.gettrace()
        threading.settrace(self._see)
        sys.settrace(self._see)
        return self.walk

    def __exit__(self, *_: object) -> None:
        self._is_on = False  # for threads that live on
        here, in_threads = self._before
        sys.settrace(here)
        threading.settrace(in_threads)

    def _see(self, frame: FrameType, event: str, argument: Any) -> Any:
        one = frame.f_code
        if event != "call" or not self._is_on or not one.co_filename.startswith(self._starts):
            return None
        if not one.co_flags & inspect.CO_OPTIMIZED or _importing(frame):  # a module or the body of a class
            return None
        self.walk.calls.append((threading.get_ident(), one))
        return self._run

    def _run(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._is_on:
            self.walk.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._run


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way that this call is part of."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
