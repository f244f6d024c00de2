"""Chooses which modules become units, if the user does not: the parts of a model that run one after the other.

It reads module trees only; sharding them is the engine's work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Literal, TypeAlias

from torch import nn

from lightning_mfsdp.base.tables import readable_bytes, table_lines
from lightning_mfsdp.engine import UnitView

__all__ = ["UnitsArgument", "describe_units", "join_blocks", "select_units", "validate_units"]

UnitsArgument: TypeAlias = (
    Literal["auto"] | Sequence[str | type[nn.Module]] | set[str | type[nn.Module]] | Callable[[nn.Module], bool]
)

# An embedding or head of this share of the model is worth gathering on its own, once it is not tiny; a huge one always is.
_LARGE_SHARE = 1 / 32
_LARGE_SHARE_MIN_NUMEL = 2**20
_LARGE_NUMEL = 2**26
# Blocks smaller than this are gathered together with their neighbors, but never so many that few units are left: then there would
# be no overlap, and as much gathered at once as without units.
_WORTH_A_GATHER_NUMEL = 2**25
_FEWEST_UNITS = 6
# The table shows a unit's padding from this fraction and this number of elements on.
_MUCH_PADDING = 0.05
_MUCH_PADDING_NUMEL = 2**18


def validate_units(units: UnitsArgument) -> None:
    """Check the `units` argument where it is given, long before there is a model.

    Raises:
        TypeError: Neither "auto", nor class names and classes, nor a callable.
    """
    if units == "auto" or (callable(units) and not isinstance(units, type)):
        return
    entries = units if isinstance(units, (Sequence, set, frozenset)) and not isinstance(units, str) else None
    if entries is None or not all(isinstance(entry, str) or _is_module_class(entry) for entry in entries):
        raise TypeError(
            f'units={units!r}: expected "auto", a list of module classes or class names such as ["Block"], or a callable that takes a '
            "module and returns whether it is a unit"
        )


def select_units(root: nn.Module, units: UnitsArgument) -> list[nn.Module]:
    """The modules inside `root` to shard as units, in registration order; `root` itself takes the rest.

    Args:
        root: The whole model, not sharded yet.
        units: "auto": repeated blocks of `ModuleList` and `Sequential`, classes a Hugging Face model names in `_no_split_modules`, and
            large embeddings and heads. Class names, classes or a callable: exactly those. Modules that are inside several of them, and
            so belong to none, become units of their own.

    Raises:
        ValueError: A name or class that matches no module with parameters.
    """
    if callable(units):
        chosen = [module for module in _inside(root) if units(module) and _numel(module)]
    elif units == "auto":
        chosen = _select_automatically(root)
    else:
        chosen = _select_by_class(root, list(units))
    return _with_shared(root, chosen)


def join_blocks(
    root: nn.Module, chosen: Sequence[nn.Module], blocks_per_unit: int | Literal["auto"]
) -> list[nn.Module | list[nn.Module]]:
    """Put chosen neighbors of one class in a `ModuleList` or `Sequential` together, a list for each unit; the others are unchanged.

    Args:
        root: The whole model.
        chosen: By `select_units`.
        blocks_per_unit: At most this many in a unit; "auto": until a unit is worth a gather of its own.
    """
    left = {id(module): module for module in chosen}
    joined: dict[int, list[nn.Module]] = {}
    for container in root.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for _, neighbors in groupby(container.children(), key=lambda child: (type(child), id(child) in left)):
            run = [child for child in neighbors if left.pop(id(child), None) is not None]
            for members in _in_equal_parts(run, _blocks_per_unit(run, blocks_per_unit)):
                joined.update({id(member): members for member in members})
    units = {id(members[0]): members for members in (joined.get(id(module), [module]) for module in chosen)}
    return [members[0] if len(members) == 1 else members for members in units.values()]


def _blocks_per_unit(run: Sequence[nn.Module], wanted: int | Literal["auto"]) -> int:
    if wanted != "auto" or not run:
        return 1 if wanted == "auto" else wanted
    largest = max(_numel(block) for block in run)
    return max(1, min(math.ceil(_WORTH_A_GATHER_NUMEL / largest), len(run) // _FEWEST_UNITS))


def _in_equal_parts(run: Sequence[nn.Module], most: int) -> list[list[nn.Module]]:
    """Consecutive parts of at most `most`, whose lengths differ by one at most."""
    count = math.ceil(len(run) / most)
    bounds = [len(run) * index // count for index in range(count + 1)] if count else []
    return [list(run[start:stop]) for start, stop in pairwise(bounds)]


def describe_units(views: Sequence[UnitView], num_trained: int, axes: Mapping[str, int]) -> str:
    """A table of units, equal ones in one line.

    Columns: name of the first, class, how many, and of each: parameters, MiB of weights that this rank keeps (main and compute weights),
    and MiB that it holds in addition while the unit is unsharded (`-`: its weights are always whole). Padding is a column only where some
    unit has much.

    Args:
        views: The units of a root.
        num_trained: Elements of main weights that are trained, and so of each optimizer state, on this rank.
        axes: Of the mesh, with their sizes; said if there is another one than the first.
    """
    shows_padding = any(_has_much_padding(view) for view in views)
    rows: list[tuple[str, ...]] = [("unit", "class", "count", "parameters", "sharded MiB", "unsharded MiB", "padding")]
    alike: dict[tuple[str, ...], list[UnitView]] = {}
    for view in views:
        unsharded = _mebibytes(view.full_bytes) if view.full_bytes else "-"
        padding = f"{view.padding_fraction:.1%}" if _has_much_padding(view) else ""
        key = (
            view.module_class,
            f"{view.num_parameters:,}",
            _mebibytes(view.main_bytes + view.held_bytes),
            unsharded,
            padding,
        )
        alike.setdefault(key, []).append(view)
    for (kind, *figures), members in alike.items():
        rows.append((members[0].name or "(root)", kind, str(len(members)), *figures))
    kept = readable_bytes(sum(view.main_bytes + view.held_bytes for view in views))
    total = sum(view.num_parameters for view in views)
    head = (
        f"mfsdp: {len(views)} unit{'s' * (len(views) != 1)}, {total:,} parameters; this rank keeps {kept} of weights and {num_trained:,} "
        "elements of each optimizer state"
    )
    if len(axes) > 1:
        head += f"; ranks: {' x '.join(f'{name} {size}' for name, size in axes.items())}"
    return "\n".join([head, *table_lines([row if shows_padding else row[:-1] for row in rows], right=range(2, 7))])


def _has_much_padding(view: UnitView) -> bool:
    """Small models are mostly padding, of no size that anyone would want back."""
    return view.padding_fraction >= _MUCH_PADDING and view.padding_fraction * view.num_parameters >= _MUCH_PADDING_NUMEL


def _mebibytes(size_bytes: int) -> str:
    size = size_bytes / 2**20
    return f"{size:,.1f}" if size >= 0.05 or not size_bytes else "<0.1"


def _select_by_class(root: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    def matches(module: nn.Module, entry: str | type[nn.Module]) -> bool:
        return type(module).__name__ == entry if isinstance(entry, str) else isinstance(module, entry)

    candidates = [module for module in _inside(root) if _numel(module)]
    for entry in wanted:
        if not any(matches(module, entry) for module in candidates):
            counts = Counter(type(module).__name__ for module in candidates)
            classes = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
            if any(matches(module, entry) for module in root.modules() if module is not root):
                raise ValueError(
                    f"units={list(wanted)!r}: {entry!r} has no forward, or no parameters, and a unit is gathered when its module is "
                    f"called; name modules inside it, or give it a forward. The model has: {classes or 'no such module'}"
                )
            raise ValueError(
                f"units={list(wanted)!r}: no module with parameters matches {entry!r}. The model has: {classes or 'no such module'}"
            )
    return [module for module in candidates if any(matches(module, entry) for entry in wanted)]


def _select_automatically(root: nn.Module) -> list[nn.Module]:
    large = _large_numel(root)
    owners = _parameter_owners(root)
    no_split = _no_split_names(root)
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        blocks = _repeated(module)
        for child in module.children():
            is_block = (child in blocks and not _is_stage(child)) or type(child).__name__ in no_split
            is_table = _is_table(child, module) and _own_numel(child) >= large
            is_leaf = next(child.children(), None) is None
            if (is_table or (is_block and (not is_leaf or _numel(child) >= large))) and _keeps_to_itself(child, owners):
                chosen.append(child)
            else:
                visit(child)

    visit(root)
    # A module registered twice is visited twice.
    return list(dict.fromkeys(chosen))


def _with_shared(root: nn.Module, chosen: Sequence[nn.Module]) -> list[nn.Module]:
    """The chosen modules, and what some of them share with others or with the rest: the outermost modules that can be called."""
    taken = {id(module) for module in chosen}
    at = {id(module): number for number, module in enumerate(chosen)}
    owners: dict[int, set[int]] = {}  # of each module, the chosen ones nearest above it; -1 is the root

    def visit(module: nn.Module, owner: int) -> None:
        owners_of_module = owners.setdefault(id(module), set())
        if owner in owners_of_module:
            return
        owners_of_module.add(owner)
        for child in module.children():
            visit(child, at.get(id(module), owner))

    visit(root, -1)
    shared: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        callable_ = type(module).forward is not nn.Module.forward
        if id(module) not in taken and len(owners[id(module)]) > 1 and callable_ and _numel(module):
            shared.append(module)
        else:
            for child in module.children():
                collect(child)

    collect(root)
    return [*chosen, *(module for module in dict.fromkeys(shared) if id(module) not in taken)]


def _is_table(module: nn.Module, parent: nn.Module) -> bool:
    """An embedding or projection that is called. Attention reads the weight of its `out_proj` without calling it."""
    return isinstance(module, (nn.Embedding, nn.Linear)) and not isinstance(parent, nn.MultiheadAttention)


def _repeated(container: nn.Module) -> list[nn.Module]:
    """Entries of a list or sequence that have at least one sibling of the same class; they can be called and have parameters."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return []
    entries = [
        entry for entry in container.children() if _numel(entry) and type(entry).forward is not nn.Module.forward
    ]
    counts = Counter(type(entry) for entry in entries)
    return [entry for entry in entries if counts[type(entry)] >= 2]


