"""A parameter and its group: representations, weights that are sharded and unsharded, gradients that are reduced."""
