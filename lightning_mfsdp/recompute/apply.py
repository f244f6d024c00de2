"""apply_recompute: the layers of a model become regions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import lightning_mfsdp.te as te
from lightning_mfsdp.recompute.choice import Layer, chunks_of, find_stacks
from lightning_mfsdp.recompute.chunk import Chunk, Order
from lightning_mfsdp.recompute.config import Recompute
from lightning_mfsdp.recompute.offload import HostCopies
from lightning_mfsdp.recompute.operators import check_registered
from lightning_mfsdp.recompute.region import Region, refuse_operators, region_of

__all__ = ["apply_recompute", "recomputed", "remove_recompute"]


def apply_recompute(root: nn.Module, config: Recompute) -> list[str]:
    """Have activations of `root` computed again in backward. What was applied before is replaced.

    Parameters, buffers, and names in state dicts stay as they are. Call it before `fully_shard`, so that large layers find their forward
    as it will be; later calls work too. Forwards without gradients run as ever.

    Args:
        root: The whole model.
        config: What is computed again.

    Returns:
        Names of what is computed again, in registration order.

    Raises:
        ValueError: No layers, a pattern that matches nothing, layers that checkpoint themselves already, operators to keep inside modules
            of Transformer Engine, or ones that there are not or whose results cannot be kept.
    """
    if config.method == "none":
        remove_recompute(root)
        return []
    check_registered(config.save_ops)
    chunks = chunks_of(config, find_stacks(root, config.modules))
    for name, _ in (layer for chunk in chunks for layer in chunk):
        _check(root, name, config)
    names = [name for chunk in chunks for name, _ in chunk]
    if _present(root) != dict.fromkeys(names, config):
        remove_recompute(root)
        copies, order = HostCopies() if config.offload else None, Order()
        for chunk in chunks:
            _apply_to(chunk, config, copies, order)
    return names


def _apply_to(layers: Sequence[Layer], config: Recompute, copies: HostCopies | None, order: Order) -> None:
    chunk = Chunk([name for name, _ in layers], order) if len(layers) > 1 else None
    for index, (name, module) in enumerate(layers):
        Region(name, module, config, copies=copies, chunk=chunk, index=index)


def remove_recompute(root: nn.Module) -> None:
    """Keep all activations again."""
    for module in root.modules():
        region = region_of(module)
        if region is not None:
            region.remove()


def recomputed(root: nn.Module) -> list[str]:
    """Names of modules in `root` whose activations are computed again."""
    return list(_present(root))


def _present(root: nn.Module) -> dict[str, Recompute]:
    found = ((name, region_of(module)) for name, module in root.named_modules())
    return {name: region.config for name, region in found if region is not None and region.enabled}


def _check(root: nn.Module, name: str, config: Recompute) -> None:
    module, path = root.get_submodule(name), name.split(".")
    around = [root.get_submodule(".".join(path[:length])) for length in range(1, len(path))]
    if any(map(_checkpoints_itself, (*around, *module.modules()))):
        raise ValueError(
            f"Recompute: {name} checkpoints itself already, or a module around it does, so it would be computed three times; turn the "
            "model's own checkpointing off, or leave recompute out"
        )
    if te.has_engine_modules(module):
        refuse_operators(name, config)


def _checkpoints_itself(module: nn.Module) -> bool:
    """By the name that Hugging Face gives its switch, and the one that `MultiTokenPredictor` gives its own."""
    names = ("gradient_checkpointing", "recomputes_itself")
    return any(getattr(module, name, False) is True for name in names)
