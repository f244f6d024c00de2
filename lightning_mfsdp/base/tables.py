"""Formats text for people: sizes with units, numbers as ranges, and aligned columns."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

__all__ = ["number_ranges", "readable_bytes", "table_lines"]


def table_lines(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """One line for each row, cells padded to the widest of their column. `right`: numbers of columns that are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []

    def padded(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return ["  ".join(padded(cell, column) for column, cell in enumerate(row)).rstrip() for row in rows]


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges, such as "0-3, 8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def readable_bytes(size_bytes: int) -> str:
    """A size in the largest unit up to GiB that leaves a number of at least one."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
