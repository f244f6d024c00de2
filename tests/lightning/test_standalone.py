"""`pytorch_lightning` instead of `lightning.pytorch`: the same code, chosen by a variable, with the same results."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_mfsdp
from tests.lightning.test_launch import launch

SCRIPT = Path(__file__).with_name("standalone_script.py")
PACKAGE = Path(lightning_mfsdp.__file__).parent
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


@pytest.mark.nightly
def test_a_module_trains_under_pytorch_lightning_as_under_lightning_to_the_bit(tmp_path: Path) -> None:
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning")
    found: dict[str, list[dict[str, Any]]] = {}
    for namespace in NAMESPACES:
        folder = tmp_path / namespace
        folder.mkdir()
        command, variables = [sys.executable, str(SCRIPT), str(folder)], {"LIGHTNING_MFSDP_NAMESPACE": namespace}
        assert "Params per rank" in launch(command, **variables)
        found[namespace] = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    ours, theirs = (found[namespace] for namespace in NAMESPACES)
    for here, there in zip(ours, theirs, strict=True):
        assert here["weights"].keys() == there["weights"].keys()
        assert all(torch.equal(value, there["weights"][name]) for name, value in here["weights"].items())
        assert (here["steps"], here["loss"]) == (there["steps"], there["loss"])
        assert here["steps"] == 4
        # Nothing of the other copy is there.
        assert here["imported"] == ["lightning"]
        assert there["imported"] == ["lightning_fabric", "pytorch_lightning"]
        assert "pytorch_lightning" in there["strategy"]


def test_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MFSDP_NAMESPACE", "pl")
    with pytest.raises(ImportError, match="LIGHTNING_MFSDP_NAMESPACE='pl': expected"):
        runpy.run_path(str(PACKAGE / "_lightning_api.py"))


def lightning_imports(tree: ast.Module) -> list[int]:
    """Lines that import Lightning when they run: those for type checkers do not."""
    for_types = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    lines = []
    for node in ast.walk(tree):
        if id(node) not in for_types and isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            roots = {name.split(".")[0] for name in names}
            if roots & {"lightning", "pytorch_lightning", "lightning_fabric"}:
                lines.append(node.lineno)
    return lines


def test_one_file_alone_imports_lightning() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := lightning_imports(ast.parse(path.read_text())))
    }
    assert found.pop("_lightning_api.py"), "the check sees nothing"
    assert not found, f"take these from _lightning_api, by file and line: {found}"


def test_the_import_check_sees_what_runs_only() -> None:
    source = (
        "import lightning\nif TYPE_CHECKING:\n    import lightning\ndef f():\n    from lightning.pytorch import Trainer"
    )
    assert lightning_imports(ast.parse(source)) == [1, 5]


def test_both_copies_are_asked_for_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "_lightning_api.py").read_text())
    (choice,) = (node for node in tree.body if isinstance(node, ast.If) and node.orelse)

    def names(body: list[ast.stmt]) -> list[tuple[str, str, str | None]]:
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        return [(node.module or "", alias.name, alias.asname) for node in imports for alias in node.names]

    renamed = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}

    def in_the_other_copy(module: str) -> str:
        first = ".".join(module.split(".")[:2])
        return module.replace(first, renamed[first], 1)

    assert names(choice.orelse) == [(in_the_other_copy(module), *rest) for module, *rest in names(choice.body)]
