"""What a build says about the package: its version, its command, and addresses if the repository has one."""

from __future__ import annotations

import importlib.util
import re
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hatchling.metadata.core import CoreMetadata, ProjectMetadata
from hatchling.plugin.manager import PluginManager

import lightning_mfsdp
from lightning_mfsdp.commands import main

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://github.com/owner/name"
SETTING = 'repository = ""\n'

spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
hatch_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hatch_build)


def metadata(root: Path) -> CoreMetadata:
    return ProjectMetadata(str(root), PluginManager()).core


@pytest.fixture
def with_address(tmp_path: Path) -> Path:
    """A copy of what a build reads, after the one setting was set."""
    for name in ("README.md", "LICENSE", "hatch_build.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "lightning_mfsdp").mkdir()
    shutil.copy(ROOT / "lightning_mfsdp/__init__.py", tmp_path / "lightning_mfsdp")
    settings = (tmp_path / "pyproject.toml").read_text()
    assert settings.count(SETTING) == 1
    (tmp_path / "pyproject.toml").write_text(settings.replace(SETTING, f'repository = "{ADDRESS}/"\n'))
    return tmp_path


def test_the_version_is_that_of_the_package():
    project = ProjectMetadata(str(ROOT), PluginManager())
    assert project.version == lightning_mfsdp.__version__


def test_the_command_is_the_module_as_a_program():
    for name, reference in metadata(ROOT).scripts.items():
        assert name == "lightning-mfsdp"
        assert EntryPoint(name, reference, "console_scripts").load() is main


def test_the_command_says_its_name(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: lightning-mfsdp ")


def test_without_an_address_the_readme_is_as_it_is_and_there_are_no_urls():
    found = metadata(ROOT)
    assert found.urls == {}
    assert found.readme == (ROOT / "README.md").read_text()


def test_with_an_address_every_link_of_the_readme_leads_somewhere(with_address):
    found = metadata(with_address)
    targets = re.findall(r"\]\(([^)]+)\)", found.readme)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    for target in targets:
        if target.startswith(ADDRESS):
            path = re.fullmatch(rf"{ADDRESS}/(?:blob|raw)/main/([^#]+)(#.*)?", target)[1]
            assert (ROOT / path).is_file(), target
    assert found.urls["Repository"] == ADDRESS
    assert all(url.startswith(ADDRESS) for url in found.urls.values())


def test_the_site_reads_the_same_setting(with_address):
    (with_address / "docs").mkdir()
    shutil.copy(ROOT / "docs/hooks.py", with_address / "docs")

    def address(root: Path) -> str:
        spec = importlib.util.spec_from_file_location("hooks", root / "docs/hooks.py")
        hooks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hooks)
        config = type("Config", (), {"repo_url": None, "site_name": "name"})()
        return hooks.on_config(config).repo_url

    assert address(ROOT) == ""
    assert address(with_address) == f"{ADDRESS}/"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("[a](docs/a.md)", f"[a]({ADDRESS}/blob/main/docs/a.md)"),
        ("[`f`](docs/a.md#b)", f"[`f`]({ADDRESS}/blob/main/docs/a.md#b)"),
        ("![a](docs/a.svg)", f"![a]({ADDRESS}/raw/main/docs/a.svg)"),
        ("[a](https://b.org), [c](#d)", "[a](https://b.org), [c](#d)"),
        ("`model[0](x)`", "`model[0](x)`"),
        ("```python\nmodel[0](x)\n```", "```python\nmodel[0](x)\n```"),
    ],
)
def test_relative_links_become_absolute(text, made):
    assert hatch_build.absolute_links(text, ADDRESS) == made
    assert hatch_build.absolute_links(text, "") == text
