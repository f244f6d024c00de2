"""The report of moe.py: tables, floors that were reached or missed, and the pages in use over a step.

python examples/benchmark/moe_report.py mfsdp-runs/moe    # writes report.md and pages.png again, from results.json and pages.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from lightning_mfsdp.callbacks.paged_stash import draw
from lightning_mfsdp.moe.stash import Occupancy, PageKind

__all__ = ["PAGES", "Floor", "floors", "short", "write_report"]

Result = dict[str, Any]
OURS, THEIRS = ("mfsdp", "mfsdp-symm"), ("fsdp2", "fsdp2-tuned")
PAGES = "pages.json"
_GIB = 2**30
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Something that was promised.

    Attributes:
        what: In words.
        wanted: In words.
        found: In words; "not measured" where a figure is missing.
        reached: `None` where it was not measured.
    """

    what: str
    wanted: str
    found: str
    reached: bool | None


def floors(results: Sequence[Result]) -> list[Floor]:
    """All that were promised, for each length of buffers."""
    found: list[Floor] = []
    for capacity in sorted({one["capacity"] for one in results if one["kind"] == "experts"}):
        for recorded in (False, True):
            rows = {
                one["name"]: one
                for one in results
                if (one["kind"], one["capacity"], one.get("recorded")) == ("experts", capacity, recorded)
            }
            if rows:
                found += _floors_of_stash(rows, f"buffers x {capacity:g}", recorded=recorded)
    found.append(_floor_of_sharding(results))
    return found


def _floors_of_stash(rows: dict[str, Result], where: str, *, recorded: bool) -> list[Floor]:
    ordinary, stash = rows.get("ordinary"), rows.get("stash")
    step = "step as a CUDA graph" if recorded else "step"
    found = [_ratio_floor(f"{step}, {where}: time with the stash / with ordinary saves", stash, ordinary, most=1.03)]
    if recorded:
        return found
    what, wanted = f"saved bytes of dead rows that the stash removes, {where}", "at least 80 %"
    if ordinary is None or stash is None or not ordinary["held_gib"]:
        found.append(Floor(what=what, wanted=wanted, found="not measured", reached=None))
    else:
        share = removed_share(ordinary, stash)
        found.append(Floor(what=what, wanted=wanted, found=f"{share:.0%}", reached=share >= 0.8))
    syncs = {name: row["host_syncs"] for name, row in rows.items() if "host_syncs" in row}
    told = ", ".join(f"{name} {count}" for name, count in syncs.items()) or "not measured"
    what = f"operations of two steps that wait for the device, {where}"
    found.append(Floor(what=what, wanted="none", found=told, reached=not any(syncs.values()) if syncs else None))
    return found


def removed_share(ordinary: Result, stash: Result) -> float:
    """Of what dead rows hold between forward and backward with ordinary saves, the part that is gone with the stash, pages counted."""
    counted = stash["stash"]
    dead = counted["ordinary_bytes"] * (1 - counted["live_share"]) / _GIB
    return (ordinary["held_gib"] - stash["held_gib"] - counted["page_bytes"] / _GIB) / dead


def _floor_of_sharding(results: Sequence[Result]) -> Floor:
    rows = [one for one in results if one["kind"] == "sharded"]
    ours, theirs = (
        min((one for one in rows if one["name"] in names), key=lambda one: one["step_ms"], default=None)
        for names in (OURS, THEIRS)
    )
    what = "everything sharded: time of the faster FSDP2 / of the faster mfsdp"
    return _ratio_floor(what, theirs, ours, least=1.10)


def _ratio_floor(
    what: str, over: Result | None, under: Result | None, *, least: float = 0.0, most: float = float("inf")
) -> Floor:
    wanted = f"at least {least:.2f}" if least else f"at most {most:.2f}"
    if over is None or under is None:
        return Floor(what=what, wanted=wanted, found="not measured", reached=None)
    ratio = over["step_ms"] / under["step_ms"]
    found = f"{ratio:.3f} ({over['name']} {over['step_ms']:.1f} ms, {under['name']} {under['step_ms']:.1f} ms)"
    return Floor(what=what, wanted=wanted, found=found, reached=least <= ratio <= most)


def short(one: Result) -> str:
    """A line on one result."""
    capacity = f" x{one['capacity']:g}" if one["capacity"] else ""
    kind = ", CUDA graph" if one.get("recorded") else f", {one['tokens']} tokens" if "tokens" in one else ""
    memory = f"peak {one['peak_gib']:.1f} GiB" + (
        f", reserved {one['reserved_gib']:.1f}" if "reserved_gib" in one else ""
    )
    return f"{one['kind']}{capacity} {one['name']}{kind}: {one['step_ms']:.2f} ms, {one['tokens_per_s']:,.0f} tokens/s, {memory}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["Not measured.", ""]
    aligned = [":--" if index < 2 else "--:" for index in range(len(head))]
    return [*(f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows)), ""]


