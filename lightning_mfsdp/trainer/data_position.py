"""Where in its epoch a run reads its data: a resumed run continues with the first sample that was not read.

Samples are counted over all ranks, so that the position is valid for any number of them: of an epoch's order, rank `r` of `W` takes
every W-th sample from `seen + r` on. The order is that of PyTorch's DistributedSampler, which Lightning sets on loaders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_mfsdp._lightning_api import GradientAccumulationScheduler, PossibleUserWarning, Trainer

__all__ = [
    "DATA_POSITIONS",
    "ResumableSampler",
    "data_positions",
    "go_on_reading",
    "resumable",
    "training_begins",
    "training_loaders",
]

# Key in checkpoints: a list with an entry for each training loader, `None` for loaders whose samples are not counted here.
DATA_POSITIONS = "data_positions"


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can begin inside an epoch.

    Args:
        other: The sampler it replaces: its dataset, ranks, seed, shuffling and padding, and its epoch, which may be set there.
    """

    def __init__(self, other: DistributedSampler[Any]) -> None:
        self._other, epoch = other, other.epoch
        super().__init__(
            other.dataset, other.num_replicas, other.rank, other.shuffle, seed=other.seed, drop_last=other.drop_last
        )
        self.epoch = epoch
        self._next: tuple[int, int] | None = None
        self._passed: tuple[int, int] = (self.epoch, 0)

    @property
    def epoch(self) -> int:
        """Epoch of the next pass, if nothing is resumed."""
        return self._other.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._other.epoch = epoch

    @property
    def size(self) -> int:
        """Number of samples in the dataset, before padding and before it is divided among ranks."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def current(self) -> tuple[int, int]:
        """Epoch of the current pass, or of the next one if it will be resumed, and the samples that it skips."""
        return self._next or self._passed

    def resume(self, epoch: int, seen: int) -> None:
        """Make the next pass that of `epoch`, without its first `seen` samples of all ranks, regardless of `set_epoch` until then."""
        self.epoch = epoch
        self._next = (epoch, seen) if seen else None
        self._passed = (epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        self._passed, self._next = self._next or (self.epoch, 0), None
        epoch, seen = self._passed
        if not seen:
            return super().__iter__()
        order = self._order(epoch)
        rest = order[seen:]
        if self.drop_last:
            rest = rest[: self._rest_of_rank(seen) * self.num_replicas]
        else:  # padded like a DistributedSampler, by samples from the beginning of the epoch
            missing = -len(rest) % self.num_replicas
            rest += (order * -(-missing // len(order)))[:missing]
        return iter(rest[self.rank :: self.num_replicas])

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.size, generator=generator, device="cpu").tolist()

    def _rest_of_rank(self, seen: int) -> int:
        """Samples that each rank reads after the first `seen` of all ranks."""
        rest = max(self.size - seen, 0)
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    def batches_after(self, seen: int, batch_size: int, drop_last: bool) -> int:
        """Batches of `batch_size` that a rank has left of an epoch after `seen` samples of all ranks; a short last one counts or not."""
        rest = self._rest_of_rank(seen)
        return rest // batch_size if drop_last else -(-rest // batch_size)


class _ResumableLoader(DataLoader[Any]):
    """A copy of a loader whose sampler is a ResumableSampler."""

    positioned: ResumableSampler

    def position(self, batches: int, *, is_over: bool, repeats: bool, accumulates: int) -> dict[str, int]:
        """The position as stored in a checkpoint.

        Args:
            batches: Batches of its epoch that the Trainer has read.
            is_over: The next one belongs to another epoch.
            repeats: The Trainer repeats loaders that are shorter than others.
            accumulates: Batches of an optimizer step.
        """
        epoch, before = self.positioned.current
        skipped = len(self) - self._batches_after(before)
        seen, begun = 0, 0
        if is_over:
            epoch += 1
        else:
            first_of_step = batches - batches % accumulates
            seen = before + max(self._of_pass(batches, repeats) - skipped, 0) * self._samples_at_a_time
            begun = max(before + (self._of_pass(first_of_step, repeats) - skipped) * self._samples_at_a_time, 0)
        return {
            "epoch": epoch,
            "seed": self.positioned.seed,
            "seen": seen,
            "size": self.positioned.size,
            "seen_of_step": seen - begun,  # negative for a loader that was repeated within the step
            "samples_at_a_time": self._samples_at_a_time,
            "samples_of_step": accumulates * self._samples_at_a_time,
        }

    def _of_pass(self, batches: int, repeats: bool) -> int:
        """Batches of the current pass over the loader when the Trainer has read `batches` of the epoch."""
        return batches % len(self) if repeats and len(self) else min(batches, len(self))

    def begins_step_again(
        self, position: Mapping[str, int], accumulates: int, *, whole: bool, same_ranks: bool
    ) -> bool:
        """Whether the step in which a position was stored begins again: its gradients are those of other microbatches.

        Args:
            position: As stored.
            accumulates: Batches of an optimizer step now.
            whole: Every step must have as many samples, the first one of an epoch beginning a step.
            same_ranks: As many ranks saved it.

        Raises:
            ValueError: `whole`, and a step does not begin there.
        """
        step = accumulates * self._samples_at_a_time
        if "seen_of_step" not in position:
            if whole and not same_ranks and position["seen"] % step:
                raise ValueError(
                    f"global_batch_size={step}, and the checkpoint was saved inside an epoch, after {position['seen']} of its samples, "
                    "by a version that does not note where a step began. Resume on the number of ranks that saved it, without "
                    "global_batch_size, or from a checkpoint of an epoch's end"
                )
            return False
        if position["samples_at_a_time"] == self._samples_at_a_time and position.get("samples_of_step", step) == step:
            return False
        of_step = position["seen_of_step"]
        begun = position["seen"] - of_step
        if whole and begun % step:
            raise ValueError(
                f"global_batch_size={step}, and the checkpoint was saved inside an epoch, after {begun} of its samples, where no step of "
                f"{step} samples begins. Resume with the global batch size that it was saved with, or from a checkpoint of an epoch's end"
            )
        if of_step:
            rank_zero_info(
                f"the checkpoint was saved inside a step, by ranks that read {position['samples_at_a_time']} samples at a time, and these "
                f"read {self._samples_at_a_time} and make steps of {step}: they begin that step again, with the {of_step} samples that it "
                "had read"
            )
        left = self._batches_after(begun)
        of_first = accumulates - (len(self) - left) % accumulates
        if of_first < min(accumulates, left):  # the last step of an epoch has what is left in any case
            place = "inside a step that began" if of_step else "between two steps,"
            rank_zero_warn(
                f"the checkpoint was saved {place} after {begun} samples of an epoch. Steps of {step} samples do not begin there, so the "
                f"first one has {of_first} of {accumulates} batches, and its loss is divided by {accumulates}. Set "
                "MFSDPStrategy(global_batch_size=...) for the same steps on any number of ranks; for steps of another size resume from a "
                "checkpoint of an epoch's end",
                category=PossibleUserWarning,
            )
        return bool(of_step)

    def go_on(self, position: Mapping[str, int]) -> int:
        """Begin at a stored position; returns the batches of this epoch that lie before it."""
        self.positioned.seed = position["seed"]
        self.positioned.resume(position["epoch"], position["seen"])
        return len(self) - self._batches_after(position["seen"])

    def _batches_after(self, seen: int) -> int:
        drop_last = isinstance(self.batch_sampler, BatchSampler) and self.batch_sampler.drop_last
        return self.positioned.batches_after(seen, self._batch_size, drop_last)

    @property
    def _batch_size(self) -> int:
        return self.batch_sampler.batch_size if isinstance(self.batch_sampler, BatchSampler) else 1

    @property
    def _samples_at_a_time(self) -> int:
        """Of a batch on all ranks."""
        return self._batch_size * self.positioned.num_replicas

    def seem_stateful(self, seem: bool) -> None:
        """When it resumes, Lightning calls two methods and warns if they are missing. This loader's state is stored outside of them."""
        for name in ("state_dict", "load_state_dict"):
            if seem:
                self.__dict__[name] = self.go_on
            else:
                self.__dict__.pop(name, None)


