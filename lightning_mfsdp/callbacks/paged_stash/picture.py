"""Pages in use over a step, as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mfsdp.moe.stash import Occupancy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_drawing", "draw"]


def check_drawing(path: str | Path) -> None:
    """Raise an ImportError if pictures cannot be drawn here, before a training that requires one."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"PagedStash(picture={str(path)!r}) draws with matplotlib, which cannot be imported ({error}); pip install matplotlib, or "
            "leave picture out"
        ) from error


def draw(trace: Sequence[Occupancy], path: Path) -> Path:
    """Draw each kind of pages into a panel of its own; returns the path.

    Args:
        trace: Of one step, in order.
        path: The file; its folder is made.
    """
    # Without a display, and in the one process that draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(one.kind for one in trace))
    figure = Figure(figsize=(8, 1 + 2.6 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(kinds), squeeze=False)[:, 0]
    for kind, axes in zip(kinds, panels, strict=True):
        _panel(axes, [one for one in trace if one.kind == kind])
        axes.set_title(f"rows of {kind.width} x {kind.dtype.itemsize} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _panel(axes: Axes, trace: Sequence[Occupancy]) -> None:
    order = range(len(trace))
    used = [one.used for one in trace]
    axes.step(order, used, where="post", color="tab:blue", label="pages in use")
    axes.fill_between(order, used, step="post", color="tab:blue", alpha=0.2)
    axes.axhline(trace[0].pages, color="tab:blue", linestyle="--", linewidth=0.8, label="pages on the device")
    if any(one.host_used for one in trace):
        axes.step(order, [one.host_used for one in trace], where="post", color="tab:orange", label="in host memory")
    if any(one.wanted > one.used + one.host_used for one in trace):
        axes.step(
            order, [one.wanted for one in trace], where="post", color="tab:red", linewidth=0.8, label="pages requested"
        )
    axes.set_xlabel("saves, then loads, in order")
    axes.set_ylabel("pages")
    axes.locator_params(integer=True)
    axes.legend(fontsize="small")
