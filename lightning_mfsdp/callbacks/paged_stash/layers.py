"""Which layers of a module save their rows through the stash: those with a saver, and those of Hugging Face's models, which get one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from lightning_mfsdp.moe.huggingface import ModelWithExperts, models_with_experts
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver, has_saver, wrong_saver_because
from lightning_mfsdp.moe.stash import RowStash
from lightning_mfsdp.moe.stash.stash import LayerSaver

__all__ = ["StashedLayers", "find_layers"]


@dataclass(frozen=True, kw_only=True)
class StashedLayers:
    """The layers that were found, and their earlier state.

    Attributes:
        layers: Layers that can save their rows in the stash, by name.
        refused: Layers that fit a pattern and cannot, with the reason.
        models: Those of the Hugging Face models around `layers` that compute their experts by themselves.
        savers: Of `layers`, by name.
    """

    layers: Mapping[str, nn.Module]
    refused: Mapping[str, str]
    models: Sequence[ModelWithExperts]
    savers: Mapping[str, ActivationSaver]

    def stash(self, stash: RowStash) -> None:
        """Make all of them save into the stash."""
        for model in self.models:
            model.switch(OrdinarySaver())
        for name, layer in self.layers.items():
            _set_saver(layer, stash.saver(name))

    def restore(self) -> None:
        """Restore them."""
        for name, saver in self.savers.items():
            if has_saver(self.layers[name]):  # another stash of the same model may have restored it before
                _set_saver(self.layers[name], saver)
        for model in self.models:
            model.restore()


def find_layers(module: nn.Module, patterns: Sequence[str]) -> StashedLayers:
    """The layers whose rows go into the stash. Nothing is changed yet.

    Args:
        module: To search.
        patterns: `fnmatch` patterns of names. A layer must fit one, and each one must fit a layer.

    Raises:
        ValueError: A pattern fits nothing that saves through a saver, or a layer saves into another stash.
    """
    models = models_with_experts(module)
    named = dict(module.named_modules())
    refused = {name: reason for name, part in named.items() if (reason := wrong_saver_because(part))}
    refused.update({name: reason for model in models for name, reason in model.refused.items()})
    able = {name for model in models if not model.refused for name in model.layers}
    chosen: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for pattern in patterns:
        fitting = {name: part for name, part in named.items() if fnmatchcase(name, pattern)}
        layers = {name: part for name, part in fitting.items() if name in able or has_saver(part)}
        left.update({name: reason for name, reason in refused.items() if name in fitting})
        if not layers:
            raise ValueError(_nothing_found(pattern, fitting, left))
        chosen.update(layers)
    _check_unused(chosen)
    return StashedLayers(
        layers={name: chosen[name] for name in named if name in chosen},
        refused=left,
        models=[model for model in models if not model.is_switched and chosen.keys() & model.layers.keys()],
        savers={name: cast(Any, part).saver if has_saver(part) else OrdinarySaver() for name, part in chosen.items()},
    )


def _set_saver(layer: nn.Module, saver: ActivationSaver) -> None:
    cast(Any, layer).saver = saver


def _check_unused(layers: Mapping[str, nn.Module]) -> None:
    taken = [name for name, part in layers.items() if has_saver(part) and isinstance(cast(Any, part).saver, LayerSaver)]
    if taken:
        raise ValueError(
            f"PagedStash: {taken[0]} saves its rows in another stash already, of another PagedStash or of your own. Let each have "
            "layers of its own (modules=[...]), or leave one out"
        )


def _nothing_found(pattern: str, fitting: Mapping[str, nn.Module], refused: Mapping[str, str]) -> str:
    shown = {
        name: f"{name or '(root)'} ({type(part).__name__}{f', {refused[name]}' if name in refused else ''})"
        for name, part in fitting.items()
    }
    alike = [text for name, text in shown.items() if "expert" in type(fitting[name]).__name__.lower()]
    what = (
        f"it fits {', '.join((alike or list(shown.values()))[:4])}, which do not"
        if fitting
        else "it fits no module at all"
    )
    return (
        f"PagedStash: modules={pattern!r} names no layer that saves its rows through a saver: {what}. Use "
        "lightning_mfsdp.moe.GroupedExperts, or give your experts a `saver`, see docs/paged_stash.md"
    )
