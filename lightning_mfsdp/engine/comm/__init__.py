"""Axes of a mesh, collectives of flat tensors over one of them, and the check that all ranks issue them in the same order."""
