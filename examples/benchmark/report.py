"""From results of a benchmark to a Markdown table and charts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["ratio_to", "table", "write_report"]

Result = dict[str, Any]
_COLUMNS = ("size", "engine", "step ms", "tokens/s/GPU", "/ FSDP2", "limit /", "host ms", "peak GiB", "reserved GiB")


def same_work(one: Result, other: Result) -> bool:
    """Whether two results differ in the engine alone."""
    return all(one[key] == other[key] for key in ("size", "layers", "seq", "world", "compiled", "accumulation"))


def ratio_to(results: Sequence[Result], result: Result, engines: Sequence[str]) -> float | None:
    """Step time relative to the first of `engines` that did the same work; `None` if none did."""
    for engine in engines:
        for other in results:
            if other["engine"] == engine and same_work(result, other) and result["reduce"] == other["reduce"]:
                return float(result["step_ms"]) / float(other["step_ms"])
    return None


def table(results: Sequence[Result]) -> str:
    """Markdown: a table for each set of options, engines below one another for each size."""
    blocks = []
    keys = ("compiled", "graph", "reduce", "accumulation", "clip", "world")
    settings = list(dict.fromkeys(tuple(result[key] for key in keys) for result in results))
    for setting in settings:
        chosen = [result for result in results if tuple(result[key] for key in keys) == setting]
        compiled, graph, reduce, accumulation, clip, world = setting
        title = f"{'Compiled blocks' if compiled else 'Eager'}, {reduce} reduction, {world} GPUs"
        title += ", whole step as a CUDA graph" if graph else ""
        title += f", {accumulation} microbatches a step" if accumulation > 1 else ""
        title += f", norm clipping at {clip}" if clip else ""
        lines = [f"### {title}", "", "| " + " | ".join(_COLUMNS) + " |", "|---|---|" + "--:|" * (len(_COLUMNS) - 2)]
        for size in dict.fromkeys(result["size"] for result in chosen):
            lines += [_row(results, result) for result in chosen if result["size"] == size]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _row(results: Sequence[Result], result: Result) -> str:
    peer = ratio_to(results, result, ("fsdp2-tuned", "fsdp2") if result["compiled"] else ("fsdp2",))
    to_limit = ratio_to(results, result, ("limit",))
    cells = [
        *(result["size"], result["engine"], f"{result['step_ms']:.1f}", f"{result['tokens_per_s_gpu']:,}"),
        f"{peer:.3f}" if peer else "-",
        f"{1 / to_limit:.3f}" if to_limit else "-",
        *(f"{result['host_ms']:.1f}", f"{result['peak_gib']:.1f}", f"{result['reserved_gib']:.1f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def chart(results: Sequence[Result], path: Path) -> None:
    """PNG: throughput as a fraction of the limit, and reserved memory, by size and engine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(result["size"] for result in results))
    figure, axes = plt.subplots(2, len(sizes), figsize=(4.5 * len(sizes), 8), squeeze=False)
    for column, size in enumerate(sizes):
        chosen = [result for result in results if result["size"] == size and result["accumulation"] == 1]
        names = [
            f"{result['engine']}{' c' if result['compiled'] else ''}{' g' if result['graph'] else ''} {result['reduce'][0]}"
            for result in chosen
        ]
        fractions = [1 / (ratio_to(results, result, ("limit",)) or float("inf")) for result in chosen]
        memory = [float(result["reserved_gib"]) for result in chosen]
        for row, (values, label) in enumerate(((fractions, "fraction of the limit"), (memory, "reserved GiB"))):
            axes[row][column].barh(names[::-1], values[::-1])
            axes[row][column].set_title(f"{size}: {label}")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write_report(results: Sequence[Result], problems: Sequence[str], folder: Path) -> None:
    """Write report.md, and charts.png where matplotlib is installed."""
    text = ["# Benchmark", "", table(results)]
    if problems:
        text += ["", "## Did not run", "", *(f"- {problem}" for problem in problems)]
    text += [
        *(
            "",
            "- `limit` communicates nothing. `/ FSDP2`: step time relative to FSDP2's (the tuned one where blocks are",
        ),
        "  compiled) with the same options; `limit /`: the limit's step time relative to this one's.",
        *("- `c` in the chart: compiled blocks; `g`: CUDA graph; `f`, `b`: reduction in float32 or bfloat16.", ""),
    ]
    (folder / "report.md").write_text("\n".join(text))
    try:
        chart(results, folder / "charts.png")
    except ImportError as error:
        print(f"no charts: {error}", file=sys.stderr)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    known = json.loads(source.read_text())
    write_report(known["results"], known["problems"], source.parent)
