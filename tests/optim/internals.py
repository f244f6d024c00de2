"""What tests of optimizers look at inside `lightning_mfsdp.optim`."""

from collections.abc import Callable
from typing import Any

from lightning_mfsdp.optim.adamw import function_for
from lightning_mfsdp.optim.adamw_rule import GRADIENT_FACTOR, MIX_1, MIX_2, STEP_FACTOR, Rule, divided, joined, step_
from lightning_mfsdp.optim.adamw_rule import _random_bits as random_bits
from lightning_mfsdp.optim.adamw_rule import _rounded as rounded
from lightning_mfsdp.optim.moment_codes import decoded, encoded, encoded_at_random

__all__ = [
    "GRADIENT_FACTOR",
    "MIX_1",
    "MIX_2",
    "STEP_FACTOR",
    "Rule",
    "decoded",
    "divided",
    "encoded",
    "encoded_at_random",
    "function_for",
    "joined",
    "kernel",
    "random_bits",
    "rounded",
    "step_",
]


def kernel() -> Callable[..., Any]:
    """That of AdamW; its file imports Triton, which tests without GPUs do not need."""
    from lightning_mfsdp.optim.adamw_kernel import step_in_one_pass_

    return step_in_one_pass_
