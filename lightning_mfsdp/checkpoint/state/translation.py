"""Names that have changed since a checkpoint was saved, and entries to leave out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

__all__ = ["AS_SAVED", "Translation"]

V = TypeVar("V")


@dataclass(frozen=True)
class Translation:
    """From names in a checkpoint to names in a model.

    Attributes:
        rename: From a name in the checkpoint to the name in the model; `None` for what to leave out.
        ignore: Names in the checkpoint, or `fnmatch` patterns of them, to leave out.
    """

    rename: Callable[[str], str | None] | None = None
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise TypeError(
                f"ignore={self.ignore!r}: expected a list of names or patterns; write ignore=[{self.ignore!r}]"
            )

    def __bool__(self) -> bool:
        return self.rename is not None or bool(self.ignore)

    def name(self, name: str) -> str | None:
        """The new one; `None` for what is left out."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return None
        return name if self.rename is None else self.rename(name)

    def model(self, where: object, state: Mapping[str, V]) -> Mapping[str, V]:
        """A state dict with new names.

        Args:
            where: It is from, for messages.
            state: By the names in the checkpoint.

        Raises:
            ValueError: A pattern fits no name, or two entries get the same one.
        """
        if not self:
            return state
        unused = [pattern for pattern in self.ignore if not any(fnmatchcase(name, pattern) for name in state)]
        if unused:
            raise ValueError(
                f"{where}: ignore={unused} fits none of the {len(state)} names in the checkpoint, such as "
                f"{', '.join(list(state)[:3])}; give names as the checkpoint has them"
            )
        renamed: OrderedDict[str, V] = OrderedDict()
        origins: dict[str, str] = {}
        for name, value in state.items():
            new = self.name(name)
            if new is None:
                continue
            if new in origins:
                raise ValueError(
                    f"{where}: rename turns {origins[new]} and {name} into the same name, {new}; return None for those to leave out"
                )
            origins[new], renamed[new] = name, value
        versions = getattr(state, "_metadata", None)
        if versions is not None:
            renamed._metadata = versions  # type: ignore[attr-defined]
        return renamed

    def optimizer(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """State of an optimizer by name, with new names; by number it stays as it is. What is left out stays in its group."""
        if not self or all(isinstance(name, int) for group in state["param_groups"] for name in group["params"]):
            return state
        return {
            "state": {
                new: values for name, values in state["state"].items() if (new := self.name(str(name))) is not None
            },
            "param_groups": [
                {**group, "params": [self._kept(name) for name in group["params"]]} for group in state["param_groups"]
            ],
        }

    def _kept(self, name: str) -> str:
        """The new name, also of what is left out."""
        new = None if self.rename is None else self.rename(name)
        return name if new is None else new


# All names stay.
AS_SAVED = Translation()
