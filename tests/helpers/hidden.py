"""A result that hides its tensor."""

from __future__ import annotations

import torch

__all__ = ["Hidden"]


class Hidden:
    """Nothing can look into it for tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
