"""State dicts of a sharded model: what of them is saved, and whether what a checkpoint holds fits the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.engine.internals import view_of

__all__ = [
    "check_names",
    "check_restored",
    "identity_of",
    "module_versions",
    "own_share",
    "rows_by_name",
    "tied_names",
]


def rows_by_name(state: Mapping[str, Any], index: ParameterIndex, doing: str) -> dict[str, Any]:
    """`state` with every sharded parameter as the rows this rank owns. All ranks call it.

    Raises:
        RuntimeError: On all ranks, if an entry was computed from sharded parameters on any.
    """
    rows = {name: index.rows_of(value) for name, value in state.items()}
    unknown = [name for name, value in rows.items() if value is None and state[name] is not None]
    unknown = list(dict.fromkeys(name for names in Ranks().problems(unknown).values() for name in names))
    if unknown:
        raise RuntimeError(
            f"{doing}: {', '.join(unknown[:8])} (of {len(unknown)}) in the state dict are DTensors of no sharded parameter, so their rows "
            "are unknown; expected the module's own tensors or plain tensors. A hook (on_save_checkpoint, state_dict) cast or "
            "copied them: leave values as they are (other names are fine), or put in value.full_tensor()"
        )
    return rows


def own_share(rows: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What this rank writes of them: its rows; and rank 0 what is replicated (ignored parameters, statistics of batch norm)."""
    return {name: value for name, value in rows.items() if ranks.rank == 0 or isinstance(value, (DcpShard, DTensor))}


def module_versions(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The versions of modules in a state dict, by plain name: `load_state_dict` of a newer program may look for them."""
    versions = getattr(state, "_metadata", None)
    return None if versions is None else {plain_name(name): dict(version) for name, version in versions.items()}


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Entries of a state dict that are the same weight as an earlier one, with the first name of it."""
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        identity = identity_of(value)
        if identity is not None and first.setdefault(identity, name) != name:
            tied[name] = first[identity]
    return tied


def identity_of(value: Any) -> tuple[Any, ...] | None:
    """A key that is equal for entries of a state dict that share all their memory; `None` for entries that share none."""
    view = view_of(value) if isinstance(value, Tensor) else None
    if view is not None:
        return (id(view.local),)
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def check_restored(
    path: Location | Path,
    index: ParameterIndex,
    names: Sequence[str],
    *,
    strict: bool,
    advice: str = "set strict_loading=False on the LightningModule, or load with strict=False under Fabric",
) -> None:
    """Check that no sharded parameter silently keeps its initial value.

    Args:
        path: For the message.
        index: Of the model.
        names: Plain names of what will be read.
        strict: Whether it is an error; otherwise it is a warning. A parameter without elements may be missing.
        advice: How to load the rest anyway, for the message.

    Raises:
        RuntimeError: Some parameter is not among them.
    """
    restored = {id(index.views[name]) for name in names if name in index.views}
    left = [view.name for view in index.all if id(view) not in restored and view.shape.numel()]
    if not left:
        return
    message = (
        f"{path} restores {len(index.all) - len(left)} of {len(index.all)} sharded parameters; these keep their present values: "
        f"{', '.join(left[:8])}{', ...' if len(left) > 8 else ''}"
    )
    if strict:
        raise RuntimeError(f"{message}. Let state_dict() of the module list them, or if this is meant {advice}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=2)


def check_names(
    path: Location | Path,
    present: Mapping[str, Any],
    saved: Sequence[str],
    shapes: Mapping[str, torch.Size],
    *,
    strict: bool,
    advice: str,
) -> None:
    """Compare names and global shapes of a checkpoint with those of a model.

    Args:
        path: For the message.
        present: The model's state by name.
        saved: Names in the checkpoint.
        shapes: Global shapes of the tensors among them.
        strict: Whether a name on one side only is an error.
        advice: Ends the message.

    Raises:
        RuntimeError: All that does not fit.
    """
    saved_names = set(saved)
    problems = []
    for name, value in present.items():
        shape = value.size() if isinstance(value, Tensor) else None
        if name not in saved_names:
            # An empty tensor has nothing that could be saved.
            if strict and (shape is None or shape.numel()):
                problems.append(f"missing in the checkpoint: {name}")
        elif shape is not None and name in shapes and shapes[name] != shape:
            problems.append(f"shape of {name}: {tuple(shapes[name])} in the checkpoint, {tuple(shape)} in the model")
    if strict:
        problems += [f"missing in the model: {name}" for name in saved if name not in present]
    if problems:
        raise RuntimeError(f"the checkpoint {path} does not fit the model:\n  " + "\n  ".join(problems) + f"\n{advice}")
