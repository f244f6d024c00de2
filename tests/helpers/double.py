"""Models in float64, throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def in_double() -> Iterator[None]:
    """Where models go over to float32 for a while, float64: differences of rounding would hide others. In recomputation too."""

    def doubled(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            def double(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            return function(*map(double, args), **{name: double(value) for name, value in options.items()})

        return call

    with (
        patch.object(Tensor, "to", doubled(Tensor.to)),
        patch.object(Tensor, "type", doubled(Tensor.type)),
        patch.object(Tensor, "float", Tensor.double),
        patch.object(Tensor, "softmax", doubled(Tensor.softmax)),
        patch.object(F, "softmax", doubled(F.softmax)),
    ):
        yield
