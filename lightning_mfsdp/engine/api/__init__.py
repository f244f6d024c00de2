"""How a model is sharded, and functions for loops of one's own."""