@functools.cache
def _resumable_kind(kind: type[DataLoader[Any]]) -> type[_ResumableLoader]:
    return type(kind.__name__, (_ResumableLoader, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def resumable(loader: object) -> object:
    """A loader that can continue inside an epoch, if its order is that of a DistributedSampler; others unchanged.

    The original loader is not modified.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader, _ResumableLoader) or _is_stateful(loader):
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if type(sampler) is not DistributedSampler or not (batches is None or type(batches) is BatchSampler):
        return loader
    mine = ResumableSampler(sampler)
    kind: Any = _resumable_kind(type(loader))  # type: ignore[arg-type]  # classes are hashable
    copied = kind.__new__(kind)
    copied.__dict__.update(loader.__dict__, _iterator=None, sampler=mine, positioned=mine)
    if isinstance(batches, BatchSampler):
        copied.__dict__["batch_sampler"] = BatchSampler(mine, batches.batch_size, batches.drop_last)
    return copied


def _is_stateful(loader: object) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def training_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders that are set up, none before that."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def data_positions(trainer: Trainer) -> list[dict[str, int] | None]:
    """Where the training loaders are, for a checkpoint; the same on all ranks."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    number, is_over = batches.current.processed, False
    if epochs.ready > epochs.started:  # an epoch is about to begin, and Lightning still counts the previous one
        number = 0
    elif number >= trainer.fit_loop.max_batches or (batches.is_last_batch and number >= batches.current.ready):
        is_over = True
    combined = trainer.fit_loop._combined_loader
    repeats = combined is not None and combined._mode == "max_size_cycle"
    accumulates = trainer.accumulate_grad_batches
    return [
        loader.position(number, is_over=is_over, repeats=repeats, accumulates=accumulates)
        if isinstance(loader, _ResumableLoader)
        else None
        for loader in training_loaders(trainer)
    ]


def go_on_reading(
    trainer: Trainer,
    positions: Sequence[Mapping[str, int] | None],
    states: Sequence[Any],
    *,
    inside: bool,
    whole_steps: bool,
    same_ranks: bool,
    restore_random: Callable[[], None],
    drop_gradients: Callable[[], None],
) -> bool:
    """Before the first batch of a resumed run: restore the positions of the training loaders.

    Args:
        trainer: Its loaders are set up and its loops are restored.
        positions: Of the checkpoint, by loader; empty if it has none.
        states: What Lightning saved of loaders with a state_dict.
        inside: Training continues inside an epoch. Loaders that cannot are named in a warning.
        whole_steps: Every optimizer step must have as many samples, on any number of ranks.
        same_ranks: As many ranks saved the checkpoint.
        restore_random: Restores the random state of the save. A new iterator draws numbers, once in an epoch.
        drop_gradients: Drops those of the checkpoint: the step in which it was saved begins again.

    Returns:
        Whether all loaders are restored to the sample, so that their next random draws are those of the original run.
    """
    loaders = training_loaders(trainer)
    positions = positions if len(positions) == len(loaders) else [None] * len(loaders)
    tracked = [
        (loader, position)
        for loader, position in zip(loaders, positions, strict=True)
        if isinstance(loader, _ResumableLoader) and position is not None
    ]
    if tracked:
        # Of several loaders the longest one says how far the epoch is; shorter ones may have been repeated or be at their end.
        longest, position_of_longest = max(tracked, key=lambda pair: pair[1]["size"])
        accumulates = _accumulates(trainer)
        if longest.begins_step_again(position_of_longest, accumulates, whole=whole_steps, same_ranks=same_ranks):
            positions = [place and {**place, "seen": place["seen"] - place["seen_of_step"]} for place in positions]
            drop_gradients()
    before = [
        _go_on(loader, position, number, len(loaders), inside)
        for number, (loader, position) in enumerate(zip(loaders, positions, strict=True))
    ]
    counted = [batches for batches in before if batches is not None]
    late = bool(trainer.fit_loop._combined_loader_states_to_load)
    if (counted or late) and (combined := trainer.fit_loop._combined_loader) is not None:
        # Iterators were created when the loaders were set up, workers may have read ahead, and Lightning may not have restored others.
        combined._load_state_dicts(list(states))
        trainer.fit_loop._combined_loader_states_to_load = []
        assert trainer.fit_loop._data_fetcher is not None
        restore_random()
        iter(trainer.fit_loop._data_fetcher)
    if counted and inside:
        # On another number of ranks, or with other batches, the same samples are another number of batches.
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        shift = max(counted) - current.processed
        if shift:
            current.ready, current.started = current.ready + shift, current.started + shift
            current.processed, current.completed = current.processed + shift, current.completed + shift
    for loader in loaders:
        if isinstance(loader, _ResumableLoader):
            loader.seem_stateful(True)
    exact = bool(loaders) and len(counted) == len(loaders)
    if exact and inside:
        restore_random()
    return exact


def training_begins(trainer: Trainer) -> None:
    """Lightning has made its calls to loaders that are resumed."""
    for loader in training_loaders(trainer):
        if isinstance(loader, _ResumableLoader):
            loader.seem_stateful(False)


def _accumulates(trainer: Trainer) -> int:
    """Batches of an optimizer step in the epoch that goes on. A scheduler sets the Trainer's number later, when the epoch starts."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    scheduled = [
        callback.get_accumulate_grad_batches(trainer.current_epoch)
        for callback in callbacks
        if isinstance(callback, GradientAccumulationScheduler)
    ]
    return scheduled[-1] if scheduled else trainer.accumulate_grad_batches


def _go_on(loader: Any, position: Mapping[str, int] | None, number: int, of: int, inside: bool) -> int | None:
    """Batches of the epoch that lie before the position of a loader; `None` if it is not tracked here."""
    name = f"the training loader {type(loader).__name__}" + (f" (number {number} of {of})" if of > 1 else "")
    if isinstance(loader, _ResumableLoader) and position is not None:
        size = loader.positioned.size
        if size != position["size"]:
            rank_zero_warn(
                f"{name}: its dataset has {size} samples, and had {position['size']} when the checkpoint was saved. Training goes on "
                f"after the first {position['seen']} samples of an order that is not the one before. Resume with "
                "the same dataset, or from a checkpoint of an epoch's end"
            )
        return loader.go_on(position)
    if inside and not _is_stateful(loader):
        why = (
            "the checkpoint does not say which samples it had read"
            if isinstance(loader, _ResumableLoader)
            else f"its samples are chosen by {_chooser(loader)}, whose position was not saved"
        )
        rank_zero_warn(
            f"training goes on inside an epoch, and {name} reads that epoch from its beginning again: {why}. Resume from a "
            "checkpoint of an epoch's end, or give the loader state_dict() and load_state_dict(); with use_distributed_sampler=True and "
            "PyTorch's own samplers a loader goes on where it was",
            category=PossibleUserWarning,
        )
    return None


def _chooser(loader: Any) -> str:
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return type(batches).__name__
    return type(loader if sampler is None else sampler).__name__
