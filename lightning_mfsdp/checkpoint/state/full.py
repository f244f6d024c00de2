"""Reading single-file checkpoints into a sharded model: every rank maps the file and copies the rows it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.progress import CountingReads
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.sharded import check_names, check_restored, drops_extra_state, refresh
from lightning_mfsdp.checkpoint.state.sharded_optimizer import is_packed, restore_optimizer
from lightning_mfsdp.engine import ParameterView

__all__ = ["check_optimizers", "load_model", "load_optimizers"]


def load_model(
    path: Location, saved: Mapping[str, Any], index: ParameterIndex, *, strict: bool, reads: CountingReads | None = None
) -> None:
    """Copy whole tensors by name into the rows this rank owns, and report each to `reads`.

    Raises:
        RuntimeError: Names or shapes differ; all of them are listed.
    """
    module = index.module
    state = module.state_dict()
    names = {plain_name(name): name for name in state}
    present = {plain_name(name): value for name, value in state.items()}
    plain = {plain_name(name): value for name, value in saved.items()}
    plain = {name: value for name, value in plain.items() if not drops_extra_state(name, present)}
    shapes = {name: value.shape for name, value in plain.items() if isinstance(value, Tensor)}
    check_names(path, present, list(plain), shapes, strict=strict)
    check_restored(path, index, list(plain), strict=strict)
    rest = {}
    with torch.no_grad():
        for name, value in plain.items():
            view = index.views.get(name)
            if view is not None:
                for box in view.piece.boxes:
                    box.in_rows(view.main).copy_(box.in_whole(value))
            elif name in present:
                rest[names[name]] = value
            if reads is not None:
                reads.took(value)
    module.load_state_dict(rest, strict=False)
    refresh(module)


def load_optimizers(
    saved: Sequence[Mapping[str, Any]],
    index: ParameterIndex,
    optimizers: Sequence[Optimizer],
    *,
    reads: CountingReads | None = None,
) -> list[bool]:
    """Restore optimizers from states numbered by parameter, as an unsharded `Optimizer.state_dict()` has them; `check_optimizers` first.

    Returns:
        For each optimizer whether there was a state for it.
    """
    if not saved or not optimizers:
        return [False] * len(optimizers)
    for state, optimizer in zip(saved, optimizers, strict=True):
        names_by_group = index.names_by_group(optimizer)
        by_name: dict[str, dict[str, Any]] = {}
        for group, names in zip(state["param_groups"], names_by_group, strict=True):
            for key, name in zip(group["params"], names, strict=True):
                view = index.views.get(name)
                if key in state["state"]:  # also where a rank has no rows: its gradient there is empty, and is stepped
                    by_name[name] = {part: _state_rows(value, view) for part, value in state["state"][key].items()}
                if reads is not None:
                    reads.took(state["state"].get(key))
        options = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        restore_optimizer(optimizer, by_name, options, names_by_group)
    return [True] * len(optimizers)


def check_optimizers(
    path: Location, saved: Sequence[Mapping[str, Any]], index: ParameterIndex, optimizers: Sequence[Optimizer]
) -> None:
    """Compare saved states with optimizers, before anything is changed.

    Raises:
        RuntimeError: Another number of optimizers, parameter groups or parameters.
    """
    if not saved or not optimizers:
        return
    if len(saved) != len(optimizers):
        raise RuntimeError(
            f"{path} holds {len(saved)} optimizer states but {len(optimizers)} optimizers are configured; make them agree"
        )
    for number, (state, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
        theirs = [len(group["params"]) for group in state["param_groups"]]
        ours = [len(names) for names in index.names_by_group(optimizer)]
        if theirs != ours:
            raise RuntimeError(
                f"{path}: optimizer {number} has parameter groups of {theirs} parameters, here they have {ours}; configure the optimizers "
                "as they were when the checkpoint was saved"
            )


def _state_rows(value: Any, view: ParameterView | None) -> Any:
    if isinstance(value, Tensor) and is_packed(value):
        if view is None or view.local.shape == view.shape:
            return value
        raise RuntimeError(
            f"optimizer state of {view.name} in the checkpoint is a {type(value).__name__}, which cannot be divided; resume with "
            'sharding="no_shard" and without a tensor axis, or load weights only: trainer.validate(ckpt_path=...), then fit'
        )
    if isinstance(value, Tensor) and view is not None and value.dim() and value.shape == view.shape:
        return view.piece.of(value).clone()
    return value.clone() if isinstance(value, Tensor) else value
