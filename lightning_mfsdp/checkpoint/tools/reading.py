"""A sharded directory as the dictionary that one file would have held, for programs without sharding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_mfsdp.checkpoint.io.opened import load_file
from lightning_mfsdp.checkpoint.io.stored import CheckpointError
from lightning_mfsdp.checkpoint.io.unpickling import is_trusted
from lightning_mfsdp.checkpoint.tools.portable import read_portable, value_of

__all__ = ["load_checkpoint"]


def load_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, optimizers: bool = True
) -> dict[str, Any]:
    """What `torch.load` returns for a checkpoint in one file, for a directory or a file. One process reads it; nothing is sharded.

    Args:
        path: A directory that this strategy, FSDPStrategy or ModelParallelStrategy wrote, or a file of Lightning's, on this machine.
        weights_only: As for `torch.load`: only `False` loads classes that were not allowed.
        optimizers: Also read their states.

    Returns:
        Lightning's dictionary: "state_dict" with whole tensors on the CPU, "optimizer_states" with parameters by number, "epoch" and so on.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it holds a class that was not allowed.
    """
    place, trust = Path(path), is_trusted(weights_only)
    if not place.is_dir():
        found: Any = load_file(place, trust=trust)
        if not isinstance(found, dict):
            raise CheckpointError(f"{place}: expected what Lightning saves, got {type(found).__name__}")
        return found if optimizers else {key: value for key, value in found.items() if key != "optimizer_states"}
    parts = read_portable(place, trust=trust)
    whole = {name: value_of(leaf) for name, leaf in parts.model.items() if name not in parts.tied}
    checkpoint = {**parts.rest, "state_dict": {name: whole[parts.tied.get(name, name)] for name in parts.model}}
    if optimizers and parts.optimizers:
        checkpoint["optimizer_states"] = [optimizer.by_number(value_of) for optimizer in parts.optimizers]
    return checkpoint
