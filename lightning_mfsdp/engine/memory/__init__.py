"""Flat buffers, and where their memory comes from."""
