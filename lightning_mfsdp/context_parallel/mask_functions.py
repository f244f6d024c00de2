"""Reads from a mask function of transformers which tokens it lets attend to which: the one place that looks into its closures.

A model describes a mask by a function of places, which `transformers.masking_utils` composes of public parts. What the functions that
make such parts return cannot be asked what it was made of. But all that one of them returns has the same code, and the window or the
documents that it was made with are the variables of its closure. A function with other code is refused: it may do anything.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.pattern import Pattern

__all__ = ["read_mask_function"]

_UNKNOWN = (
    "With context > 1, attention is causal or bidirectional, with or without a sliding window, padding and packed documents. Use context=1"
    " for other masks."
)


def read_mask_function(function: Any, model: str) -> tuple[Pattern, Tensor | None]:
    """What a mask function of transformers computes.

    Args:
        function: As a model passes it, `(batch, head, query, key) -> attends`.
        model: Its name, for messages.

    Returns:
        The pattern, and the number of the document of each token, `[batch, tokens]`; `None` if it keeps no documents apart.

    Raises:
        ShardingError: It has a part that cannot be computed on parts of sequences; names that.
    """
    causal, documents = False, None
    past: list[int] = []  # windows that look back alone; they count the query's own token
    reaches: list[int] = []  # windows to both sides; they do not
    for kind, variables in _parts(function, model):
        if kind == "causal":
            causal = True
        elif kind == "past":
            past += variables
        elif kind == "around":
            reaches += variables
        elif kind == "documents":
            if documents is not None:
                raise ShardingError(
                    f"{model}: its attention keeps two kinds of documents apart at once, which cannot be computed on parts of sequences. "
                    f"{_UNKNOWN}"
                )
            (documents,) = variables
    if past and not causal:
        raise ShardingError(
            f"{model}: its attention has a window to earlier tokens and attends to all later ones. {_UNKNOWN}"
        )
    reaches += [window - 1 for window in past]
    return Pattern(causal=causal, reach=min(reaches, default=None)), documents


def _parts(function: Any, model: str) -> Iterator[tuple[str, list[Any]]]:
    """The kinds of functions that this one is composed of, each with the variables of its closure."""
    kinds = _kinds()
    kind = (kinds.get(function) if isinstance(function, Hashable) else None) or kinds.get(
        getattr(function, "__code__", None)
    )
    closure = function.__closure__ if isinstance(function, FunctionType) else None
    variables = [cell.cell_contents for cell in closure or ()]
    if kind == "all of":
        for part in variables[0]:
            yield from _parts(part, model)
    elif kind == "by positions":  # distances inside of a document are the same by positions
        yield from _parts(next(part for part in variables if callable(part) and not isinstance(part, Tensor)), model)
    elif kind is not None:
        yield kind, variables
    else:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ShardingError(
            f"{model}: its attention mask is made by {name}, which cannot be computed on parts of sequences. {_UNKNOWN}"
        )


@functools.cache
def _kinds() -> dict[Any, str]:
    """Mask functions of transformers, or the code of those that its functions make, with what they stand for."""
    library = importlib.import_module("transformers.masking_utils")
    tensor = torch.empty(0, device="cpu")
    examples = {
        "past": library.sliding_window_overlay(1),
        "documents": library.packed_sequence_mask_function(tensor),
        "all of": library.and_masks(library.causal_mask_function),
    }
    # Not in every version of transformers 5.
    if around := getattr(library, "sliding_window_bidirectional_overlay", None):
        examples["around"] = around(1)
    if by_positions := getattr(library, "remap_positions_for_packed_sequence", None):
        examples["by positions"] = by_positions(library.causal_mask_function, tensor)
    functions = {library.causal_mask_function: "causal", library.bidirectional_mask_function: "everything"}
    return {**functions, **{example.__code__: kind for kind, example in examples.items()}}
