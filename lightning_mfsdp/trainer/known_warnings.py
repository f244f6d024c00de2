"""Hides, while the Trainer runs, warnings that Lightning gives about itself and that a user of this strategy can do nothing about.

Each is described by its whole text and the module that gives it, with the version in which it was seen, so that nothing else is hidden.
Remove what newer versions no longer say.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any, cast

from lightning_mfsdp._lightning_api import NAMESPACE

__all__ = ["KnownWarnings"]


@dataclass(frozen=True, kw_only=True)
class _KnownWarning:
    """One warning: a pattern of its whole text, the module below Lightning's that gives it, and its class."""

    text: str
    module: str
    category: type[Warning]


_KNOWN = (
    # Lightning 2.6.6 with PyTorch 2.13, in every run, of a class that Lightning uses when it looks through loaders.
    _KnownWarning(
        text=re.escape(
            "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and treespec.is_leaf()` instead."
        ),
        module="utilities._pytree",
        category=FutureWarning,
    ),
    # Lightning 2.6.6, for every precision but full ones: its summary estimates sizes. ShardedModelSummary counts them.
    _KnownWarning(
        text=r"Precision \S+ is not supported by the model summary\.  "
        r"Estimated model size in MB will not be accurate\. Using 32 bits instead\.",
        module="utilities.model_summary.model_summary",
        category=UserWarning,
    ),
)


class KnownWarnings:
    """Hides the known warnings from `begin` to `end`."""

    def __init__(self) -> None:
        self._added: list[Any] = []

    def begin(self) -> None:
        """Add a filter for each known warning, unless an equal one is in place."""
        for warning in _KNOWN:
            module = rf"{re.escape(NAMESPACE)}\.{re.escape(warning.module)}\Z"
            before = len(warnings.filters)
            # Appended, so that filters of users and of `python -W` decide first.
            warnings.filterwarnings("ignore", rf"{warning.text}\Z", warning.category, module, append=True)
            if len(warnings.filters) > before:
                self._added.append(warnings.filters[-1])

    def end(self) -> None:
        """Remove the filters that `begin` added, wherever they are among those that were added since."""
        filters = cast("list[Any]", warnings.filters)
        for added in self._added:
            if added in filters:
                filters.remove(added)
        self._added.clear()
