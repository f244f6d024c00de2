"""The runtime: units, their root, and the functions that inspect or change a sharded model."""
