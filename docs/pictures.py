"""Writes docs/pictures/strategies.svg, the memory of each strategy: `python docs/pictures.py`. The other pictures are written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "pictures/strategies.svg"

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
COLORS = {
    "weights": "#4051b5",
    "main weights": "#8c9eff",
    "gradients": "#f2a03d",
    "optimizer state": "#9aa0b4",
}
RANKS = 8
LEFT, TOP, WIDTH, BAR, STEP = 170, 62, 500, 28, 46


def bytes_per_parameter(
    sharding: int, ranks: int, c: int = 2, m: int = 4, g: int = 4, s: int = 8
) -> dict[str, float]:
    """Of one rank between backward and the optimizer step, as the table of docs/strategies.md has them. By default bf16-mixed with Adam.

    Args:
        sharding: 0 to 3, in the order of `STRATEGIES`.
        ranks: Size of the shard axis.
        c: Bytes in the compute dtype.
        m: Of a main weight, which has another dtype.
        g: Of a main gradient.
        s: Of the optimizer state.
    """
    among = 1 if sharding == 0 else ranks
    values = (0 if sharding == 3 else c, m / among, g / among, s / among)
    return dict(zip(COLORS, map(float, values), strict=True))


def picture() -> str:
    """The text of the file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    height = TOP + STEP * len(STRATEGIES) + 10
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" viewBox="0 0 720 {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222222">'
    )
    yield f"<title>Bytes per parameter on each of {RANKS} ranks, by strategy, with bf16-mixed and Adam</title>"
    yield f'<rect width="720" height="{height}" rx="8" fill="#ffffff"/>'
    yield f'<text x="16" y="24" font-weight="bold">Bytes per parameter on each of {RANKS} ranks, with bf16-mixed and Adam</text>'
    for column, (name, color) in enumerate(COLORS.items()):
        x = LEFT + 130 * column
        yield f'<rect x="{x}" y="36" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="47">{name}</text>'
    scale = WIDTH / sum(bytes_per_parameter(0, RANKS).values())
    for row, strategy in enumerate(STRATEGIES):
        held = bytes_per_parameter(row, RANKS)
        x, y = float(LEFT), TOP + STEP * row
        yield f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end">{strategy}</text>'
        for name, value in held.items():
            if not value:
                continue
            yield f'<rect x="{x:g}" y="{y}" width="{scale * value:.2f}" height="{BAR}" fill="{COLORS[name]}"/>'
            x = round(x + scale * value, 2)
        # The longest bar leaves no room for more than its sum.
        parts = " + ".join(f"{value:g}" for value in held.values() if value)
        total = f"{sum(held.values()):g}"
        yield f'<text x="{x + 8:g}" y="{y + 19}">{total if row == 0 else f"{total} = {parts}"}</text>'
    yield "</svg>"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
