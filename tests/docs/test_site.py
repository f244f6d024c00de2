"""The site that mkdocs makes has every page and every public name, and no link that leads out of it to nowhere."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import lightning_mfsdp

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {
    "lightning_mfsdp": ("loop.md", "strategy.md", "recompute.md"),
    "lightning_mfsdp.callbacks": ("callbacks.md",),
    "lightning_mfsdp.checkpoint": ("checkpoint.md",),
    "lightning_mfsdp.context_parallel": ("context_parallel.md",),
    "lightning_mfsdp.tensor_parallel": ("tensor_parallel.md",),
    "lightning_mfsdp.fabric": ("fabric.md",),
    "lightning_mfsdp.moe": ("moe.md",),
    "lightning_mfsdp.moe.saving": ("moe.md",),
    "lightning_mfsdp.moe.stash": ("moe.md",),
    "lightning_mfsdp.mtp": ("mtp.md",),
    "lightning_mfsdp.ops": ("ops.md",),
    "lightning_mfsdp.optim": ("optim.md",),
    "lightning_mfsdp.ray": ("ray.md",),
    "lightning_mfsdp.recompute": ("recompute.md",),
    "lightning_mfsdp.te": ("te.md",),
}
# What rooms offer to each other alone.
NOT_SHOWN = {
    *("as_recompute", "has_saver", "recomputed"),
    *(
        "autocast_snapshot",
        "checkpoint",
        "enter_around",
        "has_engine_modules",
        "keep_scales_in_backward",
        "quantizes_now",
    ),
    *("refuse_prepared", "scales_are_delayed", "wrong_saver_because"),
}


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation():
    named = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted([*pages, "contributing.md"])


@pytest.mark.parametrize("module", REFERENCE)
def test_every_public_name_is_in_the_reference(module):
    text = "".join((ROOT / "docs/reference" / page).read_text() for page in REFERENCE[module])
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)}
    assert set(importlib.import_module(module).__all__) - NOT_SHOWN <= shown
    for name in re.findall(rf"^::: {module}\.(\w+)$", text, flags=re.MULTILINE):
        assert name in importlib.import_module(module).__all__


def test_the_reference_has_every_room_that_the_package_shows():
    rooms = {name for name in dir(lightning_mfsdp) if inspect.ismodule(getattr(lightning_mfsdp, name))}
    assert rooms == {module.split(".")[1] for module in REFERENCE if "." in module}


@pytest.mark.parametrize(
    ("address", "link", "made"),
    [
        ("", "[a test](../../tests/x.py)", "a test"),
        ("", "[`f`](../../tests/x.py#here)", "`f`"),
        ("", "[a page](../moe.md#sharding)", "[a page](../moe.md#sharding)"),
        ("", "[here](#sharding), [there](https://pytorch.org)", "[here](#sharding), [there](https://pytorch.org)"),
        ("", "![a picture](../benchmarks/x.png)", "![a picture](../benchmarks/x.png)"),
        ("https://host/us/it", "[a test](../../tests/x.py)", "[a test](https://host/us/it/blob/main/tests/x.py)"),
    ],
)
def test_links_out_of_the_docs_lead_to_the_repository_if_it_has_an_address(address, link, made):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="design/x.md"))
    assert hooks().on_page_markdown(link, page=page, config=SimpleNamespace(repo_url=address)) == made


def test_contributing_is_a_page_whose_links_are_those_of_the_file():
    text = hooks().contributing()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="contributing.md"))
    shown = hooks().on_page_markdown(text, page=page, config=SimpleNamespace(repo_url="https://host/us/it"))
    assert "](life_of_a_parameter.md)" in shown
    assert "[CHANGELOG.md](https://host/us/it/blob/main/CHANGELOG.md)" in shown
    assert "](docs/" not in shown


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script src="https://host/x.js"></script>', ["https://host/x.js"]),
        ('<link rel="stylesheet" href="//host/x.css">', ["//host/x.css"]),
        ('<p><img alt="x" src="http://host/x.png"></p>', ["http://host/x.png"]),
        ('<script src="../x.js"></script><link rel="icon" href="x.png"><img src="data:image/png;base64,AA">', []),
        ('<a href="https://pytorch.org">x</a><link rel="canonical" href="https://host/x.html">', []),
        ('<code>&lt;script src="https://host/x.js"&gt;</code>', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(html, loaded):
    assert hooks().loaded_from_elsewhere(html) == loaded


def test_a_site_that_loads_from_elsewhere_is_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<script src="x.js"></script>')
    hooks().on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))
    (tmp_path / "sub/page.html").write_text('<script src="https://host/x.js"></script>')
    with pytest.raises(ValueError, match=r"sub/page\.html: https://host/x\.js"):
        hooks().on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))


def test_the_site_has_nothing_that_the_theme_would_load_from_elsewhere():
    """Fonts, and what the plugin "offline" adds unless one of that name is there; the hook above looks at what was built."""
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert "\n  font: false\n" in configuration
    (script,) = re.findall(r"^  polyfills: \[(.*iframe-worker.*)\]", configuration, flags=re.MULTILINE)
    assert (ROOT / "docs" / script).is_file()
