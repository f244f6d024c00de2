"""Axes of a mesh, collectives of flat tensors over one of them, and that all ranks issue them in the same order."""
