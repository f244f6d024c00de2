"""What Transformer Engine must be, and what is said where it is not."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_mfsdp
from lightning_mfsdp import MFSDPPrecision
from lightning_mfsdp.base.alignment import ALIGNMENTS
from lightning_mfsdp.te import library
from lightning_mfsdp.te.recipes import RECIPES, alignment, make_recipe
from tests.te import fake_engine

PACKAGE = Path(lightning_mfsdp.__file__).parent


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A driver, and a package that fails in the way that is written into it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> None:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine/__init__.py").write_text(code)

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_without_a_driver_that_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r'is_available\(\) is False here. Use precision="bf16-mixed"'):
        library.load("pytorch")


def test_a_missing_library_says_how_to_install_it(installation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(RuntimeError, match=r"which is not installed: pip install .*lightning-mfsdp\[te\]"):
        library.load("pytorch")


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('libcudnn.so not found')",
        "raise OSError('libcudnn.so not found')",
        "raise AssertionError('libcudnn.so not found')",
        "raise ModuleNotFoundError('libcudnn.so not found', name='transformer_engine_torch')",
        "raise ImportError('libcudnn.so not found')",
    ],
    ids=lambda code: code.split("(")[0].split()[-1],
)
def test_a_broken_library_is_not_called_missing(installation: Any, code: str) -> None:
    installation(code)
    with pytest.raises(RuntimeError, match=r"cannot be loaded \(\w+: libcudnn.so not found\).*install it again"):
        library.load("pytorch")


def test_a_precision_is_built_without_the_library() -> None:
    assert MFSDPPrecision("transformer-engine", recipe="delayed").precision == "transformer-engine"


def test_one_file_imports_the_library() -> None:
    importing = re.compile(
        r"(import_module\(|^\s*from|^\s*import)\s*f?.?(transformer_engine|\{_PACKAGE\})", re.MULTILINE
    )
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if importing.search(path.read_text())]
    assert found == [Path("te/library.py")]
    door = ast.parse((PACKAGE / "te/library.py").read_text())
    assert not [
        node for node in door.body if "transformer_engine" in ast.unparse(node) and isinstance(node, ast.Import)
    ]


def test_modules_are_known_by_where_their_classes_come_from() -> None:
    class Derived(fake_engine.Linear):
        pass

    Derived.__module__ = "mine"
    assert library.is_engine_module(Derived(16, 16, device="meta"))
    assert not library.is_engine_module(nn.Linear(2, 2))


class TestRecipes:
    @pytest.fixture(autouse=True)
    def _fake(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
        with fake_engine.installed():
            yield

    @pytest.mark.parametrize("name", RECIPES)
    def test_names_become_the_librarys_recipes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fake_engine, "answers", dict.fromkeys(fake_engine.answers, (True, "")))
        recipe = make_recipe(name)
        assert type(recipe).__name__ == RECIPES[name]
        assert recipe.kind == name
        assert alignment(recipe) == {"mxfp8": 32, "nvfp4": 32}.get(name, 16)
        assert alignment(recipe, quantized=True) == {"mxfp8": 32, "nvfp4": 32, "block": 128}.get(name, 16)

    def test_a_recipe_object_stays_as_it_is(self) -> None:
        recipe = fake_engine.DelayedScaling(amax_history_len=3)
        assert make_recipe(recipe) is recipe

    def test_what_the_device_cannot_is_said_in_the_librarys_words(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"MXFP8\w+ cannot run on a card: Device compute capability 10.0 .*can: 'delayed'"
        ):
            make_recipe("mxfp8")

    def test_unknown_recipes_are_refused_as_soon_as_they_can_be(self) -> None:
        with pytest.raises(ValueError, match=r"recipe='fp8' is no recipe; expected one of 'delayed', 'current'"):
            MFSDPPrecision("transformer-engine", recipe="fp8")
        with pytest.raises(ValueError, match=r"overrides\['head'\]='fp8' is no recipe; expected one of"):
            MFSDPPrecision("transformer-engine", overrides={"head": "fp8"})
        with pytest.raises(
            TypeError, match=r"expected a name or a recipe of transformer_engine\.common\.recipe, got int"
        ):
            make_recipe(8)

    def test_attention_in_fp8_under_delayed_scaling_is_refused(self) -> None:
        with pytest.raises(ValueError, match="attention in FP8 under delayed scaling keeps a history"):
            make_recipe(fake_engine.DelayedScaling(fp8_dpa=True))


def test_options_of_fp8_need_fp8() -> None:
    for options in (
        {"recipe": "block"},
        {"replace_layers": True},
        {"overrides": {"a": "block"}},
    ):
        for precision in ("bf16-mixed", "fp8"):
            with pytest.raises(ValueError, match=rf"'{precision}'\): recipe, replace_layers, .* are about FP8"):
                MFSDPPrecision(precision, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'bf16-mixed'\): keep_high_precision is about FP8"):
        MFSDPPrecision("bf16-mixed", keep_high_precision=["head"])
    with pytest.raises(ValueError, match=r'replace_layers=\'yes\': expected True, False or "auto"'):
        MFSDPPrecision("transformer-engine", replace_layers="yes")  # type: ignore[arg-type]
    wrong: tuple[Any, ...] = ("head", None, [nn.Linear])
    for kept in wrong:
        with pytest.raises(TypeError, match=rf"keep_high_precision={re.escape(repr(kept))}: expected a list"):
            MFSDPPrecision("transformer-engine", keep_high_precision=kept)
    wrong = ("head", ["head"], {0: "block"})
    for overrides in wrong:
        with pytest.raises(TypeError, match=rf"overrides={re.escape(repr(overrides))}: expected recipes by names"):
            MFSDPPrecision("transformer-engine", overrides=overrides)


def test_the_documented_sizes_are_those_of_the_one_table() -> None:
    assert ALIGNMENTS.keys() == RECIPES.keys()
    page = (Path(__file__).parents[2] / "docs/fp8.md").read_text()
    for name, sizes in ALIGNMENTS.items():
        row = f'| `"{name}"` | {sizes.tokens} | {sizes.weights} | {sizes.quantized_weights or "refused"} |'
        assert row in page, row
