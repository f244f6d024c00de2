"""Where a checkpoint lies, how it gets there whole or not at all, and how it is opened."""
