"""pyproject.toml declares what the package imports, and what it declares is imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_mfsdp
from tests.helpers.programs import run_as_if_first

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(lightning_mfsdp.__file__).parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Lightning under its other names, which LIGHTNING_MFSDP_NAMESPACE chooses.
OTHER_NAMES = {"pytorch_lightning", "lightning_fabric"}
# Imported where a user asks for what needs them, and the extra that brings them; Triton comes with PyTorch's builds for GPUs.
OPTIONAL = {"jsonargparse": "examples", "matplotlib": "examples", "ray": "ray", "safetensors": "hf", "triton": None}
# Found by name, not by an import statement.
BY_NAME = {"transformers": "hf", "transformer_engine": "te"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.split(".")[0]


def foreign(names: Iterator[str]) -> set[str]:
    return set(names) - sys.stdlib_module_names - {"lightning_mfsdp"} - OTHER_NAMES


def module_of(requirement: str) -> str:
    """The name by which a distribution is imported: "typing-extensions>=4.5" is `typing_extensions`."""
    return re.split(r"[^\w-]", requirement)[0].replace("-", "_")


def test_what_is_imported_is_declared_and_the_reverse():
    found = foreign(name for path in PACKAGE.rglob("*.py") for name in imported(ast.parse(path.read_text())))
    assert found - OPTIONAL.keys() == {module_of(requirement) for requirement in PROJECT["dependencies"]}
    assert OPTIONAL.keys() <= found


def test_the_check_of_imports_can_fail():
    source = "import os, a.b\ndef f():\n    from c.d import e\n    from . import g\n    import pytorch_lightning\n"
    assert foreign(imported(ast.parse(source))) == {"a", "c"}


def test_every_optional_library_has_an_extra():
    for library, extra in (OPTIONAL | BY_NAME).items():
        if extra is not None:
            assert library in map(module_of, PROJECT["optional-dependencies"][extra])


def test_the_extra_all_has_every_library_that_pip_installs_anywhere_but_ray():
    extras = PROJECT["optional-dependencies"]
    [everything] = extras["all"]
    assert everything == f"lightning-mfsdp[{','.join(sorted(extras.keys() - {'all', 'ray', 'te', 'test'}))}]"


def test_every_public_room_is_imported_without_optional_libraries(tmp_path):
    missing = sorted(OPTIONAL.keys() | BY_NAME.keys() | {"peft", "jsonargparse"})
    # Lightning first: it imports some of them where they are installed.
    program = (
        "import lightning.pytorch\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        "import lightning_mfsdp, lightning_mfsdp.commands\n"
        "print(sum(getattr(lightning_mfsdp, name) is not None for name in dir(lightning_mfsdp)))"
    )
    assert run_as_if_first(tmp_path, program).split()[-1] == str(len(dir(lightning_mfsdp)))
