"""Where a checkpoint is stored, how it is written atomically, and how it is opened."""
