"""What is saved and loaded of a sharded model: rows of parameters, of optimizer states, and of what else is kept for parameters."""
