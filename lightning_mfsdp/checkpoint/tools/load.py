"""A sharded directory as the dictionary that one file would have held, for programs without sharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_mfsdp.checkpoint.io.trust import CheckpointError, is_trusted
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES, average_in, under_all_names
from lightning_mfsdp.checkpoint.state.rank_states import RankStates
from lightning_mfsdp.checkpoint.state.state_dict import tied_names
from lightning_mfsdp.checkpoint.state.translation import Translation
from lightning_mfsdp.checkpoint.tools.leaves import load_file, state_dict_of
from lightning_mfsdp.checkpoint.tools.parts import read_parts, value_of

__all__ = ["load_checkpoint"]

_WITH_OPTIMIZERS = ("optimizer_states", PARAMETER_STATES)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    weights_only: bool | None = None,
    optimizers: bool = True,
    rename: Callable[[str], str | None] | None = None,
    ignore: Sequence[str] = (),
    averaged: bool = False,
) -> dict[str, Any]:
    """What `torch.load` returns for a checkpoint in one file, for a directory or a file. One process reads it; nothing is sharded.

    Args:
        path: A directory that this strategy, FSDPStrategy or ModelParallelStrategy wrote, or a file of Lightning's, on this machine.
        weights_only: As for `torch.load`: only `False` loads classes that were not allowed.
        optimizers: Also read their states, which go by number and keep it, and averages of `ShardedEMA` ("parameter_states").
        rename: From a name in the checkpoint to the one in "state_dict"; `None` for a tensor to leave out, which is not read then.
        ignore: Names in the checkpoint, or `fnmatch` patterns of them, to leave out.
        averaged: The average that `ShardedEMA` has saved takes the place of the weights; what is not averaged is the model's.

    Returns:
        Lightning's dictionary: "state_dict" with whole tensors on the CPU, "optimizer_states" with parameters by number, "epoch" and so on.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, it holds a class that was not allowed, or with `averaged` no average.
        ValueError: `rename` gives two tensors one name, or a pattern of `ignore` fits none.
    """
    place, trust, translation = Path(path), is_trusted(weights_only), Translation(rename, ignore)
    if not place.is_dir():
        content: Any = load_file(place, trust=trust)
        if not isinstance(content, dict):
            raise CheckpointError(f"{place}: expected what Lightning saves, got {type(content).__name__}")
        if averaged:
            average, state = average_in(place, content.get(PARAMETER_STATES)), content["state_dict"]
            state.update(under_all_names(place, average, state, tied_names(state)))
        if translation and "state_dict" in content:
            content["state_dict"] = translation.model(place, content["state_dict"])
        return content if optimizers else {key: value for key, value in content.items() if key not in _WITH_OPTIMIZERS}
    parts = read_parts(place, trust=trust)
    first_names = {name: parts.tied.get(name, name) for name in parts.model}
    names = translation.model(place, first_names)
    leaves = parts.model
    if averaged:
        leaves = {**leaves, **under_all_names(place, average_in(place, parts.states), leaves, parts.tied)}
    tensors = {name: value_of(leaves[name]) for name in dict.fromkeys(names.values())}
    model = {new: tensors[name] for new, name in names.items()}
    rest = {key: list(value) if isinstance(value, RankStates) else value for key, value in parts.rest.items()}
    checkpoint = {**rest, "state_dict": state_dict_of(model, parts.versions)}
    if optimizers and parts.optimizers:
        checkpoint["optimizer_states"] = [optimizer.by_number(value_of) for optimizer in parts.optimizers]
    if optimizers and parts.states:
        checkpoint[PARAMETER_STATES] = parts.states_by(value_of)
    return checkpoint
