"""One count of FLOPs for every row of record.py, so that rows of others can be compared.

A product of a weight with a token is 2 FLOPs a number, and backward does it twice more: once for the inputs, once for the weight. Causal
attention multiplies half of the pairs of tokens. The input embedding is looked up. What is recomputed is not counted. With that
Llama 3 8B at 8,192 tokens takes 51.47 GFLOP a token, by which NVIDIA's 14,451 tokens/s are the 744 TFLOP/s that it prints
(docs/performance-summary-archive.md of Megatron-Bridge, 25.11).
"""

from __future__ import annotations

__all__ = ["H100_BF16_TFLOPS", "adapted_flops", "trained_flops"]

H100_BF16_TFLOPS = 989.0  # of dense products, without sparsity; an H200 has the same cores


def trained_flops(multiplied: int, layers: int, width: int, seq: int) -> float:
    """FLOPs a token of forward and backward where all weights are trained.

    Args:
        multiplied: Numbers in weights that a token is multiplied with: all but the input embedding.
        layers: With attention.
        width: Of all query heads together.
        seq: Tokens in a row.
    """
    return 6 * multiplied + 3 * _attention(layers, width, seq)


def adapted_flops(multiplied: int, adapters: int, layers: int, width: int, seq: int) -> float:
    """The same where only adapters are trained: of the other weights, no gradients are computed."""
    return 4 * multiplied + 6 * adapters + 3 * _attention(layers, width, seq)


def _attention(layers: int, width: int, seq: int) -> float:
    """Of a token's forward: scores and mixed values, 2 FLOPs a pair each, over half of the row."""
    return 2 * layers * width * seq
