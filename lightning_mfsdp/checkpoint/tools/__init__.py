"""Tools for checkpoints outside of training: inspect, verify, convert."""
