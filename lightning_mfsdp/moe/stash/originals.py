"""Saved tensors while they are still what the forward computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_mfsdp.engine import EngineStateError

__all__ = ["Originals"]


class Originals:
    """Tensors as they are, which nobody may write to meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Detached: the graph that made a tensor must not be kept alive by what it keeps alive.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in self._tensors]

    def tensors(self) -> list[Tensor]:
        """The tensors.

        Raises:
            EngineStateError: One was written to since it was saved.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise EngineStateError(
                    f"paged stash: a tensor of shape {list(tensor.shape)} that backward needs was written to in place after it was saved "
                    f"(version {tensor._version}, expected {version}); clone it before writing"
                )
        return list(self._tensors)
