"""docs/reference/options.md and docs/reference/cli.md have every option, with its default and its values, and no other."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.commands import build_parser
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.options.strategy_options import TrainerOptions

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"
SIGNATURE = inspect.signature(MFSDPStrategy).parameters
FABRIC = inspect.signature(MFSDPFabricStrategy).parameters


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    kept = [line for number, line in enumerate(lines) if number not in heads and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


OPTIONS = {row[0].strip("`"): row[1:] for row in rows((REFERENCE / "options.md").read_text())}


def test_the_table_has_exactly_the_options_of_the_strategy() -> None:
    table = rows((REFERENCE / "options.md").read_text())
    assert sorted(row[0] for row in table) == sorted(f"`{name}`" for name in SIGNATURE)
    assert {len(row) for row in table} == {6}
    assert all(all(row) for row in table)


def value_of(text: str) -> object:
    duration = re.fullmatch(r"timedelta\(seconds=(\d+)\)", text)
    return timedelta(seconds=int(duration[1])) if duration else ast.literal_eval(text)


@pytest.mark.parametrize("name", SIGNATURE)
def test_an_option_has_its_default(name: str) -> None:
    assert value_of(OPTIONS[name][0].strip("`")) == SIGNATURE[name].default


@pytest.mark.parametrize("name", SIGNATURE)
def test_an_option_says_whether_fabric_has_it(name: str) -> None:
    if name == "precision_plugin":
        assert OPTIONS[name][4] == "`precision`"
        assert "precision" in FABRIC
    else:
        assert OPTIONS[name][4] == ("yes" if name in FABRIC else "no")


def literals(hint: Any) -> Iterator[object]:
    """Values that a type names."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from literals(part)


def test_options_with_a_choice_have_all_of_it() -> None:
    hints = get_type_hints(TrainerOptions)
    chosen = {name: list(literals(hint)) for name, hint in hints.items() if list(literals(hint))}
    assert len(chosen) > 7
    for name, values in chosen.items():
        assert {str(value) for value in values} <= set(re.findall(r'`"?(\w+)"?`', OPTIONS[name][1])), name


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands that run something, by what is written for them."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, one in action.choices.items():
            yield from commands(one, (*path, name))
    if not inner:
        yield " ".join(path), parser


COMMANDS = dict(commands(build_parser()))


def arguments(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Options by name, positional arguments by what stands for them."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return {(action.option_strings or [str(action.metavar)])[0]: action for action in actions}


def section(command: str) -> list[list[str]]:
    text = (REFERENCE / "cli.md").read_text()
    return rows(text.split(f"\n## {command}\n")[1].split("\n## ")[0])


def test_every_command_has_a_section_and_a_line() -> None:
    text = (REFERENCE / "cli.md").read_text()
    assert len(COMMANDS) > 5
    assert set(re.findall(r"^## (.+)$", text, flags=re.MULTILINE)) == {*COMMANDS, "LightningCLI"}
    for name, parser in COMMANDS.items():
        given = " ".join(action for action in arguments(parser) if not action.startswith("-"))
        assert f"| `lightning-mfsdp {f'{name} {given}'.strip()}` |" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_exactly_the_options_of_its_parser(command: str) -> None:
    shown = [row[0].strip("`").split(" ")[0] for row in section(command)]
    assert sorted(shown) == sorted(arguments(COMMANDS[command]))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_of_a_command_has_its_choices_and_whether_it_takes_a_value(command: str) -> None:
    known = arguments(COMMANDS[command])
    for option, default, meaning in section(command):
        name, _, value = option.strip("`").partition(" ")
        action = known[name]
        assert bool(value) == (bool(action.option_strings) and action.nargs != 0), name
        assert all(f"`{choice}`" in meaning for choice in action.choices or ()), name
        if isinstance(action.default, int) and action.default and action.type is int:
            assert default == str(action.default), name
