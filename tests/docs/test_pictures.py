"""Pictures of the docs are well-formed, named for readers who cannot see them, shown on a page, and true."""

from __future__ import annotations

import ast
import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
PAGES = {page: page.read_text() for page in DOCS.rglob("*.md")}
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_with(page: Path, name: str) -> Any:
    """A function that a Python block of a page defines; nothing else of the block runs."""
    (block,) = re.findall(rf"```python\n((?:(?!```)[\s\S])*?def {name}\([\s\S]*?)```", page.read_text())
    tree = ast.parse(block)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(page), "exec"), names)
    return names[name]


def test_there_is_a_picture_for_each_concept() -> None:
    assert [picture.stem for picture in PICTURES] == ["axes", "mesh", "precision", "step", "strategies"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_a_titled_drawing_that_needs_nothing_else(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    assert root.tag == f"{SVG}svg"
    assert root[0].tag == f"{SVG}title"
    assert len(root[0].text or "") > 20
    assert root.get("role") == "img"
    links = [value for part in root.iter() for name, value in part.attrib.items() if name.endswith("href")]
    ids = {part.get("id") for part in root.iter()}
    assert all(link.removeprefix("#") in ids for link in links)
    assert not re.search("<script|<style|@import|data:|xlink", picture.read_text())


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_can_be_read_on_a_dark_page(picture: Path) -> None:
    """Everything lies on a white rectangle of the size of the picture."""
    root = ET.parse(picture).getroot()
    x, y, width, height = root.get("viewBox", "").split()
    ground = next(part for part in root if part.tag == f"{SVG}rect")
    assert (ground.get("x", "0"), ground.get("y", "0"), ground.get("width"), ground.get("height")) == (
        x,
        y,
        width,
        height,
    )
    assert ground.get("fill") == "#ffffff"


def test_every_picture_is_on_a_page_with_words_for_it() -> None:
    shown = {
        (page.parent / target).resolve(): words for page, text in PAGES.items() for words, target in SHOWN.findall(text)
    }
    for picture in PICTURES:
        assert len(shown[picture]) > 20


def test_the_picture_of_strategies_is_what_the_script_writes() -> None:
    assert script().PICTURE.read_text() == script().picture(), "run: python docs/pictures.py"


@pytest.mark.parametrize("sharding", range(4))
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_picture_of_strategies_has_the_numbers_of_the_page(sharding: int, ranks: int) -> None:
    model_gib = block_with(DOCS / "strategies.md", "model_gib")
    held = script().bytes_per_parameter(sharding, ranks)
    assert sum(held.values()) == pytest.approx(model_gib(sharding, 2**30, ranks))
