"""What the engine raises. Every message says what is wrong, where, what was expected and got, and what to do."""

from __future__ import annotations

__all__ = ["CollectiveError", "EngineStateError", "ShardingError"]


class ShardingError(ValueError):
    """A module, mesh, policy or optimizer that cannot be sharded as asked."""


class EngineStateError(RuntimeError):
    """A call that does not fit what the engine is doing, such as using a sharded parameter outside its unit."""


class CollectiveError(RuntimeError):
    """Ranks could not do together what they have to: one of them is gone, or does something else."""
