"""Writes what repeats the options of the strategies: `python docs/options.py`.

lightning_mfsdp/options/declared.py states each option once: its name, type and default, and in the text below them what it does. From
there come the signatures of both strategies, the Args of their docstrings, and the rows of docs/reference/options.md. Lightning's own
arguments stand behind the options, and stay as they are. The order of rows is the page's own; a new one is the last of its table.

The text below an option is a paragraph for the docstring, and then:

    Fabric: The same for Fabric's docstring, if it is another one.
    Section: The heading of the table that has its row.
    Values: A cell of the row; may be left out if the type says it all.
    Change it: A cell: when to change it.
    More: A cell: where to read on.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "lightning_mfsdp"
SOURCE = PACKAGE / "options/declared.py"
TRAINER = PACKAGE / "trainer/strategy.py"
FABRIC = PACKAGE / "fabric/strategy.py"
PAGE = DOCS / "reference/options.md"

# Classes of the source: the options of both strategies, and those that Fabric's lacks.
BOTH, TRAINERS = "DeclaredOptions", "DeclaredTrainerOptions"
LABELS = ("Fabric", "Section", "Values", "Change it", "More")

# What a signature has before its options, and behind them.
BEGINS = "        # Options, from options/declared.py: python docs/options.py writes them.\n"
ENDS = "        # Lightning's own.\n"
# What ruff leaves on one line, and what it accepts of prose.
CODE_WIDTH, PROSE_WIDTH = 120, 140

ENTRY = re.compile(r"^        (\w+): .*\n(?: {12}.*\n)*", flags=re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """What the source says of one; `in_fabric` is its text there."""

    name: str
    type: str
    default: str
    text: str
    in_fabric: str
    section: str
    values: str
    change_it: str
    more: str
    of_both: bool

    @property
    def parameter(self) -> str:
        """Its line of a signature."""
        line = f"        {self.name}: {self.type} = {self.default},\n"
        if len(line) > CODE_WIDTH + 1 or line.count("\n") > 1:
            raise ValueError(
                f"{self.name}: type and default do not fit on a line; give the type a name, as UnitsArgument"
            )
        return line

    @property
    def row(self) -> str:
        """Its line of a table."""
        cells = (
            f"`{self.name}`",
            f"`{self.default}`",
            self.values,
            self.change_it,
            self.more,
        )
        return f"| {' | '.join(cells)} | {'yes' if self.of_both else 'no'} |"


def declared(source: str) -> list[Option]:
    """The options that a source declares, those of both strategies first.

    Raises:
        ValueError: An option says too little.
    """
    classes = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    lines = source.encode().splitlines(keepends=True)
    return [
        option(lines, field, below, of_both=name == BOTH)
        for name in (BOTH, TRAINERS)
        for field, below in zip(
            classes[name].body, [*classes[name].body[1:], None], strict=True
        )
        if isinstance(field, ast.AnnAssign)
    ]


def option(
    lines: Sequence[bytes],
    field: ast.AnnAssign,
    below: ast.stmt | None,
    *,
    of_both: bool,
) -> Option:
    """That of a field, and of what stands below it."""
    name, default = ast.unparse(field.target), field.value
    said = (
        below.value.value
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        else None
    )
    if default is None or not isinstance(said, str):
        raise ValueError(
            f"{name}: an option has a default, and a text below it that says what it does"
        )
    text, _, labeled = inspect.cleandoc(said).partition("\n\n")
    unlabeled, *parts = re.split(
        rf"^({'|'.join(LABELS)}): ", labeled, flags=re.MULTILINE
    )
    cells = {
        label: on_one_line(cell)
        for label, cell in zip(parts[::2], parts[1::2], strict=True)
    }
    cells.setdefault("Fabric", "As in `MFSDPStrategy`.")
    cells.setdefault("Values", values(field.annotation))
    missing = [label for label in LABELS if not cells.get(label)]
    if missing or unlabeled.strip():
        raise ValueError(
            f"{name}: expected a paragraph and then {', '.join(missing) or 'labels'}; see docs/options.py"
        )
    return Option(
        name=name,
        type=in_source(lines, field.annotation),
        default=in_source(lines, default),
        text=on_one_line(text),
        in_fabric=cells["Fabric"],
        section=cells["Section"],
        values=cells["Values"],
        change_it=cells["Change it"],
        more=cells["More"],
        of_both=of_both,
    )


def in_source(lines: Sequence[bytes], node: ast.expr) -> str:
    """As `ast.get_source_segment`, which divides the whole source into lines for every node."""
    own = list(lines[node.lineno - 1 : node.end_lineno])
    own[-1] = own[-1][: node.end_col_offset]
    own[0] = own[0][node.col_offset :]
    return b"".join(own).decode()


def on_one_line(text: str) -> str:
    """Words with a space between them."""
    return " ".join(text.split())


def values(annotation: ast.expr) -> str:
    """Those of a type that is made of literals, `bool` and `None` alone; "" for another one."""
    found = list(choices(annotation))
    return "" if None in found else ", ".join(f"`{value}`" for value in found)


def choices(annotation: ast.expr) -> Iterator[str | None]:
    """Values that a type names, as they are written; `None` stands for those that it does not name."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from choices(left)
            yield from choices(right)
        case ast.Subscript(
            value=ast.Name("Literal"), slice=ast.Tuple(elts=constants)
        ):
            yield from map(written, constants)
        case ast.Subscript(value=ast.Name("Literal"), slice=constant):
            yield written(constant)
        case ast.Name("bool"):
            yield from ("True", "False")
        case ast.Constant(None):
            yield "None"
        case _:
            yield None


