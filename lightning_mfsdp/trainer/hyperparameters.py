"""Hyperparameters of a checkpoint that LightningCLI, which reads them from single files, did not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_mfsdp.checkpoint.io.location import Location

__all__ = ["compare_hyperparameters"]

_BY_CLI = "_instantiator"  # what LightningCLI adds to the hyperparameters of modules that it creates
_NAMED = 8  # hyperparameters in a message
_SHOWN_CHARACTERS = 40  # of a value


def compare_hyperparameters(location: Location, checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Warn where a module that LightningCLI has created differs from the saved one: from a file it would have taken the saved values."""
    saved, own = checkpoint.get("hyper_parameters", {}), module.hparams
    if _BY_CLI not in saved or _BY_CLI not in own:
        return
    saved, own = dict(_flat(saved)), dict(_flat(own))
    differing = [
        f"{name}={_short(saved.get(name))} in it and {_short(own.get(name))} in this run"
        for name in dict.fromkeys((*saved, *own))
        if repr(saved.get(name)) != repr(own.get(name))  # of any kind: tensors and NaN are not equal to themselves
    ]
    if differing:
        more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        rank_zero_warn(
            f"{location} has other hyperparameters of the model than this run: {'; '.join(differing[:_NAMED])}{more}. LightningCLI "
            "takes those of a checkpoint that is one file, and cannot read a directory; to go on with the saved ones, pass them as options "
            "(--model.NAME=VALUE)"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Hyperparameters by name; of those that are mappings, the values inside, by names with dots."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
