"""What every package may import: errors, private torch names, containers, streams, parts of parameters and initialization. Torch only."""
