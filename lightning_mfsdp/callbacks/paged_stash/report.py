"""What the callback says: which layers it enabled, what the pages cost, and whether that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_mfsdp.moe.saving import SavesActivations
from lightning_mfsdp.moe.stash import RowStash, StashStatistics
from lightning_mfsdp.tables import aligned, readable_bytes

__all__ = ["find_layers", "metrics", "report_layers", "report_sizes"]

PREFIX = "paged_stash/"
# Less than a tenth is not worth the copies.
_WORTH = 0.1


def find_layers(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The layers whose rows go into the stash, by name.

    Args:
        module: To look in.
        patterns: `fnmatch` patterns of names. A layer must fit one, and each one must fit a layer.

    Raises:
        ValueError: A pattern fits nothing that saves through a saver, or none of the modules does.
    """
    found: dict[str, nn.Module] = {}
    named = dict(module.named_modules())
    for pattern in patterns:
        fitting = {name: part for name, part in named.items() if fnmatchcase(name, pattern)}
        layers = {name: part for name, part in fitting.items() if _has_saver(part)}
        if not layers:
            raise ValueError(_nothing_found(pattern, fitting))
        found.update(layers)
    return {name: found[name] for name in named if name in found}


def _has_saver(module: nn.Module) -> bool:
    """Whether it has what `lightning_mfsdp.moe.saving` asks for."""
    return isinstance(module, SavesActivations) and all(
        callable(getattr(module.saver, method, None)) for method in ("save", "load")
    )


def _nothing_found(pattern: str, fitting: Mapping[str, nn.Module]) -> str:
    alike = [
        f"{name} ({type(part).__name__})" for name, part in fitting.items() if "expert" in type(part).__name__.lower()
    ]
    others = [f"{name or '(root)'} ({type(part).__name__})" for name, part in fitting.items()]
    what = f"it fits {', '.join((alike or others)[:4])}, which do not" if fitting else "it fits no module at all"
    return (
        f"PagedStash: modules={pattern!r} names no layer that saves its rows through a saver: {what}. Use "
        "lightning_mfsdp.moe.GroupedExperts, or give your experts a `saver`, see docs/paged_stash.md"
    )


def report_layers(layers: Mapping[str, nn.Module]) -> None:
    """Layer by layer, what was enabled."""
    lines = aligned([["  " + name, type(layer).__name__] for name, layer in layers.items()])
    rank_zero_info("\n".join([f"PagedStash: {len(layers)} layers save their rows in pages", *lines]))


def report_sizes(stash: RowStash, recorded: StashStatistics | None) -> None:
    """What the pages cost beside ordinary saves; a warning if they are not worth it."""
    if recorded is None or not recorded.saves:
        rank_zero_warn(
            "PagedStash: no layer saved anything in the recorded steps, so there are no pages yet. Do these layers run in training_step?"
        )
        return
    saved = recorded.ordinary_bytes - stash.page_bytes
    share = f"{100 * recorded.live_rows / max(recorded.capacity_rows, 1):.0f} %"
    costs = (
        f"{share} of the rows are live; pages take {readable_bytes(stash.page_bytes)} on the device and {readable_bytes(stash.host_bytes)} "
        f"on the host, where ordinary saves take {readable_bytes(recorded.ordinary_bytes)}"
    )
    if saved < _WORTH * recorded.ordinary_bytes:
        rank_zero_warn(
            f"PagedStash does not pay here: {costs}. It pays where buffers are larger than what lives in them (expert parallelism with a "
            "static capacity) or with host_factor; else leave it out"
        )
    else:
        rank_zero_info(f"PagedStash saves {readable_bytes(saved)}: {costs}")


def metrics(statistics: StashStatistics, growths: int) -> dict[str, float]:
    """What loggers get."""
    values = {**asdict(statistics), "saved_bytes": statistics.saved_bytes, "growths": growths}
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}
