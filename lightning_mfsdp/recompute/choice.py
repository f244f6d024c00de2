"""Which modules of a model are computed again, and which of them together. It reads the module tree only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_mfsdp.recompute.config import Recompute

__all__ = ["Layer", "chunks_of", "find_stacks"]

Layer = tuple[str, nn.Module]


def chunks_of(config: Recompute, stacks: Sequence[Sequence[Layer]]) -> list[list[Layer]]:
    """What is computed again, layers that are computed again together in one list.

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
    layers = _matching(root, patterns) if patterns else _repeating(root)
    stacks: dict[str, list[Layer]] = {}
    for name, module in layers:
        stacks.setdefault(name.rpartition(".")[0], []).append((name, module))
    if not stacks:
        raise ValueError(
            f"Recompute: {type(root).__name__} has no layers that repeat in a ModuleList or Sequential; say which modules are computed "
            'again with modules=["name.of.*"]'
        )
    return list(stacks.values())


def _matching(root: nn.Module, patterns: Sequence[str]) -> list[Layer]:
    named = [(name, module) for name, module in root.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(
                f"Recompute: modules: {pattern!r} matches no module of {type(root).__name__}; names look like "
                f"{[name for name, _ in named][:6]}"
            )
    found: list[Layer] = []
    for name, module in named:
        is_container = type(module).forward is nn.Module.forward  # it is never called: its entries are
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if not (is_container or is_inside) and any(fnmatchcase(name, pattern) for pattern in patterns):
            found.append((name, module))
    return found


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
    """Class names that Hugging Face models in `root` say must stay whole."""
    declared = (getattr(module, "_no_split_modules", None) for module in root.modules())
    return frozenset(name for names in declared if isinstance(names, (list, tuple, set)) for name in names)
