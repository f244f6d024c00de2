"""The functions that shard a model, and those for custom training loops."""
