"""Programs in the README and the docs: which there are, what they need, and whether the names they use exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = re.compile(r"# Needs (.+)\.")
GPUS = {"a GPU": 1, "two GPUs": 2, "four GPUs": 4}
# By the names that pip has; the modules are called alike, with underscores.
PACKAGES = {"bitsandbytes", "peft", "pytorch-lightning", "ray", "safetensors", "transformer-engine", "transformers"}
# What comes with this package.
PRESENT = {"lightning", "lightning_mfsdp", "torch", "torchmetrics"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: Its path in the repository.
        line: That of the fence, from 1.
        language: What the fence says.
        text: All lines between the fences.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> list[str]:
        """GPUs and packages that its first line names.

        Raises:
            ValueError: It names something else, so nobody would know where to run the block.
        """
        found = NEEDS.fullmatch(self.text.split("\n", 1)[0])
        needs = re.split(", | and ", found[1]) if found else []
        if unknown := set(needs) - GPUS.keys() - PACKAGES:
            raise ValueError(f"{self}: {sorted(unknown)} are none of {sorted({*GPUS, *PACKAGES})}")
        return needs

    @property
    def gpus(self) -> int:
        return max((GPUS.get(need, 0) for need in self.needs), default=0)

    @property
    def packages(self) -> set[str]:
        """Modules of the packages that it needs."""
        return {need.replace("-", "_") for need in self.needs if need in PACKAGES}

    @property
    def missing(self) -> list[str]:
        return sorted(name for name in self.packages if importlib.util.find_spec(name) is None)


def blocks_of(page: str, text: str) -> Iterator[Block]:
    opened: tuple[int, str] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if opened is None and line.strip().startswith("```"):
            opened = number, line.strip().removeprefix("```")
        elif opened is not None and line.strip() == "```":
            first, language = opened
            yield Block(page=page, line=first, language=language, text="\n".join(lines[first : number - 1]) + "\n")
            opened = None
    if opened is not None:
        raise ValueError(f"{page}: the block that begins at line {opened[0]} never ends")


BLOCKS = [block for page in PAGES for block in blocks_of(page.relative_to(ROOT).as_posix(), page.read_text())]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]


def imported_packages(code: str) -> set[str]:
    """Names of top-level modules."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def wrong_names(code: str, missing: list[str]) -> list[str]:
    """Imports that lead nowhere and arguments that an imported function or class lacks, without running anything.

    Args:
        code: A program.
        missing: Packages that are not installed; what comes from them is not looked at.
    """
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                if top not in missing:
                    module = importlib.import_module(one.name)
                    names[one.asname or top] = module if one.asname else importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in missing:
            module = importlib.import_module(node.module)
            for one in node.names:
                if hasattr(module, one.name):
                    names[one.asname or one.name] = getattr(module, one.name)
                else:
                    wrong.append(f"line {node.lineno}: {node.module} has no {one.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            wrong += _wrong_call(node, names)
    return wrong


def _wrong_call(call: ast.Call, names: dict[str, Any]) -> Iterator[str]:
    target = call.func
    path: list[str] = []
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    if not isinstance(target, ast.Name) or target.id not in names:
        return
    found = names[target.id]
    for name in path:
        if not hasattr(found, name):
            yield f"line {call.lineno}: {ast.unparse(call.func)} does not exist"
            return
        found = getattr(found, name)
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a function in C
        return
    positional = [None for one in call.args if not isinstance(one, ast.Starred)]
    keywords = {one.arg: None for one in call.keywords if one.arg is not None}
    try:
        signature.bind_partial(*positional, **keywords)
    except TypeError as error:
        yield f"line {call.lineno}: {ast.unparse(call.func)}: {error}"