def written(constant: ast.expr) -> str:
    """A literal, with the quotes of this code."""
    value = ast.literal_eval(constant)
    return json.dumps(value) if isinstance(value, str) else repr(value)


def strategy(
    text: str,
    options: Iterable[Option],
    texts: Mapping[str, str],
    imports: Mapping[str, str],
) -> str:
    """The file of a strategy, with these options.

    Args:
        text: The file as it is.
        options: Of its signature.
        texts: Of its docstring, by option.
        imports: What the source imports: lines by name.
    """
    head, begins, rest = text.partition(BEGINS)
    _, ends, tail = rest.partition(ENDS)
    if not begins or not ends:
        raise ValueError(
            f"a signature has lost its comments {BEGINS.strip()!r} and {ENDS.strip()!r}"
        )
    head, opens, documented = head.partition("    Args:\n")
    arguments, closes, constructor = documented.partition("\n    Raises:\n")
    entries = [entry(name, said) for name, said in texts.items()]
    of_lightning = lightnings(text)
    entries += [
        found[0] for found in ENTRY.finditer(arguments) if found[1] in of_lightning
    ]
    parameters = "".join(option.parameter for option in options)
    made = "".join(
        (head, opens, *entries, closes, constructor, begins, parameters, ends, tail)
    )
    return with_imports(made, parameters, imports)


def lightnings(text: str) -> list[str]:
    """Names of the arguments of a strategy that are no options of ours."""
    return re.findall(
        r"^        (\w+): ",
        text.partition(ENDS)[2].partition("    ) -> None:\n")[0],
        flags=re.MULTILINE,
    )


def entry(name: str, text: str) -> str:
    """Of an argument, in a docstring."""
    lines = textwrap.wrap(
        f"{name}: {text}",
        PROSE_WIDTH - 8,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return textwrap.indent("\n".join(lines), " " * 8) + "\n"


def imported(source: str) -> dict[str, str]:
    """A line for every name that a file imports."""
    return {
        alias.asname or alias.name: ast.unparse(
            ast.ImportFrom(node.module, [alias], node.level)
            if isinstance(node, ast.ImportFrom)
            else ast.Import([alias])
        )
        for node in ast.parse(source).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def with_imports(text: str, parameters: str, imports: Mapping[str, str]) -> str:
    """A file that imports the names in its parameters. New lines come first; `ruff check --fix` sorts them in."""
    used = {
        node.id
        for node in ast.walk(ast.parse(f"def f(\n{parameters}): ..."))
        if isinstance(node, ast.Name)
    }
    lacking = sorted(
        imports[name] for name in used & imports.keys() - imported(text).keys()
    )
    first = "from __future__ import annotations\n\n"
    return text.replace(first, first + "".join(f"{line}\n" for line in lacking), 1)


def page(text: str, options: Iterable[Option], kept: Iterable[str]) -> str:
    """docs/reference/options.md with the rows of these options, and as they are those of the arguments that are kept."""
    rows: dict[str, dict[str, str]] = {}
    for one in options:
        rows.setdefault(one.section, {})[f"`{one.name}`"] = one.row
    of_lightning = {f"`{name}`" for name in kept}
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    made = [head]
    for section in sections:
        before, rule, table = section.partition("|---|---|---|---|---|---|\n")
        if not rule:
            made.append(section)
            continue
        own = rows.pop(section.partition("\n")[0].removeprefix("## "), {})
        lines = table.splitlines()
        there = {
            line.split(" | ")[0].removeprefix("| "): line
            for line in lines
            if line.startswith("| ")
        }
        inside = [own[name] for name in there if name in own]
        inside += [row for name, row in own.items() if name not in there]
        inside += [line for name, line in there.items() if name in of_lightning]
        after = [line for line in lines if not line.startswith("| ")]
        made.append(before + rule + "\n".join([*inside, *after]) + "\n")
    if rows:
        raise ValueError(
            f"{PAGE.name} has no table under {', '.join(map(repr, rows))}"
        )
    return "".join(made)


def files(source: str) -> dict[Path, str]:
    """What each file that repeats options has to be, for a text of the source."""
    options, imports = declared(source), imported(source)
    of_both = [one for one in options if one.of_both]
    trainer, fabric = TRAINER.read_text(), FABRIC.read_text()
    return {
        TRAINER: strategy(
            trainer, options, {one.name: one.text for one in options}, imports
        ),
        FABRIC: strategy(
            fabric, of_both, {one.name: one.in_fabric for one in of_both}, imports
        ),
        PAGE: page(PAGE.read_text(), options, lightnings(trainer)),
    }


if __name__ == "__main__":
    for path, text in files(SOURCE.read_text()).items():
        path.write_text(text)
