"""The table of what sizes of low-precision products must be multiples of, which batches, layers and docs/fp8.md use.

Source: `get_align_size_for_quantization` of Transformer Engine 2.20 for tokens; its products for weights, verified in tests/gpu/test_te.py.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIGNMENTS", "Alignment"]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The multiples that one recipe requires.

    Attributes:
        tokens: Rows of an input, batch times sequence.
        weights: Both sizes of a weight: rows of its 8-bit copy and of its transpose begin at multiples of 16 bytes.
        quantized_weights: The same of a weight that is kept in 8 bits: its blocks are whole. 0: such weights are refused.
    """

    tokens: int
    weights: int
    quantized_weights: int


ALIGNMENTS = {
    "delayed": Alignment(tokens=16, weights=16, quantized_weights=16),
    "current": Alignment(tokens=16, weights=16, quantized_weights=16),
    "mxfp8": Alignment(tokens=32, weights=32, quantized_weights=32),
    "block": Alignment(tokens=16, weights=16, quantized_weights=128),
    "nvfp4": Alignment(tokens=128, weights=32, quantized_weights=0),
}
