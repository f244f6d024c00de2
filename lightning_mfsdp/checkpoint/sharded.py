"""Sharded checkpoints: a directory written by torch.distributed.checkpoint, in the layout of Lightning's own sharded strategies.

    model                     {parameter or buffer name: tensor}
    optimizer_<i>             {"state": {parameter name: {state name: tensor}}, "param_groups": [{..., "params": [names]}]}
    meta.pt                   everything else of a Lightning checkpoint (rank 0)

Names, shapes and values do not depend on the number of ranks or on the sharding strategy, so neither does what can read it. Names are
compared without what torch.compile and activation checkpointing put into them, so these may come and go.

A parameter is known by its memory, never by its name: names in a state dict may have been changed by anybody's hook.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint.rows import RowShard
from lightning_mfsdp.engine import ParameterView, refresh_weights, sharded_parameters

__all__ = [
    "META_FILE",
    "ParameterIndex",
    "check_names",
    "check_restored",
    "is_sharded_checkpoint",
    "load_model",
    "load_optimizer",
    "optimizer_state",
    "plain_name",
    "restore_optimizer",
    "rows_by_name",
    "save",
]

META_FILE = "meta.pt"

# Modules of these names wrap another one and add nothing of their own: activation checkpointing and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """The name a parameter has without wrappers around its modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ParameterIndex:
    """Finds the sharded parameter behind a name or behind memory, or the name behind whatever an optimizer holds. Names are plain."""

    def __init__(self, module: nn.Module) -> None:
        self.all = sharded_parameters(module)
        by_face = {id(view.dtensor): view for view in self.all}
        self.views: dict[str, ParameterView] = {}
        self._names: dict[int, str] = {
            id(face): plain_name(view.name) for view in self.all for face in (view.dtensor, view.local)
        }
        self._by_memory = {view.main.data_ptr(): view for view in self.all if view.main.numel()}
        self._meshes = {view.dtensor.device_mesh for view in self.all if isinstance(view.dtensor, DTensor)}
        # A module registered twice shows its parameters under names that nothing else lists, and hooks may rename.
        in_state_dict = nn.Module.state_dict(module, keep_vars=True).items()
        for name, parameter in (*module.named_parameters(remove_duplicate=False), *in_state_dict):
            self._names.setdefault(id(parameter), plain_name(name))
            if id(parameter) in by_face:
                self.views[plain_name(name)] = by_face[id(parameter)]

    def rows_of(self, value: Any) -> Any:
        """What is saved of an entry of a state dict: sharded parameters as their rows, everything else as it is.

        Returns:
            `None` for a tensor that was computed from a sharded parameter: its rows are not where a DTensor's would be.
        """
        if not isinstance(value, DTensor) or value.device_mesh not in self._meshes:
            return value
        local = value.to_local().detach()
        view = self._by_memory.get(local.data_ptr()) if local.numel() else None
        if (
            view is not None
            and view.shape == value.shape
            and view.main.shape == local.shape
            and view.dtype == local.dtype
        ):
            return RowShard.of(view.main, view.shape, view.rows)
        if not any(placement.is_shard() for placement in value.placements):
            return value
        # Of a tensor without rows here nothing is written or read, whatever it is.
        return None if local.numel() else RowShard.of(local, value.shape, range(0))

    def name_of(self, parameter: Tensor) -> str:
        """Name of a parameter an optimizer holds.

        Raises:
            ValueError: It is not part of the module.
        """
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the LightningModule; its state cannot be "
                "saved or restored by name. Build optimizers from self.parameters() or parts of it"
            )
        return name

    def names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        """Parameter names of each param_group, in order."""
        return [[self.name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether `path` is a directory this module could have written."""
    return path.is_dir() and (path / META_FILE).is_file()


def save(path: Path, module: nn.Module, model_state: Mapping[str, Any], optimizer_states: list[dict[str, Any]]) -> None:
    """Write weights and optimizer states. All ranks call it.

    Args:
        path: Directory without a checkpoint; made where missing.
        module: Sharded.
        model_state: Its `state_dict()`, or part of it.
        optimizer_states: From `optimizer_state`.

    Raises:
        RuntimeError: An entry of `model_state` was computed from sharded parameters, so its rows are unknown.
    """
    rows = rows_by_name(model_state, ParameterIndex(module), "saving a checkpoint")
    state: dict[str, Any] = {"model": rows}
    state.update({f"optimizer_{number}": value for number, value in enumerate(optimizer_states)})
    dcp_save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=True, overwrite=False))


def rows_by_name(state: Mapping[str, Any], index: ParameterIndex, doing: str) -> dict[str, Any]:
    """`state` with every sharded parameter as the rows this rank owns. All ranks call it.

    Raises:
        RuntimeError: On all ranks, if an entry was computed from sharded parameters on any.
    """
    rows = {name: index.rows_of(value) for name, value in state.items()}
    unknown = [name for name, value in rows.items() if value is None and state[name] is not None]
    if dist.is_initialized():
        everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, unknown)
        unknown = list(dict.fromkeys(name for names in everyones for name in names))
    if unknown:
        raise RuntimeError(
            f"{doing}: {', '.join(unknown[:8])} (of {len(unknown)}) in the state dict are DTensors of no sharded parameter, so their rows "
            "are unknown; expected the module's own tensors or plain tensors. A hook (on_save_checkpoint, state_dict) cast or "
            "copied them: leave values as they are (other names are fine), or put in value.full_tensor()"
        )
    return rows


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name, for `save`; tensors share memory with the optimizer's.

    Raises:
        ValueError: A state tensor that is sharded in another way than its parameter.
    """
    index = ParameterIndex(module)
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = index.name_of(parameter)
        view = index.views.get(name)
        state[name] = {key: _state_value(f"{name}.{key}", value, view) for key, value in values.items()}
    groups = []
    for group, names in zip(optimizer.param_groups, index.names_by_group(optimizer), strict=True):
        groups.append({**group, "params": names})
    return {"state": state, "param_groups": groups}


def load_model(path: Path, module: nn.Module, *, strict: bool) -> None:
    """Read weights and buffers in place. All ranks call it.

    Raises:
        RuntimeError: Names or shapes differ; all of them are listed. With `strict=False` only shapes count, and a warning says which
            parameters stay as they are.
    """
    metadata = FileSystemReader(path).read_metadata()
    index = ParameterIndex(module)
    rows = rows_by_name(module.state_dict(), index, f"loading {path}")
    targets = {plain_name(name): (name, value) for name, value in rows.items()}
    saved: dict[str, str] = {}
    shapes: dict[str, torch.Size] = {}
    for key, item in _paths(metadata).items():
        if item[0] == "model":
            name = plain_name(str(item[1]))
            saved[name] = str(item[1])
            entry = metadata.state_dict_metadata[key]
            if len(item) == 2 and isinstance(entry, TensorStorageMetadata):
                shapes[name] = entry.size
    check_names(path, {name: value for name, (_, value) in targets.items()}, list(saved), shapes, strict=strict)
    check_restored(path, index, [name for name in targets if name in saved], strict=strict)
    wanted = {saved[name]: value for name, (_, value) in targets.items() if name in saved}
    dcp_load({"model": wanted}, storage_reader=FileSystemReader(path))
    extra = {
        name: wanted[saved[plain_name(name)]]
        for name, value in targets.values()
        if plain_name(name) in saved and not isinstance(value, Tensor)
    }
    if extra:
        module.load_state_dict(extra, strict=False)
    refresh_weights(module)


def check_restored(path: Path, index: ParameterIndex, names: Sequence[str], *, strict: bool) -> None:
    """See to it that no sharded parameter silently keeps the value it was built with.

    Args:
        path: For the message.
        index: Of the model.
        names: Plain names of what will be read.
        strict: Whether it is an error; else it is a warning. A parameter without elements may be missing.

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
        raise RuntimeError(
            f"{message}. Let state_dict() of the LightningModule list them, or set strict_loading=False on it if this is meant"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(message, stacklevel=2)


def load_optimizer(path: Path, module: nn.Module, optimizer: Optimizer, number: int) -> bool:
    """Read the state of optimizer `number`. All ranks call it.

    Returns:
        False where the checkpoint holds no state for it (saved with weights only).

    Raises:
        RuntimeError: The optimizer's parameter groups hold other parameters than the saved ones.
    """
    key = f"optimizer_{number}"
    metadata = FileSystemReader(path).read_metadata()
    index = ParameterIndex(module)
    names_by_group = index.names_by_group(optimizer)
    known = {name for names in names_by_group for name in names}
    target: dict[str, Any] = {"state": {}, "param_groups": [{} for _ in names_by_group]}
    found = False
    for flat, item in _paths(metadata).items():
        if item[0] != key:
            continue
        found = True
        if item[1] == "param_groups":
            while len(target["param_groups"]) <= int(item[2]):
                target["param_groups"].append({})
            target["param_groups"][int(item[2])][item[3]] = _empty_like_saved(metadata, flat, None)
        elif plain_name(str(item[2])) in known:
            view = index.views.get(plain_name(str(item[2])))
            if view is None or view.local.numel():
                target["state"].setdefault(item[2], {})[item[3]] = _empty_like_saved(metadata, flat, view)
    if not found:
        return False
    dcp_load({key: target}, storage_reader=FileSystemReader(path))
    saved_groups = [[plain_name(name) for name in group.get("params", [])] for group in target["param_groups"]]
    _check_groups(path, key, saved_groups, names_by_group)
    state = {plain_name(name): values for name, values in target["state"].items()}
    restore_optimizer(optimizer, state, target["param_groups"], names_by_group)
    return True


def restore_optimizer(
    optimizer: Optimizer,
    state_by_name: Mapping[str, Mapping[str, Any]],
    param_groups: list[dict[str, Any]],
    names_by_group: list[list[str]],
) -> None:
    """Put state keyed by parameter name, with local tensors, into an optimizer. Options a checkpoint lacks keep their present value."""
    numbers = {name: number for number, name in enumerate(name for names in names_by_group for name in names)}
    groups = []
    for present, saved, names in zip(optimizer.param_groups, param_groups, names_by_group, strict=True):
        groups.append({**present, **saved, "params": [numbers[name] for name in names]})
    state = {
        numbers[name]: {key: value._piece if isinstance(value, RowShard) else value for key, value in values.items()}
        for name, values in state_by_name.items()
        if name in numbers
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state_value(name: str, value: Any, view: ParameterView | None) -> Any:
    if view is None or not isinstance(value, Tensor):
        return value
    local = value.to_local() if isinstance(value, DTensor) else value
    if value.dim() and local.shape == view.local.shape and value.shape in (view.shape, view.local.shape):
        return RowShard.of(local, view.shape, view.rows)
    if isinstance(value, DTensor):
        if any(placement.is_shard() for placement in value.placements):
            raise ValueError(
                f"optimizer state {name}: a tensor of shape {tuple(value.shape)} sharded as {value.placements} for a parameter of shape "
                f"{tuple(view.shape)}; a sharded checkpoint can hold state shaped like its parameter, or the same on all ranks"
            )
        return local
    return value


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Nested path of every flat key of a checkpoint."""
    return dict(metadata.planner_data or {})


def _empty_like_saved(metadata: Metadata, key: str, view: ParameterView | None) -> Any:
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if view is None or not saved.size or saved.size != view.shape:
        return torch.empty(saved.size, dtype=dtype)
    return RowShard.of(torch.empty_like(view.local, dtype=dtype, requires_grad=False), view.shape, view.rows)


def check_names(
    path: Path, present: Mapping[str, Any], saved: Sequence[str], shapes: Mapping[str, torch.Size], *, strict: bool
) -> None:
    """Compare names and global shapes of a checkpoint with those of a model.

    Args:
        path: For the message.
        present: The model's state by name.
        saved: Names in the checkpoint.
        shapes: Global shapes of the tensors among them.
        strict: Whether a name on one side only is an error.

    Raises:
        RuntimeError: All that does not fit.
    """
    known = set(saved)
    problems = []
    for name, value in present.items():
        shape = value.size() if isinstance(value, Tensor) else None
        if name not in known:
            # An empty tensor has nothing that could be saved.
            if strict and (shape is None or shape.numel()):
                problems.append(f"missing in the checkpoint: {name}")
        elif shape is not None and name in shapes and shapes[name] != shape:
            problems.append(f"shape of {name}: {tuple(shapes[name])} in the checkpoint, {tuple(shape)} in the model")
    if strict:
        problems += [f"missing in the model: {name}" for name in saved if name not in present]
    if problems:
        raise RuntimeError(
            f"the checkpoint {path} does not fit the model:\n  "
            + "\n  ".join(problems)
            + "\nLoad it into the model it was saved from, or set strict_loading=False on the LightningModule to ignore missing names"
        )


def _check_groups(path: Path, key: str, saved: list[list[str]], present: list[list[str]]) -> None:
    for number in range(max(len(saved), len(present))):
        theirs = saved[number] if number < len(saved) else []
        ours = present[number] if number < len(present) else []
        if sorted(theirs) != sorted(ours):
            only_saved, only_here = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
            raise RuntimeError(
                f"{key} in {path}: parameter group {number} differs: only in the checkpoint {only_saved[:8]}, only here {only_here[:8]}. "
                "Configure the optimizers as they were when the checkpoint was saved, or load weights only: "
                "trainer.validate(ckpt_path=...), then fit"
            )
