"""What is saved and loaded of a sharded model: rows of parameters, of optimizer states, and of other tensors kept for parameters."""
