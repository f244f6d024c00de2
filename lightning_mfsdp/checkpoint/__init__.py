"""Checkpoints of sharded models. `sharded`: every rank writes its own rows; `full`: reading files that hold whole tensors."""
