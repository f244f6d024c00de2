"""Patterns by which users name modules of a model: `fnmatch` of dotted names, and the words "first" and "last"."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["check_patterns", "matches", "without_words"]


def check_patterns(option: str, patterns: Any) -> None:
    """Raise a TypeError for anything but a list of strings; a string alone would be one of letters."""
    is_list = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not (is_list and all(isinstance(name, str) for name in patterns)):
        raise TypeError(
            f'{option}={patterns!r}: expected a list of names and patterns of modules, such as ["first", "last", "*.head"]'
        )


def matches(name: str, pattern: str) -> bool:
    """Whether the name of a module, or of one around it, matches a pattern."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: count + 1]), pattern) for count in range(len(parts)))


def without_words(root: nn.Module, pattern: str) -> str:
    """The pattern, or for "first" and "last" the name of that entry of the largest `ModuleList` or `Sequential`.

    Raises:
        ValueError: One of the words, for a model that has neither.
    """
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
    name, stack = max(blocks, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    entry = "0" if pattern == "first" else str(len(stack) - 1)
    return f"{name}.{entry}" if name else entry
