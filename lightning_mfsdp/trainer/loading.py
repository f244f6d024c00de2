"""LightningModules from sharded directories, which `LightningModule.load_from_checkpoint` cannot open."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_mfsdp.checkpoint.tools.load import load_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["load_from_checkpoint"]

Module = TypeVar("Module", bound="LightningModule")


def load_from_checkpoint(
    module_class: type[Module],
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    averaged: bool = False,
    **hyperparameters: Any,
) -> Module:
    """`module_class.load_from_checkpoint(path, ...)`, also of a sharded directory. It runs in one process; the module is not sharded.

    The weights are whole in memory, and copied to a temporary file, which is then loaded.

    Args:
        module_class: Of the LightningModule that was trained.
        path: A directory or a file on this machine.
        map_location: As for `load_from_checkpoint`, and so are the next four.
        hparams_file: With hyperparameters.
        strict: Names must match exactly.
        weights_only: Only `False` loads classes that were not allowed.
        averaged: The module gets the average that `ShardedEMA` has saved.
        **hyperparameters: Instead of the saved ones.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, it holds a class that was not allowed, or with `averaged` no average.
        TypeError: Arguments in another order.
    """
    if not isinstance(module_class, type):
        raise TypeError(
            f"load_from_checkpoint: expected a LightningModule's class and then a path, got {module_class!r} first"
        )
    checkpoint = load_checkpoint(path, weights_only=weights_only, optimizers=False, averaged=averaged)
    with tempfile.TemporaryFile() as file:
        torch.save(checkpoint, file)
        del checkpoint
        file.seek(0)
        loaded: Module = module_class.load_from_checkpoint(
            file,
            map_location=map_location,
            hparams_file=None if hparams_file is None else os.fspath(hparams_file),
            strict=strict,
            weights_only=weights_only,
            **hyperparameters,
        )
    return loaded
