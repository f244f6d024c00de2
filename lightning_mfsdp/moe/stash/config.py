"""How a stash is sized, and what happens when it is too small."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

__all__ = ["StashConfig"]

CHOICES = {"sizing": ("average", "maximum"), "overflow": ("keep", "skip", "rerun")}


@dataclass(frozen=True, kw_only=True)
class StashConfig:
    """Options of a paged stash.

    Args:
        page_rows: Rows in a page. The last page of a tensor is half empty on average.
        sizing: The pages are `device_factor` times the most that were in use at once in the recorded steps: the "average" or the "maximum"
            over steps and ranks.
        device_factor: Pages on the device, as a multiple of that.
        host_factor: Pages in pinned host memory, for tensors that find no place on the device; 0 for none.
        overflow: What happens when neither has room. "keep": the tensor stays where it is, which only costs memory. "skip": the
            optimizer step is skipped on all ranks alike. "rerun": the step is repeated without the stash. All of them enlarge
            the pages for the next step.
        recorded_steps: Steps that are watched, with ordinary saves, before the pages are allocated.
        own_stream: Copy on a separate stream. `False`: on the compute stream, so that each layer can be a CUDA graph by itself.

    Raises:
        ValueError: An option out of its range.
    """

    page_rows: int = 64
    sizing: Literal["average", "maximum"] = "average"
    device_factor: float = 1.2
    host_factor: float = 0.0
    overflow: Literal["keep", "skip", "rerun"] = "keep"
    recorded_steps: int = 1
    own_stream: bool = True

    def __post_init__(self) -> None:
        for option in fields(self):
            _check(option.name, getattr(self, option.name))


def _check(option: str, value: object) -> None:
    if option in CHOICES:
        wrong = "" if value in CHOICES[option] else f"one of {', '.join(map(repr, CHOICES[option]))}"
    elif option == "own_stream":
        wrong = "" if isinstance(value, bool) else "True or False"
    elif option in ("page_rows", "recorded_steps"):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        wrong = "" if is_count else "a whole number of at least 1"
    else:
        least = 0.0 if option == "host_factor" else 0.01
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        in_range = isinstance(value, (int, float)) and math.isfinite(value) and value >= least
        wrong = "" if is_number and in_range else f"a number of at least {least:g}"
    if wrong:
        raise ValueError(f"paged stash: {option}={value!r}, expected {wrong}")
