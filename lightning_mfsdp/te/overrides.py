"""Which layers compute with another recipe than the run's, or in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_mfsdp.te import library

__all__ = ["Overrides", "enter_around", "outermost"]


def outermost(root: nn.Module) -> dict[str, nn.Module]:
    """Modules of the library that are inside no other of them, by name."""
    found: dict[str, nn.Module] = {}
    last: str | None = None
    for name, module in root.named_modules():  # what is inside comes right after what it is inside of
        is_inside = last is not None and (not last or name.startswith(f"{last}."))
        if not is_inside and library.is_engine_module(module):
            found[name] = module
            last = name
    return found


class Overrides:
    """Patterns of module names and what the layers they match, and all inside, compute with.

    Args:
        root: In which "first" and "last" are found.
        kept: Patterns of what computes in high precision.
        others: Recipes by pattern. The first pattern that matches decides, those of `kept` before these.

    Raises:
        ValueError: "first" or "last" in a model without blocks.
    """

    def __init__(self, root: nn.Module, kept: Iterable[str], others: Mapping[str, Any]) -> None:
        given = [*((pattern, None) for pattern in kept), *others.items()]
        self._rules = [(pattern, _resolved(root, pattern), recipe) for pattern, recipe in given]

    def find(self, name: str, default: Any) -> Any:
        """The recipe of a layer, `None` for high precision."""
        matches = (recipe for _, pattern, recipe in self._rules if _matches(name, pattern))
        return next(matches, default)

    def check_all_match(self, names: Iterable[str]) -> None:
        """Raise a ValueError for a pattern that none of the names matches."""
        known = list(names)
        for given, pattern, _ in self._rules:
            if not any(_matches(name, pattern) for name in known):
                raise ValueError(
                    f"keep_high_precision, overrides: {given!r} matches no layer that could compute in FP8; those are {known[:6]}"
                )


def enter_around(module: nn.Module, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Every call of `module`, recomputed ones too, runs inside a context of its own."""
    entered: list[AbstractContextManager[Any]] = []

    def before(*_: Any) -> None:
        context = make()
        context.__enter__()
        entered.append(context)

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)


def _matches(name: str, pattern: str) -> bool:
    """Whether the name, or that of a module around, is meant."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))


def _resolved(root: nn.Module, pattern: str) -> str:
    if pattern not in ("first", "last"):
        return pattern
    blocks = [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    ]
    if not blocks:
        raise ValueError(
            f"{pattern!r} means a block of the model, an entry of its largest ModuleList or Sequential, and {type(root).__name__} has "
            "neither; give names of modules"
        )
    name, stack = max(blocks, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))
    entry = "0" if pattern == "first" else str(len(stack) - 1)
    return f"{name}.{entry}" if name else entry
