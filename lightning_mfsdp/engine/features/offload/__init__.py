"""Main weights and optimizer state in host memory."""
