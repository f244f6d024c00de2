"""Context parallelism: the ranks of a mesh axis compute one batch together, each a part of every sequence.

`sharing.py` says which part, and who the ranks are. It depends on torch alone; the strategies decide when a batch is divided.
`attention.py` computes attention over whole sequences, by the collectives of `exchange.py` and the masks of `pattern.py`.
`huggingface.py` has transformers' models do so.
"""

from __future__ import annotations

from lightning_mfsdp.context_parallel.attention import context_attention, context_positions

__all__ = ["context_attention", "context_positions"]
