"""A sharding strategy as data: where weight, gradient and main weight lie on each mesh axis.

Nothing else in the engine checks a strategy by name; everything follows from these three placements on two axes.

                          weight          gradient        main weight
    no_shard            (outer) whole     whole           whole            ZeRO-0, data parallel
    optim                       whole     whole           sharded          ZeRO-1
    optim_grads                 whole     sharded         sharded          ZeRO-2
    optim_grads_params          sharded   sharded         sharded          ZeRO-3

On the outer axis of a 2-D mesh everything is whole (HSDP), or the main weight alone is sharded as well (HFSDP).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mfsdp.base.errors import ShardingError

__all__ = ["STRATEGIES", "Placement", "resolve_placement", "strategy_name"]

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which of the three buffers of a group are sharded. `weight`, `gradient`, `main`: on the shard axis; `outer_main`: on the outer.

    A sharded weight is unsharded only while it is used. With one rank on the shard axis that is a cast, or nothing (`ParameterGroup`).
    """

    weight: bool
    gradient: bool
    main: bool
    outer_main: bool


def strategy_name(sharding: str | int, argument: str = "sharding") -> str:
    """The strategy's name from a name or its number 0 to 3.

    Raises:
        ShardingError: Neither; lists what is accepted.
    """
    if isinstance(sharding, int) and not isinstance(sharding, bool) and 0 <= sharding < len(STRATEGIES):
        return STRATEGIES[sharding]
    if sharding in STRATEGIES:
        return str(sharding)
    raise ShardingError(f"{argument}: expected one of {', '.join(STRATEGIES)} or 0 to 3, got {sharding!r}")


def resolve_placement(sharding: str | int, outer_sharding: str | int, shard_size: int, outer_size: int) -> Placement:
    """Placements of a strategy on axes of these sizes. Gradients and main weights are not sharded on an axis of size 1.

    Raises:
        ShardingError: An unknown strategy, or an outer sharding that has nothing to shard.
    """
    level = STRATEGIES.index(strategy_name(sharding))
    outer = strategy_name(outer_sharding, "outer_sharding")
    if outer not in ("no_shard", "optim"):
        raise ShardingError(f'outer_sharding: expected "no_shard" (HSDP) or "optim" (HFSDP), got {outer_sharding!r}')
    if outer == "optim" and level == 0:
        raise ShardingError(
            'outer_sharding="optim" shards the main weights further, but sharding="no_shard" leaves them whole on the shard axis; '
            'use sharding="optim", "optim_grads" or "optim_grads_params"'
        )
    split = shard_size > 1
    return Placement(
        weight=level >= 3,
        gradient=split and level >= 2,
        main=split and level >= 1,
        outer_main=outer == "optim" and outer_size > 1,
    )
