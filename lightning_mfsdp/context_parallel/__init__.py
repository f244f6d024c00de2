"""Context parallelism: the ranks of a mesh axis compute one batch together, each a part of every sequence.

    context_attention   attention of whole sequences, for modules of your own; that of transformers' models is found by itself
    context_positions   where this rank's tokens are in whole sequences
    shift_labels        the next token's label at each position, across the border between two ranks
    tokens_in_batch     what a sum of losses is divided by

Without a context axis, all of them do what one does without this package. The strategies divide batches, by `divided_batches.py`.
`attention.py` computes attention over whole sequences, by the collectives of `exchange.py` and the masks of `pattern.py`.
`huggingface.py`, which asks `mask_functions.py` what a model's masks are, and `model_inputs.py` have transformers' models do so.
"""

from lightning_mfsdp.context_parallel.attention import context_attention, context_positions
from lightning_mfsdp.context_parallel.targets import shift_labels, tokens_in_batch

__all__ = ["context_attention", "context_positions", "shift_labels", "tokens_in_batch"]
