"""docs/large_runs.md: GiB of its recipes are those that `lightning-mfsdp memory` computes for the configurations in examples/recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_mfsdp.commands import main
from tests.docs.test_reference_tables import rows

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.joinpath("docs/large_runs.md").read_text().split("## Recipes by size")[1]
COMMANDS = {row[0]: row[1:] for row in rows(TEXT.split("| GiB of each GPU")[0])}
HEAD = next(line for line in TEXT.splitlines() if line.startswith("| GiB of each GPU")).strip("|").split("|")
COLUMNS = [cell.strip() for cell in HEAD[1:]]
FIGURES = {row[0].strip("*"): row[1:] for row in rows(TEXT[TEXT.index("| GiB of each GPU") :].split("\n\n")[0])}


def test_every_recipe_has_a_column_and_every_configuration_is_used() -> None:
    assert list(COMMANDS) == COLUMNS
    used = {config.strip("`") for config, _ in COMMANDS.values()}
    assert used == {file.name for file in (ROOT / "examples/recipes").iterdir()}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.nightly] * (name != COLUMNS[0])) for name in COLUMNS]
)
def test_the_page_has_the_figures_of_the_command(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, options = (cell.strip("`") for cell in COMMANDS[recipe])
    code = main(["memory", str(ROOT / "examples/recipes" / config), *options.split(), "--quick", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    computed = {**facts["peak"], "total": facts["total"]} | ({"host memory": facts["host"]} if facts["host"] else {})
    shown = {kind: cells[COLUMNS.index(recipe)] for kind, cells in FIGURES.items()}
    assert shown == {kind: f"{computed[kind] / 2**30:.2f}" if kind in computed else "-" for kind in shown}
    assert computed.keys() <= shown.keys()
