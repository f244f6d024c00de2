"""Checks inputs of the public functions, flattens them to tokens, and casts them to the compute dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.ops.linear import Projection
from lightning_mfsdp.ops.tiles import Shaping, wide_dtype

__all__ = [
    "SoftmaxOptions",
    "check_choice",
    "check_fraction",
    "check_not_negative",
    "compute_dtype",
    "flat_hidden",
    "flat_target",
    "refuse_integers",
    "uncompiled",
]

P = ParamSpec("P")
R = TypeVar("R")

# Not float16: what has yet to be divided by the number of tokens may exceed its range.
_SUM_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions:
    """How logits become probabilities, and where the vocabulary is.

    Args:
        temperature: Positive.
        softcap: Positive, or `None`.
        token_chunk: Positive, or `None` for an automatic choice.
        sum_dtype: Dtype of gradients that are summed over tiles; `None`: float32, or float64 for float64.
        ignore_index: Of targets.
        vocab_group: Ranks that have the vocabulary in equal parts, in the order of their ranks; `None`: this rank has it all.

    Raises:
        ValueError: A number out of its range, another dtype than float32, float64 and bfloat16, or a rank outside the group.
    """

    temperature: float = 1.0
    softcap: float | None = None
    token_chunk: int | None = None
    sum_dtype: torch.dtype | None = None
    ignore_index: int = -100
    vocab_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("softcap", self.softcap)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: expected a positive number{' or None' if name == 'softcap' else ''}")
        if self.token_chunk is not None and self.token_chunk < 1:
            raise ValueError(
                f"token_chunk={self.token_chunk}: expected at least one token, or None for an automatic choice"
            )
        if self.sum_dtype not in _SUM_DTYPES:
            raise ValueError(
                f"sum_dtype={self.sum_dtype}: expected torch.bfloat16, torch.float32, torch.float64, or None"
            )
        if self.vocab_group is not None and dist.get_group_rank(self.vocab_group, dist.get_rank()) < 0:
            raise ValueError(
                f"vocab_group: rank {dist.get_rank()} is not part of it; give the group that this rank's part belongs to"
            )

    @property
    def shaping(self) -> Shaping:
        """How logits become `z`: the temperature and the softcap of these options."""
        return Shaping(temperature=self.temperature, softcap=self.softcap)

    @property
    def num_parts(self) -> int:
        """Into how many parts the vocabulary is split."""
        return 1 if self.vocab_group is None else dist.get_world_size(self.vocab_group)

    def first_id(self, num_ids: int) -> int:
        """Token id of the first of this rank's `num_ids`."""
        return 0 if self.vocab_group is None else dist.get_rank(self.vocab_group) * num_ids

    def check_sums(self, dtype: torch.dtype) -> None:
        """Refuse sums that do not fit products in `dtype`; without gradients there are none.

        Raises:
            ValueError: They are neither in the wide dtype nor in bfloat16, as the products.
        """
        wide = wide_dtype(dtype)
        fitting = (None, wide, dtype) if dtype is torch.bfloat16 else (None, wide)
        if self.sum_dtype not in fitting and torch.is_grad_enabled():
            names = ", ".join(str(each) for each in fitting[1:])
            raise ValueError(f"sum_dtype={self.sum_dtype}: for products in {dtype} expected {names}, or None")

    def projection(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Projection:
        """For a weight in any dtype; it computes in that of `hidden`."""
        return Projection(
            hidden=hidden,
            weight=weight.to(hidden.dtype),
            bias=None if bias is None else bias.to(hidden.dtype),
            target=target,
            shaping=self.shaping,
            first_id=self.first_id(weight.shape[0]),
            sum_dtype=self.sum_dtype or wide_dtype(hidden.dtype),
        )


def flat_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None, where: str) -> Tensor:
    """`hidden` as `[T, H]` in the dtype to compute in.

    Raises:
        ValueError: Shapes or dtypes that do not fit, or a weight of which this rank has only some rows.
    """
    _refuse_sharded(weight, where)
    refuse_integers(hidden, where)
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{where}: expected hidden states [..., H] and a weight [V, H], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{where}: expected a bias of shape ({weight.shape[0]},), one for each row of the weight, got {tuple(bias.shape)}"
        )
    dtype = compute_dtype(hidden)
    if dtype is hidden.dtype and weight.dtype is not dtype and not _has_autocast(hidden):
        raise ValueError(
            f"{where}: hidden states are {hidden.dtype} and the weight is {weight.dtype}; cast one of them, or run under torch.autocast"
        )
    return hidden.reshape(-1, hidden.shape[-1]).to(dtype)


def flat_target(target: Tensor, shape: torch.Size, num_ids: int, options: SoftmaxOptions, where: str) -> Tensor:
    """`target` as `[T]`, and each inside the vocabulary as far as that can be checked without waiting for a device.

    Raises:
        ValueError: It has another shape than the tokens, is not made of integers, or some are not token ids (checked on the CPU only).
    """
    if target.shape != shape or target.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{where}: expected a target of token ids, int64 of shape {tuple(shape)}, got {target.dtype} of shape {tuple(target.shape)}"
        )
    flat = target.reshape(-1)
    if flat.device.type == "cpu":
        total = num_ids * options.num_parts
        is_strange = ((flat < 0) | (flat >= total)) & (flat != options.ignore_index)
        if is_strange.any():
            strange = flat[is_strange]
            raise ValueError(
                f"{where}: target has {strange.numel()} entries outside the vocabulary of {total}, first {int(strange[0])}; expected "
                f"0 to {total - 1}, or ignore_index={options.ignore_index}"
            )
    return flat


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's, where that is on; otherwise that of the hidden states."""
    if _has_autocast(hidden) and hidden.is_floating_point() and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Have `torch.compile` call a function without tracing it: it would unroll the loop over tiles."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _has_autocast(hidden: Tensor) -> bool:
    return torch.is_autocast_enabled(hidden.device.type)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not in `choices`.

    Raises:
        ValueError: It is not.
    """
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def refuse_integers(values: Tensor, where: str) -> None:
    """Refuse token ids in place of hidden states or logits.

    Raises:
        ValueError: `values` is not made of floating-point numbers.
    """
    if not values.is_floating_point():
        raise ValueError(f"{where}: expected floating-point numbers as its first argument, got {values.dtype}")


def check_not_negative(name: str, value: float) -> None:
    """Refuse a value that is negative, infinite or not a number.

    Raises:
        ValueError: It is.
    """
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value}: expected a number that is not negative")


def check_fraction(name: str, value: float) -> None:
    """Refuse a value outside [0, 1].

    Raises:
        ValueError: It is not.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: expected a number from 0 to 1")


def _refuse_sharded(weight: Tensor, where: str) -> None:
    """Refuse a sharded parameter outside its unit: its shape has all rows, its memory has not.

    Raises:
        ValueError: `weight` is a DTensor.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and already imported if anything is sharded

    if isinstance(weight, DTensor):
        raise ValueError(
            f"{where}: the weight is sharded, and this rank has only some of its rows. Use it inside the forward of the unit that owns it "
            "(LinearLossHead is such a module), or under lightning_mfsdp.unshard"
        )
