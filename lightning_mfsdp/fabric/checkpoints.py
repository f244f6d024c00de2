"""Saves a Fabric state (modules, optimizers, plain values by key) to disk, and loads it.

A directory in the layout of `checkpoint/lightning_io.py`, with the user's keys in place of `model` and `optimizer_<i>`; or one file
with whole tensors. Any reader of that layout reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from lightning_mfsdp.base.progress import progress_bar
from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.location import META_FILE, MODULE_VERSIONS, Location
from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_all_ranks
from lightning_mfsdp.checkpoint.state.full_state import full_model_state, full_optimizer_state, with_whole_tensors
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.model import ModelPlan, finish_model, known_names, load_model, plan_model
from lightning_mfsdp.checkpoint.state.on_disk import Reads, StoredOptimizer, StoredState
from lightning_mfsdp.checkpoint.state.optimizer import OptimizerPlan, finish_optimizer, optimizer_state, plan_optimizer
from lightning_mfsdp.checkpoint.state.state_dict import module_versions, own_share, rows_by_name
from lightning_mfsdp.checkpoint.state.translation import AS_SAVED, Translation

__all__ = ["Filters", "load", "load_raw", "save"]

Filters = Mapping[str, Callable[[str, Any], bool]]


def save(location: Location, state: Mapping[str, Any], filters: Filters, *, whole: bool, ranks: Ranks) -> None:
    """Write modules and optimizers, every rank its rows, and everything else. All ranks call it.

    Args:
        location: Replaced if there is a checkpoint.
        state: Modules, optimizers, objects with a `state_dict`, and values that `torch.save` takes.
        filters: By key, what of a state dict is saved.
        whole: One file from rank 0 instead of a directory.
        ranks: Ranks that write together and wait for each other.

    Raises:
        RuntimeError: On all ranks, if something failed on any. An older checkpoint is unchanged.
        ValueError: An optimizer without its module.
    """
    keep, indices = ranks.rank == 0, _indices(state)
    tensors: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            model_state = value.state_dict()
            if whole:
                tensors[key] = _filtered(key, full_model_state(model_state, keep=keep), filters)
            else:
                versions[key] = module_versions(model_state)
                rows = rows_by_name(_filtered(key, model_state, filters), indices[key], "saving a checkpoint")
                tensors[key] = own_share(rows, ranks)
        elif isinstance(value, Optimizer):
            index = _index_of(key, value, indices)
            saved_state = full_optimizer_state(value, keep=keep) if whole else optimizer_state(index, value)
            tensors[key] = _filtered(key, saved_state, filters)
        else:
            rest[key] = _filtered(key, value.state_dict() if isinstance(value, Stateful) else value, filters)
    rest = with_whole_tensors(rest, ranks)
    content: lightning_io.FullContent | lightning_io.ShardedContent
    if whole:
        content = lightning_io.FullContent(checkpoint={**tensors, **rest})
    else:
        content = lightning_io.ShardedContent.packed(
            tensors, {**rest, MODULE_VERSIONS: versions} if versions else rest, ranks
        )
    with progress_bar(f"Saving {location}") as progress:
        lightning_io.save(location, content, ranks=ranks, progress=progress)


def load(
    location: Location,
    state: dict[str, Any],
    *,
    strict: bool,
    weights_only: bool | None,
    translated: Translation = AS_SAVED,
) -> dict[str, Any]:
    """Read into modules, optimizers and objects with `load_state_dict` in place, and replace plain values. All ranks call it.

    Args:
        location: From `save`, or from a Trainer (its keys are `model` and `optimizer_<i>`, in a file `state_dict`).
        state: What to restore.
        strict: Keys of `state` and names in state dicts must be present.
        weights_only: As for `torch.load`, and for everything in a directory: only `False` loads classes that were not allowed.
        translated: Names of parameters and buffers that have changed since, or are left out.

    Returns:
        What was saved and not requested, without weights and optimizer states.

    Raises:
        ValueError: There is no checkpoint.
        KeyError: It lacks a key of `state`.
        RuntimeError: It does not fit.
        RefusedError: It holds a class that was not allowed; nothing was changed.
    """
    ranks = Ranks()
    location.finish_interrupted_save(ranks)
    if location.is_sharded():
        directory = Directory.open(location, ranks, weights_only=weights_only)
        rest = location.read_file(META_FILE, weights_only)
        versions = rest.pop(MODULE_VERSIONS, {})
        saved_keys = {*directory.top_keys(), *rest}
    elif location.is_file():
        directory, rest, versions = None, location.read_file(None, weights_only), {}
        saved_keys = set(rest)
    else:
        raise location.no_checkpoint_error()
    present, indices, reads = _present(location, state, saved_keys, strict=strict), _indices(state), Reads(directory)
    models: dict[str, ModelPlan] = {}
    names: dict[int, set[str]] = {}
    optimizers: dict[str, OptimizerPlan] = {}
    for key, module in present.items():
        if isinstance(module, nn.Module):
            saved = rest.pop(key) if directory is None else _stored(directory, key, module, versions.get(key))
            saved = translated.model(location, saved)
            models[key] = plan_model(location, saved, indices[key], reads, strict=strict)
            names[id(module)] = {plain_name(name) for name in saved}
    for key, optimizer in present.items():
        if isinstance(optimizer, Optimizer):
            saved = rest.pop(key) if directory is None else StoredOptimizer(directory, key)
            index = _index_of(key, optimizer, indices)
            with on_all_ranks(f"comparing {key} with {location}"):
                plan = plan_optimizer(location, translated.optimizer(saved), index, optimizer, key, reads)
            if translated and id(index.module) in names:  # what is left out begins afresh
                plan = plan.only(names[id(index.module)])
            optimizers[key] = plan
    # What can be compared fits; state is changed from here on.
    with progress_bar(f"Loading {location}") as progress:
        reads.run(progress)
        for key, model_plan in models.items():
            finish_model(model_plan, state[key], progress)
    for key, plan in optimizers.items():
        finish_optimizer(plan, state[key])
    for key, value in state.items():
        if key not in rest or isinstance(value, (nn.Module, Optimizer)):
            continue
        if isinstance(value, Stateful):
            value.load_state_dict(rest.pop(key))
        else:
            state[key] = rest.pop(key)
    return rest


def load_raw(
    location: Location,
    module: nn.Module,
    *,
    strict: bool,
    weights_only: bool | None,
    translated: Translation = AS_SAVED,
) -> None:
    """Read a file that holds only the state dict of a plain module. All ranks call it."""
    if not location.is_file():
        raise location.no_checkpoint_error()
    saved = translated.model(location, location.read_file(None, weights_only))
    load_model(location, saved, ParameterIndex(module), strict=strict)


def _stored(directory: Directory, key: str, module: nn.Module, versions: dict[str, Any] | None) -> StoredState:
    """The state dict of a module in a directory."""
    if key == "model" and key not in directory.top_keys():
        key = "state_dict"  # as ModelParallelStrategy names it
    stored = StoredState.of(directory, key, known_names(module))
    if versions is not None:
        stored._metadata = versions
    return stored


def _present(path: Location, state: Mapping[str, Any], saved: Collection[str], *, strict: bool) -> dict[str, Any]:
    """The part of `state` that was saved."""
    # For a module without parameters and buffers, such as a loss, nothing is written.
    empty = [key for key, value in state.items() if isinstance(value, nn.Module) and not value.state_dict()]
    missing = [key for key in state if key not in saved and key not in empty]
    if missing and strict:
        raise KeyError(f"{path} holds nothing for {missing}, only {sorted(saved)}; ask for these, or pass strict=False")
    if missing:
        rank_zero_warn(f"{path} holds nothing for {missing}, which keep their present values, as strict=False says")
    return {key: value for key, value in state.items() if key in saved}


def _filtered(key: str, value: Any, filters: Filters) -> Any:
    if key not in filters or not isinstance(value, Mapping):
        return value
    return {name: part for name, part in value.items() if filters[key](name, part)}


def _indices(state: Mapping[str, Any]) -> dict[str, ParameterIndex]:
    """The index of each module in a state, by the state's keys."""
    return {key: ParameterIndex(value) for key, value in state.items() if isinstance(value, nn.Module)}


def _index_of(key: str, optimizer: Optimizer, indices: Mapping[str, ParameterIndex]) -> ParameterIndex:
    """The index of the module that an optimizer trains: its state is saved by parameter name."""
    for index in indices.values():
        if index.knows(optimizer):
            return index
    raise ValueError(
        f"{key!r} is an optimizer, but no single module of the state holds all of its parameters (modules: {list(indices)}). Put the "
        "module that it trains, as fabric.setup returned it, into the same state"
    )
