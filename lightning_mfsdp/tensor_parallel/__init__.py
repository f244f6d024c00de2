"""Tensor parallelism: the ranks of a mesh axis compute each layer together, each with a part of its weights, as plain local tensors.

    apply_plan              names of modules to styles, from a transformers model or of your own: what is divided, and how layers compute
    materialize_divided     values of parameters on the meta device, equal to those of one process
    part_of, is_summed      what is known of a parameter: which part of a whole one it is, and whether its gradient is added up over ranks
    divided_cross_entropy   a loss of logits that are divided over the vocabulary
    share_random_state      equal random numbers on the ranks of the axis
    share_values            equal whole parameters there, before they are divided

`styles.py` has the table of styles, `layers.py` the hooks that they install, `exchange.py` the collectives. `checks.py` finds what cannot
be computed with parts. `logits.py` is for the heads and losses of transformers' models.
"""

from lightning_mfsdp.base.part import Part, is_summed, part_of
from lightning_mfsdp.tensor_parallel.division import divide, materialize_divided
from lightning_mfsdp.tensor_parallel.equality import share_random_state, share_values
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup
from lightning_mfsdp.tensor_parallel.logits import divided_cross_entropy
from lightning_mfsdp.tensor_parallel.plan import AppliedPlan, apply_plan
from lightning_mfsdp.tensor_parallel.styles import STYLES

__all__ = [
    "STYLES",
    "AppliedPlan",
    "Part",
    "TensorGroup",
    "apply_plan",
    "divide",
    "divided_cross_entropy",
    "is_summed",
    "materialize_divided",
    "part_of",
    "share_random_state",
    "share_values",
]
