"""GroupSpec: which parameters go together into one group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_mfsdp.engine.core.codec import WeightCodec

__all__ = ["GroupSpec"]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What all parameters of a group have in common.

    Attributes:
        compute_dtype: Of the unsharded weight, as autograd sees it.
        main_dtype: Of the main weight, and of the gradient that the optimizer sees unless it requires another (decoupled.py).
        trainable: Whether parameters required gradients when the module was sharded.
        whole: 0-D parameters have no rows to distribute, so every rank keeps them.
        codec: How the unsharded weight is stored, where that is not simply the compute dtype.
    """

    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    trainable: bool
    whole: bool
    codec: WeightCodec | None = None

    @cached_property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the memory of unsharded weights and compute shards."""
        return self.compute_dtype if self.codec is None else self.codec.storage_dtype

    @cached_property
    def planes(self) -> range:
        """Numbers of the planes that the unsharded weight consists of."""
        return range(1 if self.codec is None else self.codec.planes)

    @property
    def rows_together(self) -> int:
        """Rows of a parameter that belong into one shard."""
        return 1 if self.codec is None else self.codec.rows_together

    def plane(self, *, for_backward: bool) -> int:
        """Which of the planes a backward, or a forward, reads."""
        return self.planes[-1] if for_backward else 0
