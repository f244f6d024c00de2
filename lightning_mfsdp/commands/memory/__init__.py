"""`memory`: what a training step takes of each GPU, without a GPU, and whether that fits."""
