"""What a model may use beside the core of sharded training."""
