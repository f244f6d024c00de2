"""Every Python block of the README and the docs is a whole program, which runs alone, as a reader runs it who copied it into a file.

On a push blocks run in forked children of one process, at night by plain `python`. What a block needs in addition to this package its first
line says (`# Needs a GPU and transformer-engine.`). Those that need GPUs run in tests/gpu/test_snippets.py; here their names are checked.
YAML blocks are configurations, and train one by one.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.nights import NIGHT
from tests.helpers.pages import (
    BLOCKS,
    GPUS,
    PAGES,
    PRESENT,
    PROGRAMS,
    ROOT,
    Block,
    blocks_of,
    imported_packages,
    wrong_names,
)
from tests.helpers.programs import ProgramError, run_forked, run_plain

LANGUAGES = {"bash", "diff", "python", "text", "yaml"}
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
EXPECTED = (
    ".*these keep their present values.*",  # a page says so
    ".*is_gradient_checkpointing. is deprecated.*",  # peft asks transformers for it
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",  # Lightning's command line
    "(?s).*in v5.0.0.*",
)
HERE = [block for block in PROGRAMS if not block.gpus]
ELSEWHERE = [block for block in PROGRAMS if block.gpus]


RUNNERS = [run_forked, pytest.param(run_plain, marks=pytest.mark.nightly)]  # each where it runs blocks


def program(folder: Path, code: str) -> Path:
    path = folder / "program.py"
    path.write_text(code)
    return path


def run(path: Path, *arguments: str) -> str:
    if NIGHT:
        return run_plain(path, *arguments)
    return run_forked(path, *arguments, expected=EXPECTED)


@pytest.mark.parametrize("block", HERE, ids=str)
def test_a_block_runs_alone(block: Block, tmp_path: Path) -> None:
    if block.missing:
        pytest.skip(f"needs {', '.join(block.missing)}")
    # Which of Lightning's two names is used is decided when the package is imported, and the parent of forked children has done so.
    if "LIGHTNING_MFSDP_NAMESPACE" in block.text:
        run_plain(program(tmp_path, block.text))
    else:
        run(program(tmp_path, block.text))


@pytest.mark.parametrize("block", ELSEWHERE, ids=str)
def test_a_block_for_gpus_uses_names_that_exist(block: Block) -> None:
    assert not wrong_names(block.text, block.missing)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_the_first_line_of_a_block_names_the_packages_that_it_imports(block: Block) -> None:
    assert imported_packages(block.text) <= sys.stdlib_module_names | PRESENT | block.packages


def test_the_page_shows_the_job_script_of_the_examples_without_its_comments() -> None:
    shown = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs/checkpoints.md").read_text(), flags=re.DOTALL)
    lines = (ROOT / "examples/slurm.sh").read_text().splitlines(keepends=True)
    assert shown
    assert shown[1] == "".join(line for line in lines if not line.startswith("# "))


def test_the_site_shows_the_whole_width_of_every_program() -> None:
    """Beside the navigation, in a window of 1,280 pixels. `docs/ruff.toml` has the formatter wrap them."""
    pages = [block for block in PROGRAMS if block.page.startswith("docs/")]
    assert [f"{block}: {line}" for block in pages for line in block.text.splitlines() if len(line) > 84] == []


def test_there_are_blocks_for_every_place() -> None:
    assert len(HERE) > 30
    assert {need for block in ELSEWHERE for need in block.needs} & GPUS.keys()


def test_pages_have_no_other_kinds_of_blocks() -> None:
    """A block without a language, or one that is told not to run, might be a fragment of a program."""
    assert {str(block): block.language for block in BLOCKS if block.language not in LANGUAGES} == {}
    assert [page.name for page in PAGES if "<!-- no-run" in page.read_text()] == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import torch\nmodel = Model()", "NameError: name 'Model' is not defined"),
        ("print('before')\nassert 1 > 2", "before\n(.*\n)*AssertionError"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)", "exit code -9"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("import urllib.request\nurllib.request.urlopen('http://pytorch.org')", "needs no network"),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80))", "needs no network"),
    ],
)
def test_a_block_that_fails_is_found(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=message):
        run_forked(program(tmp_path, code))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_block_that_does_not_end_is_ended_with_what_it_started(runner, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = [sys.executable, '-c', 'while True: print(1, flush=True)']\n"
        "subprocess.run(child, stdout=open('alive', 'w'))\n"
    )
    os.mkfifo(tmp_path / "alive")
    pipe = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ProgramError, match="did not end"):
        runner(program(tmp_path, code), timeout_s=5)
    os.set_blocking(pipe, True)
    with open(pipe) as written:  # it ends when nobody is left who could write
        assert set(written.read()) == {"1", "\n"}


ALONE = """
import os, sys
assert "torch" not in sys.modules or not sys.modules["torch"].distributed.is_initialized()
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()
assert {name for name in globals() if not name.startswith("__")} == {"os", "sys"}
assert os.getcwd() == os.path.dirname(os.path.abspath(__file__)) == sys.path[0]
assert os.listdir() in (["program.py"], ["program.py", "program.out"], ["program.out", "program.py"])
assert sys.argv[1:] == ["given"] and __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
print("as if alone")
"""


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_is_set_up_for_a_block(runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert "as if alone" in runner(program(tmp_path, ALONE), "given")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from lightning_mfsdp import fully_shard_all", "lightning_mfsdp has no fully_shard_all"),
        ("from lightning_mfsdp import MFSDPStrategy\nMFSDPStrategy(shards=2)", "MFSDPStrategy: .*'shards'"),
        ("import torch\ntorch.nn.Linear(2, 2, False, None, None, 7)", "torch.nn.Linear: too many"),
        ("import torch\ntorch.nn.Linearly(2)", "torch.nn.Linearly does not exist"),
        ("import lightning.pytorch as pl\npl.Trainer(gpus=2)", "pl.Trainer: .*'gpus'"),
    ],
)
def test_a_wrong_name_is_found_without_running(code: str, wrong: str) -> None:
    (found,) = wrong_names(code, [])
    assert re.search(wrong, found)


def test_names_of_a_package_that_is_not_there_are_not_looked_at() -> None:
    code = "from nowhere.optimizers import Adam\nimport torch\nAdam(torch.nn.Linear(2, 2).parameters(), rate=1)"
    assert wrong_names(code, ["nowhere"]) == []


def test_what_a_block_needs_is_read_from_its_first_line() -> None:
    text = "```python\n# Needs two GPUs, peft and transformer-engine.\nx = 1\n```\n\n  ```text\n  x\n  ```\n"
    first, second = blocks_of("page.md", text)
    assert (str(first), first.gpus, first.packages) == ("page.md:1", 2, {"peft", "transformer_engine"})
    assert (second.line, second.needs, second.gpus) == (6, [], 0)


def test_a_block_that_needs_what_nobody_knows_is_an_error() -> None:
    (block,) = blocks_of("page.md", "```python\n# Needs a gpu.\nx = 1\n```\n")
    with pytest.raises(ValueError, match="a gpu"):
        _ = block.needs


# A user's script: it does not import the package, and its model has classes and names that the pages speak of.
CLI = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from lightning.pytorch.cli import LightningCLI
from tests.lightning.models import Classifier, TinyData
cli = LightningCLI(Classifier, TinyData, save_config_callback=None, seed_everything_default=0)
assert type(cli.trainer.strategy).__name__ == "MFSDPStrategy"
assert cli.trainer.global_step == 2
"""


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_a_yaml_block_trains(block: Block, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(block.text.replace("device: cuda", "device: cpu"))
    options = ["accelerator=cpu", "devices=1", "max_steps=2", "logger=false", "enable_checkpointing=false"]
    run(program(tmp_path, CLI), "fit", "--config=config.yaml", *(f"--trainer.{option}" for option in options))


def test_there_are_yaml_blocks() -> None:
    assert any(block.language == "yaml" for block in BLOCKS)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may name, as GitHub and mkdocs make it of the heading."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_files_lead_somewhere() -> None:
    links = [
        (page, target, anchor)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for target, anchor in LINK.findall(prose(page))
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
