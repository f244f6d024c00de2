"""Notes which lines of the engine a process executes, those of ranks and scripts too. A copy of this file is a `sitecustomize.py`.

Each statement inside a function first sets a byte of a file that all processes map into memory, so what a process ran is known whether
it ends by itself, by `os._exit` or is killed. It imports nothing of this repository: it runs before anything else does.
"""

from __future__ import annotations

import ast
import importlib.machinery
import mmap
import os
from pathlib import Path
from types import CodeType
from typing import Any

NAME = "__engine_lines__"
ENGINE, FILE = "MUTATION_ENGINE", "MUTATION_LINES"  # names of environment variables


def offsets(engine: Path) -> dict[str, int]:
    """Where the lines of each file of a folder begin in the file of bytes; "" is where they end."""
    found, total = {}, 0
    for path in sorted(engine.rglob("*.py")):
        found[path.relative_to(engine).as_posix()] = total
        total += path.read_bytes().count(b"\n") + 2  # lines count from 1
    return {**found, "": total}


class _Marks(ast.NodeTransformer):
    """Puts a mark before each statement of a function."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._inside = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = self._inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._inside = True
        elif isinstance(node, ast.ClassDef):
            self._inside = False
        super().generic_visit(node)
        if self._inside and not isinstance(node, (ast.Lambda, ast.IfExp)):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, self._marked(body))
        self._inside = before
        return node

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for index, statement in enumerate(body):
            is_docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_docstring:
                mark = ast.parse(f"{NAME}[{self._offset + statement.lineno}] = 1").body[0]
                for part in ast.walk(mark):
                    if hasattr(part, "lineno"):
                        ast.copy_location(part, statement)
                found.append(mark)
            found.append(statement)
        return found


def marked(source: bytes, offset: int, path: str) -> CodeType:
    """The code of a file, with a mark before each statement of a function."""
    tree = _Marks(offset).visit(ast.parse(source, filename=path))
    # Past the docstring and what must come first. A global of the module, because torch.compile takes no new builtins.
    first = next((at for at, one in enumerate(tree.body) if not _comes_first(one)), len(tree.body))
    tree.body.insert(first, ast.parse(f"from sitecustomize import marks as {NAME}").body[0])
    ast.fix_missing_locations(tree)
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return code


def _comes_first(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def install(engine: Path, file: Path) -> mmap.mmap:
    """Every import from the folder gets marks, in this process and in those forked from it."""
    places = {str(engine / name): offset for name, offset in offsets(engine).items() if name}
    with file.open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), 0)
    loader: Any = importlib.machinery.SourceFileLoader
    plain = loader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        offset = places.get(self.path)
        if offset is None:
            code: CodeType | None = plain(self, fullname)
            return code
        return marked(self.get_data(self.path), offset, self.path)

    loader.get_code = get_code
    return shared


if __name__ == "sitecustomize" and ENGINE in os.environ:
    marks = install(Path(os.environ[ENGINE]), Path(os.environ[FILE]))
