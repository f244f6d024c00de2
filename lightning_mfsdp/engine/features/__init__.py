"""Optional features on top of the core of sharded training."""
