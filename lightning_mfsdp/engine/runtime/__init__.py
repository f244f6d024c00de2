"""What happens when: units, their root, and the views and calls that look at a sharded model."""
