"""ContextParallel: says which tokens of a step's sequences each rank has, to attention and everything else that has to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["METHODS", "ContextParallel", "Cut", "Method", "activate", "active", "deactivate"]

Method = Literal["ulysses", "gather"]
METHODS = ("ulysses", "gather")


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """How the sequences of one step are divided over the ranks of a context axis.

    Attributes:
        length: Tokens of a whole sequence, with padding at its end: a multiple of the number of chunks.
        is_real: `[batch, length]`, bool: tokens that others may attend to. `None`: all.
        document: `[batch, length]`, int64: tokens attend to those of the same number alone. `None`: a sequence is one document.
        rows: Sequences in the batch.
        given_length: Tokens of a sequence as the batch had it, before padding was added. `None`: all.
        has_mask: The batch had an attention mask.
    """

    length: int
    is_real: Tensor | None = None
    document: Tensor | None = None
    rows: int = 1
    given_length: int | None = None
    has_mask: bool = False


@dataclass(kw_only=True, eq=False)
class StepNotes:
    """What was seen in a step of divided sequences.

    Attributes:
        attends: Attention saw whole sequences.
        is_counted: The targets of all ranks were counted for the loss.
        targets: What `shift_labels` returned last.
        means: How many targets each mean of losses was over, `[1]`, where the step was watched.
        sums: Losses of tokens were not averaged, where the step was watched.
    """

    attends: bool = False
    is_counted: bool = False
    targets: Tensor | None = None
    means: list[Tensor] = field(default_factory=list)
    sums: bool = False


class ContextParallel:
    """The ranks that divide sequences among themselves, and how.

    Attributes:
        group: Their process group.
        size: How many they are.
        rank: This one's place among them.
        method: "ulysses": attention of some heads over whole sequences, after an all-to-all. "gather": attention of this rank's queries
            to gathered keys and values.
        cut: Of the step that runs or ran last; `None` where its batch was not divided. It stays until the next step begins, because
            activation checkpointing calls attention again in backward.
        notes: What was seen in that step.
        is_attending: Attention of whole sequences is running.
        is_watched: The step is one of those that are looked at closely.
        attention_layers: Layers of transformers' models that have computed attention of whole sequences.
    """

    def __init__(self, group: dist.ProcessGroup, method: Method) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.method = method
        self.cut: Cut | None = None
        self.notes = StepNotes()
        self.is_attending = False
        self.is_watched = False
        self.attention_layers: WeakSet[nn.Module] = WeakSet()

    def chunks(self) -> tuple[int, ...]:
        """Which chunks of a sequence this rank has, in the order in which they lie in its tensors.

        "ulysses": sequences consist of `size` chunks, one a rank. "gather": of twice as many, of which a rank has one from the
        beginning and one from the end, so that causal attention costs every rank the same.
        """
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Which chunks of a sequence another rank has, as `chunks`."""
        return (rank,) if self.method == "ulysses" else (rank, 2 * self.size - 1 - rank)

    def all_chunks(self) -> list[int]:
        """The chunks of all ranks, in the order of ranks."""
        return [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Context around attention of whole sequences, in which a watched step does not refuse attention functions."""
        self.notes.attends = True
        before, self.is_attending = self.is_attending, True
        try:
            yield
        finally:
            self.is_attending = before

    @property
    def chunk_count(self) -> int:
        """Chunks of a whole sequence, which its length is a multiple of."""
        return self.size if self.method == "ulysses" else 2 * self.size

    def part_of(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along its sequence dim, contiguous."""
        pieces = whole.chunk(self.chunk_count, dim)
        own_pieces = [pieces[index] for index in self.chunks()]
        return own_pieces[0].contiguous() if len(own_pieces) == 1 else torch.cat(own_pieces, dim)


_active: ContextParallel | None = None


def active() -> ContextParallel | None:
    """What attention in this process divides by; `None` outside of a run with a context axis."""
    return _active


def activate(parallel: ContextParallel) -> None:
    """Have attention in this process divide by these ranks: a run with a context axis begins, or goes on."""
    global _active
    _active = parallel


def deactivate() -> None:
    """Have attention in this process see whole sequences again: the run with a context axis ends."""
    global _active
    _active = None
