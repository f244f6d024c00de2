"""What every package may import: errors, private torch names, containers, streams and initialization. Torch only."""
