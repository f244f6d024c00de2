"""Every Python block of the README and the docs runs: page by page, top to bottom, as rank 0 of a world of one.

A block is left out when the line before it is `<!-- no-run: reason -->`. YAML blocks are configurations, and train one by one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What tells a process that somebody launched it as a rank; a training in the process of the tests leaves it behind.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SKIP = re.compile(r"<!-- no-run: \S.* -->")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


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


def script(page: Path) -> str:
    """A program that runs the page's blocks in one namespace; a traceback names the page and its line."""
    steps = "\n".join(
        f"exec(compile({chr(10) * (line - 1) + code!r}, {str(page)!r}, 'exec'), names)"
        for line, code in python_blocks(page)
    )
    return (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "names = {'__name__': '__main__'}\n"
        f"{steps}\n"
        "dist.destroy_process_group()\n"
    )


def run_python(code: str, *arguments: str, folder: Path) -> None:
    """In a process of its own on the CPU, which nobody launched as a rank."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in LAUNCHED},
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_python(script(page), folder=tmp_path)


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
    run_python(CLI, "fit", "--config=config.yaml", *(f"--trainer.{option}" for option in options), folder=tmp_path)


def test_there_are_yaml_blocks() -> None:
    assert YAML_BLOCKS


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_has_exactly_two_setup_commands_of_one_line() -> None:
    setup = (ROOT / "README.md").read_text().split("## Set up")[1].split("\n## ")[0]
    commands = re.findall(r"```bash\n(.*?)```", setup, flags=re.DOTALL)
    assert len(commands) == 2
    assert all(len(command.strip().splitlines()) == 1 for command in commands)
    assert "examples/pretrain.py" in commands[0]
    assert commands[1].strip().endswith("-m pytest -n 2 --dist loadfile --no-loadscope-reorder")
