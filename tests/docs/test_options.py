"""Signatures, docstrings and the page of the strategies' options are what options/declared.py says of each."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_options", ROOT / "docs/options.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = _script()
SOURCE = script.SOURCE.read_text()
FILES = {"trainer": script.TRAINER, "fabric": script.FABRIC, "page": script.PAGE}


def changed_by(old: str, new: str) -> set[str]:
    """Files that have to be others if the source has another text, which stands in it once."""
    assert SOURCE.count(old) == 1
    files = script.files(SOURCE.replace(old, new))
    return {name for name, path in FILES.items() if path.read_text() != files[path]}


def with_option(field: str, below: str) -> str:
    """The source with one more option of both strategies."""
    return SOURCE.replace("    sharding: ", f'    {field}\n    """{below}\n    """\n\n    sharding: ', 1)


BELOW = """Stirs the pot.

    Section: Speed
    Values: a number of spoons
    Change it: if it sticks
    More: [soup](soup.md)"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_the_script_writes(name: str) -> None:
    path = FILES[name]
    assert path.read_text() == script.files(SOURCE)[path], (
        "options are edited in lightning_mfsdp/options/declared.py, and then: python docs/options.py"
    )


@pytest.mark.parametrize(
    ("old", "new", "files"),
    [
        ("    outer: int = 1", "    outer: int | None = 1", {"trainer", "fabric"}),
        ("    outer: int = 1", "    outer: int = 2", {"trainer", "fabric", "page"}),
        ("    outer: int = 1", "    outermost: int = 1", {"trainer", "fabric", "page"}),
        ("    cuda_graph: bool = False", "    cuda_graph: bool = True", {"trainer", "page"}),
        ('"""The same as `outer`.', '"""What `outer` is.', {"trainer"}),
        ("As in `MFSDPStrategy`, at each save.", "As there.", {"fabric"}),
        ("Change it: never: use `outer`", "Change it: use `outer`", {"page"}),
        ('Literal["popen", "fork"]', 'Literal["popen", "fork", "spawn"]', {"trainer", "fabric", "page"}),
    ],
)
def test_a_change_of_an_option_changes_each_file_that_repeats_it(old: str, new: str, files: set[str]) -> None:
    assert changed_by(old, new) == files


def test_a_new_option_comes_first_or_last_in_all_places() -> None:
    files = script.files(with_option('spoons: int | Literal["auto"] = 3', BELOW))
    for name, text in (("trainer", "Stirs the pot."), ("fabric", "As in `MFSDPStrategy`.")):
        made = files[FILES[name]]
        assert f'{script.BEGINS}        spoons: int | Literal["auto"] = 3,\n        sharding: ' in made
        assert f"    Args:\n        spoons: {text}\n        sharding: " in made
    table = files[script.PAGE].split("\n## Speed\n")[1].split("\n\n## ")[0]
    assert table.splitlines()[-1] == "| `spoons` | `3` | a number of spoons | if it sticks | [soup](soup.md) | yes |"


def test_an_option_of_the_trainer_alone_is_not_fabrics() -> None:
    own = [one for one in script.declared(SOURCE) if not one.of_both]
    assert [one.name for one in own] == ["cuda_graph", "free_gradients", "global_batch_size", "async_save"]
    page, fabric = script.PAGE.read_text(), script.FABRIC.read_text()
    assert all(one.row.endswith("| no |") and one.row in page for one in own)
    assert not any(one.parameter in fabric for one in own)


