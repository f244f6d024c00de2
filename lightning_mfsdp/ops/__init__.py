"""Functions on plain tensors: log-probabilities and losses over large vocabularies, and batches whose sizes suit low precision.

They are independent of sharding. `LinearLossHead` wraps them in a module that `fully_shard` can turn into a unit.
"""

from lightning_mfsdp.ops.collator import AlignedCollator, alignment_of
from lightning_mfsdp.ops.cross_entropy import linear_cross_entropy
from lightning_mfsdp.ops.head import LinearLossHead
from lightning_mfsdp.ops.logprobs import chunked_logprobs, linear_logprobs
from lightning_mfsdp.ops.padding import remove_left_padding, restore_left_padding

__all__ = [
    "AlignedCollator",
    "LinearLossHead",
    "alignment_of",
    "chunked_logprobs",
    "linear_cross_entropy",
    "linear_logprobs",
    "remove_left_padding",
    "restore_left_padding",
]
