"""Which parameter a number in `Optimizer.state_dict()` refers to. It counts parameters in the order of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.checkpoint.io.stored import (
    CheckpointError,
    is_tensor,
)

__all__ = ["names_of_numbers"]


def names_of_numbers(
    path: Path,
    where: str,
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any],
    given: Sequence[str] | None,
) -> tuple[dict[int, str], str]:
    """Names by number, and a sentence about where they come from.

    Args:
        path: For messages.
        where: Name of the optimizer, for messages.
        state: By number, as a string.
        groups: With numbers under "params".
        model: Tensors by name, in the order of the model.
        given: Names in the order of the numbers, from the caller.

    Raises:
        CheckpointError: Names cannot be determined, or do not fit shapes.
    """
    numbers = [number for group in groups for number in group["params"]]
    shapes = [_shape(state.get(str(number), {})) for number in numbers]
    if given is None and all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
    if given is not None:
        _check_given(path, where, given, shapes, model)
        return dict(zip(numbers, given, strict=True)), f"{where}: names given for its {len(numbers)} parameters"
    candidates = _candidates(model)
    first = _match(shapes, candidates)
    last = [len(candidates) - 1 - place for place in reversed(_match(shapes[::-1], candidates[::-1]) or [])]
    if len(groups) > 1 or first is None or first != last:
        problem = (
            f"its {len(groups)} groups come in an order of their own"
            if len(groups) > 1
            else "their shapes do not follow the order of the model"
            if first is None
            else "their shapes fit the model in more than one way"
        )
        raise CheckpointError(
            f"{path}: {where} numbers its {len(numbers)} parameters, and {problem}, so their names are unknown. Give them in the "
            "optimizer's order with --parameters FILE (parameters)"
        )
    return (
        {number: candidates[place][0] for number, place in zip(numbers, first, strict=True)},
        f"{where}: its {len(numbers)} parameters go by number; they were taken in the order of the model, which their shapes follow",
    )


def _shape(state: Mapping[str, Any]) -> torch.Size | None:
    """Shape of the parameter, as far as its state shows it: averages are shaped like it, step counts are single numbers."""
    shapes = [leaf.shape for leaf in state.values() if is_tensor(leaf)]
    return max(shapes, key=lambda shape: (len(shape), shape.numel())) if shapes else None


def _candidates(model: Mapping[str, Any]) -> list[tuple[str, torch.Size]]:
    """Tensors of the model, tied ones once if that is visible."""
    found: list[tuple[str, torch.Size]] = []
    seen: set[tuple[int, torch.Size]] = set()
    for name, leaf in model.items():
        if not is_tensor(leaf):
            continue
        if isinstance(leaf, Tensor) and leaf.numel():
            place = (leaf.data_ptr(), leaf.shape)
            if place in seen:
                continue
            seen.add(place)
        found.append((name, leaf.shape))
    return found


def _match(shapes: Sequence[torch.Size | None], candidates: Sequence[tuple[str, torch.Size]]) -> list[int] | None:
    """The earliest places of candidates with these shapes, in order; `None` if there are not enough."""
    places: list[int] = []
    place = 0
    for shape in shapes:
        while place < len(candidates) and shape is not None and candidates[place][1] != shape:
            place += 1
        if place == len(candidates):
            return None
        places.append(place)
        place += 1
    return places


def _check_given(
    path: Path,
    where: str,
    given: Sequence[str],
    shapes: Sequence[torch.Size | None],
    model: Mapping[str, Any],
) -> None:
    problems = []
    for name, shape in zip(given, shapes, strict=True):
        leaf = model.get(name)
        if not is_tensor(leaf):
            problems.append(f"{name} is not in the model")
        elif shape is not None and leaf.shape != shape:
            problems.append(f"{name} is {tuple(leaf.shape)} in the model and {tuple(shape)} in the optimizer")
    if problems:
        raise CheckpointError(
            f"{path}: names of the parameters of {where} do not fit: {'; '.join(problems[:8])} (of {len(problems)}). List them in the "
            "order of the optimizer's groups"
        )
