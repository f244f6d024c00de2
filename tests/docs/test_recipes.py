"""docs/large_runs.md: GiB of its recipes are those that `lightning-mfsdp memory` computes for the configurations in examples/recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mfsdp.commands import main
from tests.docs.test_reference_tables import rows

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.joinpath("docs/large_runs.md").read_text().split("## Recipes by size")[1]
COMMANDS = {row[0]: row[1:] for row in rows(TEXT.split("| GiB of each GPU")[0])}
HEAD = next(line for line in TEXT.splitlines() if line.startswith("| GiB of each GPU")).strip("|").split("|")
COLUMNS = [cell.strip() for cell in HEAD[1:]]
FIGURES = {row[0].strip("*"): row[1:] for row in rows(TEXT[TEXT.index("| GiB of each GPU") :].split("\n\n")[0])}
FEW = (2, 4)  # layers


def test_every_recipe_has_a_column_and_every_configuration_is_used() -> None:
    assert list(COMMANDS) == COLUMNS
    used = {config.strip("`") for config, _ in COMMANDS.values()}
    assert used == {file.name for file in (ROOT / "examples/recipes").iterdir()}


def facts(config: Path, options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["memory", str(config), *options.split(), "--quick", "--json"])
    assert code == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_the_first_column_is_what_models_of_fewer_layers_take_and_the_same_for_each_further_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At night it is computed with all layers."""
    name, options = (cell.strip("`") for cell in COMMANDS[COLUMNS[0]])
    whole = json.loads((ROOT / "examples/recipes" / name).read_text())
    peaks = []
    for layers in FEW:
        config = tmp_path / f"{layers}.json"
        config.write_text(json.dumps({**whole, "num_hidden_layers": layers}))
        peaks.append(facts(config, options, capsys)["peak"])
    further = (whole["num_hidden_layers"] - FEW[1]) / (FEW[1] - FEW[0])
    computed = {kind: size + further * (size - peaks[0][kind]) for kind, size in peaks[1].items()}
    computed["total"] = sum(computed.values())
    shown = {kind: cells[0] for kind, cells in FIGURES.items() if cells[0] != "-"}
    assert shown == {kind: f"{size / 2**30:.2f}" for kind, size in computed.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", COLUMNS)
def test_the_page_has_the_figures_of_the_command(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, options = (cell.strip("`") for cell in COMMANDS[recipe])
    found = facts(ROOT / "examples/recipes" / config, options, capsys)
    computed = {**found["peak"], "total": found["total"]} | ({"host memory": found["host"]} if found["host"] else {})
    shown = {kind: cells[COLUMNS.index(recipe)] for kind, cells in FIGURES.items()}
    assert shown == {kind: f"{computed[kind] / 2**30:.2f}" if kind in computed else "-" for kind in shown}
    assert computed.keys() <= shown.keys()
