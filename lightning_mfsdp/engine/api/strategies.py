"""Which sharding strategy each module has: one for all, or what patterns of names say, such as another one for experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.layout.placement import STRATEGIES, Placement, resolve_placement, strategy_name

__all__ = ["ChosenStrategies", "Sharding", "check_sharding", "choose_strategies"]

# Of modules that no pattern matches.
_STRATEGY_OF_THE_REST = STRATEGIES[-1]
_MOST_NAMES = 12  # in a message


@dataclass(frozen=True)
class ChosenStrategies:
    """One strategy for all modules, or patterns of names inside a root.

    Attributes:
        rest: The strategy of modules that no pattern matches.
        patterns: Strategies by patterns of module names.
        root: Whose names they are of.
        _known: Tables of parameters that have been looked up, with their strategies.
    """

    rest: str
    patterns: Mapping[str, str] = field(default_factory=dict)
    root: nn.Module | None = None
    _known: dict[int, tuple[object, str]] = field(default_factory=dict, repr=False, compare=False)

    def by_table(self, module: nn.Module) -> dict[int, str]:
        """The strategies of the parameters that each module inside `module` has itself, by the ids of modules' tables of parameters.

        Names are looked up again where a table is new, since modules may be replaced, or get others inside, after patterns were checked.
        """
        tables = [part._parameters for part in module.modules()]
        if self.root is not None and any(id(table) not in self._known for table in tables):
            for name, part in self.root.named_modules(remove_duplicate=False):
                pattern = _pattern_for(name, self.patterns)
                strategy = self.rest if pattern is None else self.patterns[pattern]
                self._known[id(part._parameters)] = part._parameters, strategy
        return {id(table): self._known.setdefault(id(table), (table, self.rest))[1] for table in tables}

    def placements(self, module: nn.Module, outer_sharding: str | int, mesh: Mesh) -> dict[int, Placement]:
        """What `by_table` says, as placements.

        Raises:
            ShardingError: A strategy does not go with the outer sharding.
        """
        outer_size = mesh.outer.size if mesh.outer else 1
        strategies = self.by_table(module)
        resolved = {
            strategy: resolve_placement(strategy, outer_sharding, mesh.shard.size, outer_size)
            for strategy in dict.fromkeys(strategies.values())
        }
        return {table: resolved[strategy] for table, strategy in strategies.items()}


# A strategy; patterns of module names, each with a strategy; or what such patterns chose in a module around.
Sharding: TypeAlias = str | int | Mapping[str, str | int] | ChosenStrategies


def check_sharding(sharding: object, outer_sharding: str | int) -> None:
    """Refuse what no module can be sharded with.

    Raises:
        ShardingError: A strategy that does not exist, or not with this outer sharding; or a mapping of something else.
    """
    if not isinstance(sharding, Mapping):
        resolve_placement(sharding, outer_sharding, 1, 1)  # type: ignore[arg-type]
        return
    if not sharding or not all(isinstance(pattern, str) for pattern in sharding):
        raise ShardingError(
            f"sharding={sharding!r}: expected a strategy, or a mapping from patterns of module names to strategies, such as "
            '{"*.experts": "optim", "*": "optim_grads_params"}'
        )
    for pattern, strategy in sharding.items():
        resolve_placement(strategy_name(strategy, f"sharding[{pattern!r}]"), outer_sharding, 1, 1)


def choose_strategies(module: nn.Module, sharding: Sharding) -> ChosenStrategies:
    """Check the strategies for the modules inside `module`.

    Args:
        module: Names are those inside it, and its own is "".
        sharding: If they are patterns (`fnmatch`), the first counts that matches the name of a module or of one around it. What none
            matches has its weights sharded, too.

    Raises:
        ShardingError: An unknown strategy, a pattern that decides about nothing, or a parameter that two modules with different ones share.
    """
    if isinstance(sharding, ChosenStrategies):
        return sharding
    if not isinstance(sharding, Mapping):
        return ChosenStrategies(strategy_name(sharding))
    check_sharding(sharding, "no_shard")
    parts = {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if any(True for _ in part.parameters())
    }
    pattern_of = {name: pattern for name in parts if (pattern := _pattern_for(name, sharding)) is not None}
    for pattern in sharding:
        if pattern not in pattern_of.values():
            raise ShardingError(_decides_about_nothing(pattern, module, sharding, parts))
    patterns = {pattern: strategy_name(strategy) for pattern, strategy in sharding.items()}
    _refuse_shared(parts, {name: patterns[pattern] for name, pattern in pattern_of.items()})
    return ChosenStrategies(_STRATEGY_OF_THE_REST, patterns, module)


def _pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    """The first that matches the name of a module, or of one around it."""
    around = list(_around(name))
    return next((pattern for pattern in patterns if any(fnmatchcase(outer, pattern) for outer in around)), None)


def _around(name: str) -> Iterator[str]:
    """The name of a module and those of the modules around it, the root's last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _decides_about_nothing(pattern: str, module: nn.Module, patterns: Iterable[str], names: Iterable[str]) -> str:
    """The message for a pattern that is without effect."""
    kind = type(module).__name__
    matched = next((name for name in names if fnmatchcase(name, pattern)), None)
    if matched is not None:
        first = _pattern_for(matched, patterns)
        return (
            f"sharding: what {pattern!r} matches in {kind}, such as {matched or 'the whole'}, {first!r} decides about already, and the "
            f"first pattern counts that matches a module or one around it; put {pattern!r} before {first!r}, or leave it out"
        )
    # One of each kind: the layers of a model have the same names but for their numbers.
    kinds = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names if name))
    few = ", ".join(kinds[:_MOST_NAMES]) + (f" and {len(kinds) - _MOST_NAMES} more" if len(kinds) > _MOST_NAMES else "")
    return (
        f"sharding: {pattern!r} matches no module with parameters in {kind}, which has {few or 'none but itself'}; expected a pattern of "
        "such names (fnmatch), where * matches dots too"
    )


def _refuse_shared(parts: Mapping[str, nn.Module], strategies: Mapping[str, str]) -> None:
    """Refuse patterns that would shard one parameter in two ways."""
    seen: dict[int, tuple[str, str]] = {}
    for name, part in parts.items():
        strategy = strategies.get(name, _STRATEGY_OF_THE_REST)
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            path = f"{name}.{key}" if name else key
            first, other = seen.setdefault(id(parameter), (path, strategy))
            if strategy != other:
                raise ShardingError(
                    f"sharding: {first} and {path} are one parameter, and would be sharded as {other!r} and as {strategy!r}; expected "
                    "patterns that choose one strategy for all modules which share a parameter"
                )
