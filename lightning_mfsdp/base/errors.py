"""The errors that the engine raises. A message says what is wrong and where, what was expected and got, and what to do."""

from __future__ import annotations

__all__ = ["CollectiveError", "EngineStateError", "ShardingError"]


class ShardingError(ValueError):
    """A module, mesh, policy or optimizer that cannot be sharded as requested."""


class EngineStateError(RuntimeError):
    """A call that does not fit what the engine is doing, such as using a sharded parameter outside its unit."""


class CollectiveError(RuntimeError):
    """A collective operation failed: one of the ranks is gone, or does something else."""
