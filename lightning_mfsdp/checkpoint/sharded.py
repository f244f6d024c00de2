"""Sharded checkpoints: a directory written by torch.distributed.checkpoint, in the layout of Lightning's own sharded strategies.

    model                     {parameter or buffer name: tensor}
    optimizer_<i>             {"state": {parameter name: {state name: tensor}}, "param_groups": [{..., "params": [names]}]}
    meta.pt                   everything else of a Lightning checkpoint (rank 0)

Names, shapes and values do not depend on the number of ranks or on the sharding strategy, so neither does what can read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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
    "is_sharded_checkpoint",
    "load_model",
    "load_optimizer",
    "optimizer_state",
    "restore_optimizer",
    "save",
]

META_FILE = "meta.pt"


class ParameterIndex:
    """Finds the sharded parameter behind a name, or the name behind whatever an optimizer holds."""

    def __init__(self, module: nn.Module) -> None:
        views = sharded_parameters(module)
        by_face = {id(view.dtensor): view for view in views}
        self.views: dict[str, ParameterView] = {}
        self._names: dict[int, str] = {id(face): view.name for view in views for face in (view.dtensor, view.local)}
        # A module registered twice shows its parameters under names that nothing else lists.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), name)
            if id(parameter) in by_face:
                self.views[name] = by_face[id(parameter)]

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
        path: Directory; made where missing.
        module: Sharded.
        model_state: Its `state_dict()`, or part of it.
        optimizer_states: From `optimizer_state`.
    """
    index = ParameterIndex(module)
    state: dict[str, Any] = {"model": _with_rows(model_state, index)}
    state.update({f"optimizer_{number}": value for number, value in enumerate(optimizer_states)})
    dcp_save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=True, overwrite=True))


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
        RuntimeError: Names or shapes differ; all of them are listed. With `strict=False` only shapes count.
    """
    metadata = FileSystemReader(path).read_metadata()
    index = ParameterIndex(module)
    current = module.state_dict()
    targets = _with_rows(current, index)
    saved = {".".join(map(str, item[1:])): key for key, item in _paths(metadata).items() if item[0] == "model"}
    shapes = {
        name: entry.size
        for name, key in saved.items()
        if isinstance(entry := metadata.state_dict_metadata[key], TensorStorageMetadata)
    }
    check_names(path, targets, list(saved), shapes, strict=strict)
    wanted = {name: value for name, value in targets.items() if name in saved}
    dcp_load({"model": wanted}, storage_reader=FileSystemReader(path))
    extra = {name: value for name, value in wanted.items() if not isinstance(value, Tensor)}
    if extra:
        module.load_state_dict(extra, strict=False)
    refresh_weights(module)


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
        elif item[2] in known:
            view = index.views.get(str(item[2]))
            if view is None or view.local.numel():
                target["state"].setdefault(item[2], {})[item[3]] = _empty_like_saved(metadata, flat, view)
    if not found:
        return False
    dcp_load({key: target}, storage_reader=FileSystemReader(path))
    _check_groups(path, key, [group.get("params", []) for group in target["param_groups"]], names_by_group)
    restore_optimizer(optimizer, target["state"], target["param_groups"], names_by_group)
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


def _with_rows(state: Mapping[str, Any], index: ParameterIndex) -> dict[str, Any]:
    """`state` with every sharded parameter as the rows this rank owns."""
    rows: dict[str, Any] = {}
    for name, value in state.items():
        view = index.views.get(name)
        rows[name] = value if view is None else RowShard.of(view.main, view.shape, view.rows)
    return rows


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
