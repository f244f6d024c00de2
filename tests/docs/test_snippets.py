"""Every Python block of the README and the docs runs: page by page, top to bottom, as rank 0 of a world of one.

A block is left out when the line before it is `<!-- no-run: reason -->`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", script(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


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
    assert commands[1].strip().endswith("-m pytest")


MESSAGE = re.compile(r"^\*\*`(.+)`\*\*$", flags=re.MULTILINE)


def texts_in_the_package() -> list[str]:
    """Every string in the package's code, with `…` for what is filled in."""
    found = []
    for path in sorted((ROOT / "lightning_mfsdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_in_troubleshooting_is_one_the_package_can_raise() -> None:
    texts = texts_in_the_package()
    messages = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text())
    assert len(messages) > 20
    stale = [message for message in messages if not any(message in text for text in texts)]
    assert not stale