def _layer_table(results: Sequence[Result]) -> list[str]:
    rows = sorted((one for one in results if one["kind"] == "layer"), key=lambda one: one["tokens"])
    base = {one["tokens"]: one["step_ms"] for one in rows if one["name"] == "GroupedExperts"}
    cells = [
        [
            f"{one['tokens']:,}",
            one["name"],
            f"{one['step_ms']:.2f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['step_ms'] / base[one['tokens']]:.2f}" if one["tokens"] in base else "",
            f"{one['saved_gib']:.2f}",
            f"{one['peak_gib']:.2f}",
        ]
        for one in rows
    ]
    head = ("tokens", "implementation", "ms", "tokens/s", "time / GroupedExperts", "saved GiB", "peak GiB")
    return _table(head, cells)


def _experts_table(results: Sequence[Result]) -> list[str]:
    rows = [one for one in results if one["kind"] == "experts"]
    ordinary = {(one["capacity"], one["recorded"]): one["step_ms"] for one in rows if one["name"] == "ordinary"}
    cells = []
    for one in sorted(rows, key=lambda one: (one["capacity"], one["recorded"])):
        base = ordinary.get((one["capacity"], one["recorded"]))
        counted = one.get("stash", {})
        cells.append(
            [
                f"{one['capacity']:g}",
                one["name"] + (", CUDA graph" if one["recorded"] else ""),
                f"{one['step_ms']:.1f}",
                f"{one['step_ms'] / base:.3f}" if base else "",
                f"{one['tokens_per_s']:,.0f}",
                f"{one['host_ms']:.1f}",
                f"{one['held_gib']:.2f}" if "held_gib" in one else "",
                f"{counted['page_bytes'] / _GIB:.2f} + {counted['host_bytes'] / _GIB:.2f}" if counted else "",
                f"{counted['live_share']:.0%}" if counted else "",
                f"{one['peak_gib']:.1f}",
                f"{one['reserved_gib']:.1f}",
                f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}",
            ]
        )
    head = (
        *("capacity", "activations", "step ms", "/ ordinary", "tokens/s/GPU", "host ms", "held GiB", "pages GiB"),
        *("live", "peak GiB", "reserved GiB", "losses"),
    )
    return _table(head, cells)


def _sharded_table(results: Sequence[Result]) -> list[str]:
    rows = [one for one in results if one["kind"] == "sharded"]
    base = next((one["step_ms"] for one in rows if one["name"] == "fsdp2"), None)
    cells = [
        [
            one["size"],
            one["name"],
            f"{one['step_ms']:.1f}",
            f"{base / one['step_ms']:.3f}" if base else "",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['host_ms']:.1f}",
            f"{one['peak_gib']:.1f}",
            f"{one['reserved_gib']:.1f}",
            f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}",
        ]
        for one in rows
    ]
    head = (
        "size",
        "engine",
        "step ms",
        "FSDP2's / its",
        "tokens/s/GPU",
        "host ms",
        "peak GiB",
        "reserved GiB",
        "losses",
    )
    return _table(head, cells)


def floor_table(results: Sequence[Result]) -> list[str]:
    """Promises and what became of them."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    cells = [[one.what, one.wanted, one.found, words[one.reached]] for one in floors(results)]
    return _table(("floor", "wanted", "found", "reached"), cells)


def write_report(results: Sequence[Result], problems: Sequence[str], setting: str, folder: Path) -> None:
    """Write results.json, report.md and, where pages were followed, pages.png.

    Args:
        results: Of all rows that were measured.
        problems: Rows that were not, and why.
        setting: A line on machine and versions.
        folder: That has pages.json, perhaps.
    """
    known = {"setting": setting, "results": list(results), "problems": list(problems)}
    (folder / "results.json").write_text(json.dumps(known, indent=1))
    text = [
        *("# Mixtures of experts", "", setting, "", "## Floors", "", *floor_table(results)),
        *("## Experts divided among all ranks", "", *_experts_table(results)),
        "Held: allocated when a forward has ended and its backward has not begun, without pages. Pages: on the device + on the host.",
        "What waits for the device is what torch's sync debug mode finds. Waiting for an event, as stashes do for the answer of all ranks,",
        "is not among it.",
        *("", "## Everything sharded", "", *_sharded_table(results)),
        *("## One layer", "", *_layer_table(results)),
    ]
    if problems:
        text += ["## Not measured", "", *(f"- {problem}" for problem in problems), ""]
    (folder / "report.md").write_text("\n".join(text))
    if (folder / PAGES).exists():
        picture(folder)


def picture(folder: Path) -> None:
    """Draw pages.json."""
    rows = json.loads((folder / PAGES).read_text())
    trace = [
        Occupancy(**{**row, "kind": PageKind(_DTYPES[row["kind"]["itemsize"]], row["kind"]["width"])}) for row in rows
    ]
    draw(trace, folder / "pages.png")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    found = json.loads((source / "results.json").read_text())
    write_report(found["results"], found["problems"], found["setting"], source)
