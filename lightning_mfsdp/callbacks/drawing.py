"""Pictures of callbacks, drawn with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_drawing", "new_figure", "save_figure"]


def check_drawing(callback: str, path: str | Path) -> None:
    """Raise an ImportError if pictures cannot be drawn here, before a training that requires one."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{callback}(picture={str(path)!r}) draws with matplotlib, which cannot be imported ({error}); pip install matplotlib, or "
            "leave picture out"
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that needs no display and no state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write it, with the folders that are missing; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
