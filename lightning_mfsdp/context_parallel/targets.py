"""Makes a loss of parts of sequences that of whole ones: labels across borders between ranks, and the number of targets on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_mfsdp.base import compat
from lightning_mfsdp.context_parallel.sharing import ContextParallel, active

__all__ = ["IGNORED", "note_counted", "shift_labels", "tokens_in_batch", "without_padding"]

IGNORED = -100


def shift_labels(labels: Tensor) -> Tensor:
    """The label of the next token at each position, also across the border to another rank's part of the sequence.

    Where sequences are divided it is collective over the ranks that divide them; elsewhere it is a plain shift.

    Args:
        labels: `[batch, length]`, of this rank's tokens: those of the batch that `training_step` was given.

    Returns:
        `[batch, length]`, with -100 at the last token of a whole sequence. For `tokens_in_batch` and a loss that ignores -100.
    """
    parallel = active()
    if parallel is None or parallel.cut is None:
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    chunks = parallel.chunks()
    pieces = torch.stack(labels.chunk(len(chunks), 1))  # [own chunks, batch, length of a chunk]
    first = pieces[:, :, 0].contiguous()
    firsts = first.new_empty(parallel.size * len(chunks), labels.size(0))
    compat.all_gather_flat(firsts.view(-1), first.view(-1), parallel.group)
    beginnings = {chunk: firsts[place] for place, chunk in enumerate(parallel.all_chunks())}
    ends = torch.full_like(first[0], IGNORED)
    following = torch.stack([beginnings.get(chunk + 1, ends) for chunk in chunks])
    shifted = torch.cat(tuple(torch.cat([pieces[:, :, 1:], following.unsqueeze(2)], 2)), 1)
    targets = without_padding(shifted, parallel, ahead=1)
    parallel.notes.targets = targets
    return targets


def without_padding(targets: Tensor, parallel: ContextParallel, *, ahead: int) -> Tensor:
    """-100 for targets at tokens that were added to a batch, whatever labels were made of; `ahead`: of how many tokens later they are."""
    cut = parallel.cut
    if cut is None or cut.given_length is None:
        return targets
    places = torch.arange(cut.length, device=targets.device).unsqueeze(0)
    is_given = parallel.part_of(places + ahead < cut.given_length, 1)
    return targets.masked_fill(~is_given, IGNORED)


def tokens_in_batch(targets: Tensor) -> Tensor:
    """What a rank divides the sum of its tokens' losses by, so that the mean over ranks is the mean over all tokens of all ranks.

    It is the number of targets on all ranks, divided by the number of ranks: gradients and `self.log(..., sync_dist=True)` are means over
    ranks. Collective over all ranks; where no gradients are recorded, as in evaluations, over those that divide a batch.

    Args:
        targets: Any shape; -100 does not count. Already shifted, where the loss shifts (`shift_labels`).

    Returns:
        A number, float32, on the device of `targets`; at least 1 / the number of ranks.
    """
    counted = (targets != IGNORED).sum()
    ranks = 1
    if dist.is_initialized():
        parallel = active()
        # Evaluations may have other numbers of batches on other ranks, so only those that divide a batch count it together.
        evaluates = not torch.is_grad_enabled()
        group = (None if parallel is None else parallel.group) if evaluates else dist.group.WORLD
        if group is not None:
            ranks = dist.get_world_size(group)
            dist.all_reduce(counted, group=group)
    note_counted()
    return counted.clamp(min=1).to(torch.float32) / ranks


def note_counted() -> None:
    """The loss of this step is divided by a count of all ranks' targets."""
    parallel = active()
    if parallel is not None:
        parallel.notes.is_counted = True
