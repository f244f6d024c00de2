"""WeightCodec: weights that forward reads in a special representation, such as 8-bit numbers with scales.

Such a parameter looks like a tensor of an ordinary dtype and stores its values as raw bytes. The main weight is still an ordinary
float tensor. A codec implements only the step between the two. Which rank holds what, when it is gathered and where it lies is up
to the engine, as for any weight:

    main weight        main dtype,   this rank's rows
      | `quantize`: after the weights changed, once for all parameters of the codec (scales need every rank's rows)
    compute shard      raw bytes,    this rank's shard, or everything where weights are whole
      | all-gathered as bytes
    unsharded weight   raw bytes,    a pooled buffer; the parameter is pointed into it (`bind`), then `after_gather` ... `before_release`

A codec may keep several planes of raw data of one shape: one that forward reads and one that backward reads. Each is gathered
when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Fragment", "WeightCodec", "marks_of", "quantize_all"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """What one rank contributes to one quantized parameter.

    Attributes:
        parameter: The whole parameter; its raw data may be anything at the moment.
        main: This rank's rows of the main weight, flat: `[n]`, main dtype; `n` is 0 where it has none.
        start: Where they begin in the flat parameter.
        outputs: For each plane where their raw data go, `[n]` in the storage dtype.
    """

    parameter: nn.Parameter
    main: Tensor
    start: int
    outputs: tuple[Tensor, ...]


@runtime_checkable
class WeightCodec(Protocol):
    """How parameters of one kind are stored. Stateless towards the engine: parameters whose codecs are equal share a group.

    Every method is called on all ranks alike.
    """

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the raw data: an integer dtype of one byte."""

    @property
    def planes(self) -> int:
        """1, or 2: the first is read by forward, the second by backward. Each has as many elements as the parameter."""

    @property
    def rows_together(self) -> int:
        """How many consecutive rows of a parameter, from its first on, one rank has to quantize together."""

    def encode(self, module: nn.Module, device: torch.device) -> None:
        """Replace the parameters inside `module` that are to be of this kind with new objects, in the same places.

        Called when a unit's parameters have their values, wherever these are, and before any of them is sharded. Parameters of units
        inside are sharded already and are not changed.
        """

    def matches(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is of this kind."""

    def why_not(self, parameter: nn.Parameter) -> str:
        """Why a parameter of this kind cannot be sharded, and what to do about it; empty if it can."""

    def initial_value(self, parameter: nn.Parameter) -> Tensor:
        """The value before it was quantized, any float dtype, the parameter's shape. The parameter no longer stores it."""

    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None:
        """Point the parameter to its raw data: one tensor of its shape for each plane. Nothing is copied."""

    def quantize(self, fragments: Sequence[Fragment], group: dist.ProcessGroup) -> None:
        """Fill the outputs of all fragments and update the scales; anything derived from older raw data becomes invalid.

        Collective over `group`, the ranks that have different rows, with the same parameters in the same order on each. Ranks that
        have the same rows call it in parallel, each over its own group.
        """

    def after_gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called once the raw data are available on the current stream: a unit is about to compute with them."""

    def before_release(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called when a unit has computed and its raw data are about to be freed: drop what need not be kept until the next use."""


def marks_of(parameter: nn.Parameter, codec: WeightCodec | None) -> dict[str, object]:
    """Attributes that users set on a parameter, for their optimizer's groups, without those that belong to its storage."""
    marks = vars(parameter)
    if codec is None:
        return marks
    return {name: value for name, value in marks.items() if not (name.startswith("_") or callable(value))}


def quantize_all(found: Iterable[tuple[WeightCodec, dist.ProcessGroup, Sequence[Fragment]]]) -> None:
    """Quantize what the groups of a root contribute: one call for each codec and process group, in order of first appearance."""
    batches: dict[tuple[WeightCodec, dist.ProcessGroup], list[Fragment]] = {}
    for codec, process_group, fragments in found:
        batches.setdefault((codec, process_group), []).extend(fragments)
    with torch.inference_mode(False), torch.no_grad():
        for (codec, process_group), fragments in batches.items():
            codec.quantize(fragments, process_group)
