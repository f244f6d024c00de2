"""Pages in use over a step, as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mfsdp.callbacks.drawing import new_figure, save_figure
from lightning_mfsdp.moe.stash import Occupancy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]


def draw(trace: Sequence[Occupancy], path: Path) -> Path:
    """Draw each kind of pages into a panel of its own; returns the path.

    Args:
        trace: Of one step, in order.
        path: The file; its folder is made.
    """
    kinds = list(dict.fromkeys(one.kind for one in trace))
    figure = new_figure(8, 1 + 2.6 * len(kinds))
    panels = figure.subplots(len(kinds), squeeze=False)[:, 0]
    for kind, axes in zip(kinds, panels, strict=True):
        _panel(axes, [one for one in trace if one.kind == kind])
        axes.set_title(f"rows of {kind.width} x {kind.dtype.itemsize} bytes")
    return save_figure(figure, path)


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