def _is_stage(module: nn.Module) -> bool:
    """A plain sequence of blocks: its blocks are the units, not the sequence."""
    return type(module) is nn.Sequential and any(
        next(block.children(), None) is not None for block in _repeated(module)
    )


def _no_split_names(root: nn.Module) -> frozenset[str]:
    """Class names that Hugging Face models in `root` declare as not to be split."""
    names: set[str] = set()
    for module in root.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set)):
            names.update(name for name in declared if isinstance(name, str))
    return frozenset(names)


def _parameter_owners(root: nn.Module) -> dict[int, set[int]]:
    """Identities of the modules that hold each parameter, by the parameter's identity."""
    owners: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _keeps_to_itself(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    """Whether no parameter of `module` is tied to one outside it."""
    inside = {id(part) for part in module.modules()}
    return all(owners[id(parameter)] <= inside for parameter in module.parameters())


def _large_numel(root: nn.Module) -> int:
    return min(_LARGE_NUMEL, max(_LARGE_SHARE_MIN_NUMEL, int(_numel(root) * _LARGE_SHARE)))


def _inside(root: nn.Module) -> Iterator[nn.Module]:
    return (module for module in root.modules() if module is not root and type(module).forward is not nn.Module.forward)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _is_module_class(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, nn.Module)
