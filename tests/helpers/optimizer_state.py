"""What an optimizer keeps of this rank's rows, whatever it shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.engine.internals import as_local


def state_of_rows(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """By local rows, with plain tensors over the optimizer's memory."""
    return {
        as_local(key): {name: local(value) for name, value in values.items()} for key, values in optimizer.state.items()
    }


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
