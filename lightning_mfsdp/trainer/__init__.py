"""The Trainer's calls become engine calls."""
