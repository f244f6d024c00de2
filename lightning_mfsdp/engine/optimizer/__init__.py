"""What an optimizer holds and steps, its state, and norms of gradients."""
