"""How much memory a training step takes, found by running it with tensors that have none.

The engine itself runs, on ranks that do not exist: it plans layouts, slots and buckets as in a real run, and its own counters say what
they take. What operations make in addition is counted where it is made and freed.
"""

from lightning_mfsdp.estimate.rehearsal import MemoryEstimate, Rehearsal, rehearse
from lightning_mfsdp.estimate.subject import OPTIMIZERS, Subject, batch_of, huggingface_subject, lightning_subject

__all__ = [
    "OPTIMIZERS",
    "MemoryEstimate",
    "Rehearsal",
    "Subject",
    "batch_of",
    "huggingface_subject",
    "lightning_subject",
    "rehearse",
]
