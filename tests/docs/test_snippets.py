"""Every Python block of the README and the docs runs: page by page, top to bottom, as rank 0 of a world of one.

A block is left out when the line before it is `<!-- no-run: reason -->`. YAML blocks are configurations, and train one by one.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What tells a process that somebody launched it as a rank; a training in the process of the tests leaves it behind.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SKIP = re.compile(r"<!-- no-run: \S.* -->")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, code) of each block that is to run."""
    blocks: list[tuple[int, str]] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    for index, line in enumerate(lines):
        if start is None and line.strip() == "```python":
            start = index + 1
        elif start is not None and line.strip() == "```":
            before = next((text for text in reversed(lines[: start - 1]) if text.strip()), "")
            if not SKIP.fullmatch(before.strip()):
                blocks.append((start + 1, "\n".join(lines[start:index])))
            start = None
    assert start is None, f"{page.name}: a block that begins at line {start} never ends"
    return blocks


def run_blocks(
    rank: int, world_size: int, blocks: list[tuple[int, str]], source: str, folder: Path, *argv: str
) -> None:
    """Run blocks in one namespace, in a process of its own which nobody launched as a rank; a traceback names `source` and its line."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.argv = [source, *argv]
    names = {"__name__": "__main__"}
    for line, code in blocks:
        exec(compile("\n" * (line - 1) + code, source, "exec"), names)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_distributed(run_blocks, 1, python_blocks(page), str(page), tmp_path, apart=True)


# A user's script: it does not import the package, and its model has classes and names that the pages speak of.
CLI = """
from lightning.pytorch.cli import LightningCLI
from tests.lightning.models import Classifier, TinyData
cli = LightningCLI(Classifier, TinyData, save_config_callback=None)
assert type(cli.trainer.strategy).__name__ == "MFSDPStrategy"
assert cli.trainer.global_step == 2
"""
YAML_BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("block", range(len(YAML_BLOCKS)))
def test_a_yaml_block_trains(block: int, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(YAML_BLOCKS[block].replace("device: cuda", "device: cpu"))
    options = ["accelerator=cpu", "devices=1", "max_steps=2", "logger=false", "enable_checkpointing=false"]
    arguments = ["fit", "--config=config.yaml", *(f"--trainer.{option}" for option in options)]
    run_distributed(run_blocks, 1, [(1, CLI)], "cli", tmp_path, *arguments, apart=True)


def test_there_are_yaml_blocks() -> None:
    assert YAML_BLOCKS


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may name, as GitHub and mkdocs make it of the heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_files_lead_somewhere() -> None:
    links = [
        (page, target, anchor)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target, anchor in LINK.findall(page.read_text())
        if "://" not in target
    ]
    assert any(anchor for _, _, anchor in links), "the check sees nothing"
    missing = []
    for page, target, anchor in links:
        file = page.parent / target if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not missing, "\n".join(missing)


def test_the_readme_has_exactly_two_setup_commands_of_one_line() -> None:
    setup = (ROOT / "README.md").read_text().split("## Set up")[1].split("\n## ")[0]
    commands = re.findall(r"```bash\n(.*?)```", setup, flags=re.DOTALL)
    assert len(commands) == 2
    assert all(len(command.strip().splitlines()) == 1 for command in commands)
    assert "examples/pretrain.py" in commands[0]
    assert commands[1].strip().endswith("-m pytest -n 2 --dist loadfile --no-loadscope-reorder")
