"""What is done with checkpoints outside of training: look, check, convert."""