def test_an_option_that_is_removed_goes_from_all_places() -> None:
    start, end = SOURCE.index("    outer_size: "), SOURCE.index("    context: ")
    for text in script.files(SOURCE[:start] + SOURCE[end:]).values():
        assert "outer_size" not in text


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("trainer", "        outer: int = 1,\n", "        outer: int = 2,\n"),
        ("trainer", "        outer: int = 1,\n", ""),
        ("trainer", "        outer: int = 1,\n", "        outer: int = 1,\n        inner: int = 1,\n"),
        ("trainer", "        outer_size: The same as `outer`.\n", "        outer_size: Another one.\n"),
        ("fabric", "        outer: As in `MFSDPStrategy`.\n", ""),
        ("fabric", "        outer: As in `MFSDPStrategy`.\n", "        inner: More.\n        outer: As there.\n"),
        ("page", "| `outer` | `1` |", "| `outer` | `2` |"),
        ("page", "| `outer` | `1` |", "| `inner` | `1` |"),
    ],
)
def test_an_edit_by_hand_is_undone(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = FILES[name].read_text()
    assert text.count(old) == 1
    edited = tmp_path / FILES[name].name
    edited.write_text(text.replace(old, new))
    monkeypatch.setattr(script, name.upper(), edited)
    made = script.files(SOURCE)[edited]
    # The row of an option that the page has lost is a new one, and the last.
    assert sorted(made.splitlines()) == sorted(text.splitlines()) if name == "page" else made == text


def test_what_is_lightnings_stays_where_it_is() -> None:
    names = script.lightnings(script.TRAINER.read_text())
    assert names == ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"]
    page = script.page(script.PAGE.read_text(), [], names)
    assert re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE) == [
        *("precision_plugin", "checkpoint_io", "accelerator", "parallel_devices", "cluster_environment"),
    ]


def test_rows_keep_the_order_of_the_page() -> None:
    text = script.PAGE.read_text()
    first, second = (next(line for line in text.splitlines() if f"| `{name}` |" in line) for name in ("data", "outer"))
    turned = text.replace(f"{first}\n{second}\n", f"{second}\n{first}\n")
    assert turned != text
    assert script.page(turned, script.declared(SOURCE), script.lightnings(script.TRAINER.read_text())) == turned


def test_a_strategy_imports_what_an_option_needs() -> None:
    source = with_option("kitchen: Path | nn.Module | None = None", BELOW).replace(
        "from typing import", "from pathlib import Path\nfrom typing import", 1
    )
    files = script.files(source)
    assert "annotations\n\nfrom pathlib import Path\n" in files[script.TRAINER]
    assert files[script.TRAINER].count("from torch import Tensor, nn\n") == 1
    assert files[script.FABRIC].count("import Path\n") == 1  # it has it


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        ('Literal["a", "b"]', '`"a"`, `"b"`'),
        ("bool", "`True`, `False`"),
        ("bool | Literal['auto'] | None", '`True`, `False`, `"auto"`, `None`'),
        ("Literal[1, 'x']", '`1`, `"x"`'),
        ("int | None", ""),
        ("str", ""),
        ("Sequence[bool]", ""),
    ],
)
def test_values_are_those_of_a_type_that_names_all(annotation: str, shown: str) -> None:
    assert script.values(script.ast.parse(annotation, mode="eval").body) == shown


@pytest.mark.parametrize(
    ("field", "below", "message"),
    [
        ("spoons: int = 3", "Stirs.", "spoons: expected a paragraph and then Section, Values, Change it, More"),
        ("spoons: int = 3", BELOW.replace("    Values: a number of spoons\n", ""), "and then Values; see"),
        ("spoons: int = 3", BELOW.replace("Change it", "Change"), "and then Change it; see"),
        ("spoons: int = 3", BELOW.replace("    Section", "    It is hot.\n    Section"), "and then labels; see"),
        ("spoons: int", BELOW, "spoons: an option has a default, and a text below it"),
        ("spoons: int = 3\n    forks: int = 2", BELOW, "spoons: an option has a default, and a text below it"),
        ("spoons: int = 3", BELOW.replace("Speed", "Soup"), r"options\.md has no table under 'Soup'"),
        (f"spoons: Literal[{', '.join(map(repr, range(50)))}] = 3", BELOW, "spoons: type and default do not fit on a"),
        ("spoons: Literal[\n        3\n    ] = 3", BELOW, "spoons: type and default do not fit on a line"),
    ],
)
def test_an_option_that_says_too_little_is_refused(field: str, below: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.files(with_option(field, below))


def test_a_signature_without_its_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="a signature has lost its comments"):
        script.strategy(script.TRAINER.read_text().replace(script.ENDS, ""), [], {}, {})
