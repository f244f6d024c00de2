"""Hyperparameters of a checkpoint that LightningCLI, which reads them from single files, did not see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_mfsdp.checkpoint.io.location import Location

__all__ = ["compare_hyperparameters"]

_BY_CLI = "_instantiator"  # what LightningCLI adds to the hyperparameters of modules that it creates


def compare_hyperparameters(location: Location, checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Warn where a module that LightningCLI has created differs from the saved one: from a file it would have taken the saved values."""
    saved, own = checkpoint.get("hyper_parameters", {}), module.hparams
    if _BY_CLI not in saved or _BY_CLI not in own:
        return
    differing = [
        f"{name}={saved.get(name)!r} in it and {own.get(name)!r} in this run"
        for name in dict.fromkeys((*saved, *own))
        if repr(saved.get(name)) != repr(own.get(name))  # of any kind: tensors and NaN are not equal to themselves
    ]
    if differing:
        rank_zero_warn(
            f"{location} has other hyperparameters of the model than this run: {'; '.join(differing[:8])}. LightningCLI takes those of a "
            "checkpoint that is one file, and cannot read a directory; to go on with the saved ones, pass them as options "
            "(--model.NAME=VALUE)"
        )
