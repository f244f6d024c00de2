"""apply_recompute: finds the layers of a model that are recomputed, and which of them together, and makes them regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

import lightning_mfsdp.te as te
from lightning_mfsdp.recompute.chunk import LayerChunk, Order
from lightning_mfsdp.recompute.config import Recompute
from lightning_mfsdp.recompute.host_copies import HostCopies
from lightning_mfsdp.recompute.operators import check_registered
from lightning_mfsdp.recompute.region import Region, refuse_operators, refuse_tiles, region_of
from lightning_mfsdp.recompute.tiles import check_kept_operators, check_token_wise

__all__ = ["Layer", "apply_recompute", "chunks_of", "find_stacks", "recomputed", "remove_recompute"]

Layer = tuple[str, nn.Module]


def apply_recompute(root: nn.Module, config: Recompute) -> list[str]:
    """Have activations of `root` recomputed in backward. What was applied before is replaced.

    Parameters, buffers, and names in state dicts are unchanged. Call it before `fully_shard`, so that large layers see their final
    forward; later calls work too. Forwards without gradients run as usual.

    Args:
        root: The whole model.
        config: What is recomputed.

    Returns:
        Names of what is recomputed, in registration order.

    Raises:
        ValueError: No layers, a pattern that matches nothing, layers that checkpoint themselves already, operators to keep or tiles inside
            modules of Transformer Engine, operators that do not exist or whose results cannot be kept, or tiled modules that compute
            several tokens together or are recomputed already.
    """
    check_registered(config.save_ops)
    chunks = [] if config.method == "none" else chunks_of(config, find_stacks(root, config.modules))
    names = [name for layers in chunks for name, _ in layers]
    for name in names:
        _check(root, name, config)
    tiled = _matching(root, config.tiled_modules, "tiled_modules") if config.tiled_modules else []
    if config.tiled_modules and not tiled:
        raise ValueError(
            f"Recompute: tiled_modules={list(config.tiled_modules)} match only containers, which are never called; name the modules in them"
        )
    for name, module in tiled:
        _check_tiled(name, module, config, names)
    of_tiles = Recompute(method="none", tiled_modules=config.tiled_modules, tiles=config.tiles)
    wanted = {**dict.fromkeys(names, config), **{name: of_tiles for name, _ in tiled}}
    if _present(root) != wanted:
        remove_recompute(root)
        copies, order = HostCopies() if config.offload else None, Order()
        for layers in chunks:
            chunk = LayerChunk([name for name, _ in layers], order) if len(layers) > 1 else None
            for index, (name, module) in enumerate(layers):
                Region(name, module, config, copies=copies, chunk=chunk, index=index)
        for name, module in tiled:
            Region(name, module, of_tiles, tiles=of_tiles.tiles)
    return names if not tiled else [name for name, _ in root.named_modules(remove_duplicate=False) if name in wanted]


def remove_recompute(root: nn.Module) -> None:
    """Undo `apply_recompute`: forwards save all activations again."""
    for module in root.modules():
        region = region_of(module)
        if region is not None:
            region.remove()


def recomputed(root: nn.Module) -> list[str]:
    """Names of modules in `root` whose activations are recomputed."""
    return list(_present(root))


def _present(root: nn.Module) -> dict[str, Recompute]:
    regions = ((name, region_of(module)) for name, module in root.named_modules())
    return {name: region.config for name, region in regions if region is not None and region.enabled}


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


def _check_tiled(name: str, module: nn.Module, config: Recompute, recomputed_names: Sequence[str]) -> None:
    check_token_wise(name, module)
    if te.has_engine_modules(module):
        refuse_tiles(name)
    inside = [other for other in recomputed_names if other == name or other.startswith(f"{name}.")]
    if inside or any(map(_checkpoints_itself, module.modules())):
        raise ValueError(
            f"Recompute: tiled_modules: {name} is recomputed piece by piece, and {inside[0] if inside else 'a part of it'} is recomputed "
            "already; leave one of the two out"
        )
    if any(name.startswith(f"{other}.") for other in recomputed_names):
        check_kept_operators(name, config.save_ops)


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether a module checkpoints by itself, as Hugging Face's switch says, or that of `MultiTokenPredictor`."""
    names = ("gradient_checkpointing", "recomputes_itself")
    return any(getattr(module, name, False) is True for name in names)


