"""Text for people: sizes with units, and aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["readable_bytes", "table_lines"]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, cells padded to the widest of their column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def readable_bytes(size_bytes: int) -> str:
    """A size in the largest unit up to GiB that leaves a number of at least one."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