def chunks_of(config: Recompute, stacks: Sequence[Sequence[Layer]]) -> list[list[Layer]]:
    """The layers that are recomputed, those that are recomputed together in one list.

    Args:
        config: Anything but "none".
        stacks: From `find_stacks`.
    """
    chosen: list[list[Layer]] = []
    for stack in stacks:
        if config.method == "block":
            assert config.num_layers is not None, "checked where it is made"
            chosen += [[layer] for layer in stack[: config.num_layers]]
            continue
        together = config.num_layers or 1
        chunks = [list(stack[start : start + together]) for start in range(0, len(stack), together)]
        chosen += chunks[:: config.every_nth]
    return chosen


def find_stacks(root: nn.Module, patterns: Sequence[str] = ()) -> list[list[Layer]]:
    """The layers of a model by the module around them, in registration order.

    Args:
        root: The whole model.
        patterns: Of names of layers; of modules inside one another the outermost counts. None: modules with modules inside that repeat in
            a `ModuleList` or `Sequential`, others of their classes, and the classes a Hugging Face model says not to split.

    Raises:
        ValueError: A pattern that matches no module, or no layer.
    """
    layers = _matching(root, patterns, "modules") if patterns else _repeating(root)
    stacks: dict[str, list[Layer]] = {}
    for name, module in layers:
        stacks.setdefault(name.rpartition(".")[0], []).append((name, module))
    if not stacks:
        raise ValueError(
            f"Recompute: {type(root).__name__} has no layers that repeat in a ModuleList or Sequential; name the modules to recompute "
            'with modules=["name.of.*"]'
        )
    return list(stacks.values())


def _matching(root: nn.Module, patterns: Sequence[str], option: str) -> list[Layer]:
    named = [(name, module) for name, module in root.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(
                f"Recompute: {option}: {pattern!r} matches no module of {type(root).__name__}; names look like "
                f"{[name for name, _ in named][:6]}"
            )
    layers: list[Layer] = []
    for name, module in named:
        is_container = type(module).forward is nn.Module.forward  # it is never called: its entries are
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in layers)
        if not (is_container or is_inside) and any(fnmatchcase(name, pattern) for pattern in patterns):
            layers.append((name, module))
    return layers


def _repeating(root: nn.Module) -> list[Layer]:
    kinds = {type(entry) for container in root.modules() for entry in _repeated(container)}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
    no_split = _no_split_names(root)

    def visit(module: nn.Module, prefix: str) -> Iterator[Layer]:
        repeated = _repeated(module)
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if child in repeated or type(child) in kinds or type(child).__name__ in no_split:
                yield name, child
            else:
                yield from visit(child, f"{name}.")

    return list({id(layer[1]): layer for layer in visit(root, "")}.values())


def _repeated(container: nn.Module) -> list[nn.Module]:
    """Entries of a list or sequence with modules inside and with a sibling of their class, unless they are sequences of such."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    entries = [entry for entry in container.children() if _is_layer(entry)]
    counts = Counter(type(entry) for entry in entries)
    return [entry for entry in entries if counts[type(entry)] > 1 and not _repeated(entry)]


def _is_layer(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return (
        has_parameters and next(module.children(), None) is not None and type(module).forward is not nn.Module.forward
    )


def _no_split_names(root: nn.Module) -> frozenset[str]:
    """Class names that Hugging Face models in `root` declare as not to be split."""
    declared = (getattr(module, "_no_split_modules", None) for module in root.modules())
    return frozenset(name for names in declared if isinstance(names, (list, tuple, set)) for name in names)
