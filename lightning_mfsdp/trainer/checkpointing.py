"""CheckpointingStrategy: Lightning's methods that save and load checkpoints, which are directories with rows of every rank, or files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import (
    LIGHTNING_VERSION,
    Callback,
    LightningOptimizer,
    ModelCheckpoint,
    PossibleUserWarning,
    SIGTERMException,
    TorchCheckpointIO,
    TrainerFn,
)
from lightning_mfsdp.base.progress import Progress, progress_bar
from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.checkpoint.background import BackgroundSaver, Staging
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_all_ranks, same_on_all
from lightning_mfsdp.checkpoint.state.full_state import full_model_state, full_optimizer_state, with_whole_tensors
from lightning_mfsdp.checkpoint.state.index import ParameterIndex
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES, ParameterState, dcp_shards, full_tensors
from lightning_mfsdp.checkpoint.state.rank_states import (
    RANK_INDEX,
    RANK_STATES,
    RankStates,
    rank_states_in,
    shared_rank_states,
)
from lightning_mfsdp.engine import collectives_begun
from lightning_mfsdp.launch import slurm
from lightning_mfsdp.launch.processes import ProcessStrategy, with_others
from lightning_mfsdp.trainer.callback_hooks import HasParameterState, prepare_optimizers
from lightning_mfsdp.trainer.continuation import (
    GRADIENTS,
    PendingGradients,
    is_inside_a_step,
    mean_gradients,
    rank_state,
    restore_random_state,
    set_whole_gradients,
    take_loader_states,
)
from lightning_mfsdp.trainer.data_position import (
    DATA_POSITIONS,
    data_positions,
    go_on_reading,
    resumable,
    training_begins,
    training_loaders,
)
from lightning_mfsdp.trainer.global_batch import check_equal_microbatches, check_global_batch, microbatches
from lightning_mfsdp.trainer.hyperparameters import compare_hyperparameters
from lightning_mfsdp.trainer.latest import RUN, new_run
from lightning_mfsdp.trainer.stopped import Last, next_hpc_path

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["CheckpointingStrategy"]

_log = logging.getLogger(__name__)

_STATES = ("state_dict", "optimizer_states", PARAMETER_STATES)  # of which ranks have shares, or rank 0 the whole
_MODEL = "model"  # name of a Trainer's only model, where functions take models by name


class _NothingYet(dict[str, Any]):
    """A checkpoint that Lightning skips, as it does with an empty one. It has a version, which Lightning reads all the same."""

    def __bool__(self) -> bool:
        return False


class CheckpointingStrategy(ProcessStrategy):
    """A strategy whose model is sharded and whose ranks write and read checkpoints together.

    Attributes:
        state_dict_type: "sharded": every rank writes its rows; "full": rank 0 writes whole tensors.
        async_save: Saves are copied to the host, then written in the background.
        global_batch_size: Samples of an optimizer step on all ranks; `None`: as many as the Trainer accumulates.
        shared_folder_timeout: How long a node may take to see what another one has put into a folder.
    """

    def __init__(
        self,
        *,
        state_dict_type: Literal["sharded", "full"],
        async_save: bool,
        global_batch_size: int | None,
        shared_folder_timeout: timedelta,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.state_dict_type = state_dict_type
        self.async_save = async_save
        self.global_batch_size = global_batch_size
        self.shared_folder_timeout = shared_folder_timeout
        self._run = new_run()  # ranks differ until one loads; rank 0 writes its own
        self._saver = BackgroundSaver()
        self._staging = Staging()
        self._at_first_step: list[Callable[[], None]] = []
        self._go_on_reading: Callable[[], None] | None = None
        self._accumulates = 1  # what the Trainer was told here, or is by default
        self._weights_only: bool | None = None
        self._can_read = False
        self._loading: lightning_io.Loading | None = None

    def connect(self, model: LightningModule) -> None:
        """An entry point of the Trainer begins; the model is not sharded for it yet."""
        super().connect(model)
        self._weights_only, self._can_read, self._loading = None, False, None

    def can_read_checkpoints(self) -> None:
        """The model is sharded and its optimizers exist: from now on `load_checkpoint` reads."""
        self._can_read = True

    def look_for_checkpoint(self) -> None:
        """Before the model is sharded: all ranks were given the same checkpoint, which rank 0 sees, or none. Collective.

        Where paths differ, some ranks would wait for the others forever; and a large model takes minutes to shard.

        Raises:
            ValueError: They differ, or there is no checkpoint.
        """
        path = self._module.trainer.ckpt_path  # Lightning has set it, also to `None`
        ranks = Ranks()
        same_on_all("ckpt_path", None if path is None else os.fspath(path), ranks)
        if path is None:
            return
        location = locate(path)
        location.finish_interrupted_save(ranks)

        def problem() -> str:
            return "" if location.is_sharded() or location.is_file() else str(location.no_checkpoint_error())

        if found := ranks.first(f"looking for {location}", problem):
            raise ValueError(
                f"ckpt_path: rank 0 sees no checkpoint: {found}. Pass the path of one that all ranks see, or leave ckpt_path out"
            )

    def look_for_checkpoint_folders(self) -> None:
        """Before the first step: every rank sees the folders in which it will save its rows. Collective.

        Raises:
            NotSharedError: One does not.
        """
        trainer = self._module.trainer
        if self.state_dict_type == "full" or self.world_size == 1 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        folders = [str(saver.dirpath) for saver in savers if saver.dirpath and (saver.save_top_k or saver.save_last)]
        for folder in dict.fromkeys(folders):
            locate(folder).check_shared(Ranks(sees_within=self.shared_folder_timeout))

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Removes checkpoints; writing and reading do not go through it."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if type(io) is not TorchCheckpointIO:
            raise TypeError(
                f"MFSDPStrategy does not use a CheckpointIO, so {type(io).__name__} would be ignored: every rank writes its own part of a "
                "checkpoint through torch.distributed.checkpoint. Remove the plugin; MFSDPStrategy(async_save=True) saves in the background"
            )
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read directly into shards. Before there are any, too, the Trainer is queried for the checkpoint.

        Lightning 2.6 passes the user's `weights_only` to strategies that restore before their setup, and drops it for those that restore
        after it. So both happen: the first call stores the argument, and the second reads.
        """
        return self._can_read

    @property
    def parameter_states(self) -> dict[str, ParameterState]:
        """What is kept for parameters besides weights and optimizers, by its name in checkpoints. Callbacks save theirs themselves."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        states: dict[str, ParameterState] = {GRADIENTS: PendingGradients(self._module, self._at_first_step)}
        for callback in callbacks:
            if isinstance(callback, HasParameterState):
                states[callback.checkpoint_key] = callback.parameter_state
        return states

    def parameter_state(self, state: ParameterState) -> dict[str, Tensor]:
        """What a callback puts into `checkpoint["parameter_states"]` under its key: rows, or whole tensors on rank 0. Collective."""
        if self._is_alone:
            return {}
        if self.state_dict_type == "full":
            return full_tensors(ParameterIndex(self._module), state.rows(), keep=self.is_global_zero)
        return dcp_shards(ParameterIndex(self._module), state.rows())

    @with_others
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What hooks of the module see before it is saved: sharded tensors, or whole ones on rank 0 and nothing elsewhere."""
        if self._is_alone:
            return {}
        state = super().lightning_module_state_dict()
        return full_model_state(state, keep=self.is_global_zero) if self.state_dict_type == "full" else state

    @with_others
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, of the rows this rank owns; or whole, as without sharding, on rank 0."""
        if self._is_alone:
            return {}
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.state_dict_type == "full":
            return full_optimizer_state(plain, keep=self.is_global_zero)
        return lightning_io.optimizer_state(ParameterIndex(self._module), plain)

    @with_others
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory, every rank its rows and rank 0 the rest; or one file, from rank 0.

        With `async_save`, training goes on once everything is copied to the host. It first waits for a save that is still being written.

        Raises:
            TypeError: `storage_options` were given: they belong to a CheckpointIO.
            RuntimeError: On all ranks: this save, or the one before it in the background, failed.
        """
        if storage_options is not None:
            raise TypeError(
                "MFSDPStrategy.save_checkpoint: storage_options belong to a CheckpointIO, which this strategy does not use; leave them out"
            )
        if self._is_alone:
            _log.warning(
                f"rank {self.global_rank} saves no {os.fspath(filepath)}: it failed, and not all ranks did in the same place, so that they "
                "cannot save together. Go on from the newest complete checkpoint"
            )
            return
        self._saver.wait()
        checkpoint = self._as_saved(checkpoint)
        location = locate(self.broadcast(os.fspath(filepath)))
        # Also used in the background: what two threads exchange must not interleave, and one save is waited for before the next.
        ranks = Ranks.patient(self.shared_folder_timeout)
        scaling = self.precision_plugin.fp8_scaling({_MODEL: self._module})  # type: ignore[attr-defined]
        of_module = {key: checkpoint[key] for key in _STATES if key in checkpoint}
        others = {key: value for key, value in checkpoint.items() if key not in _STATES}
        checkpoint = {**of_module, **with_whole_tensors(others, ranks), **scaling}
        if "loops" in checkpoint:
            checkpoint = self._with_continuation(checkpoint, ranks)
        content: lightning_io.ShardedContent | lightning_io.FullContent
        if self.state_dict_type == "full":
            content = lightning_io.FullContent(checkpoint=checkpoint)
        else:
            content = lightning_io.ShardedContent.of(ParameterIndex(self._module), checkpoint, ranks)
        if not self._saves_in_background:
            with self._progress(f"Saving {location}") as progress:
                lightning_io.save(location, content, ranks=ranks, progress=progress)
            return
        with on_all_ranks(f"copying {location} to host memory"):
            staged = content.staged(self._staging)
        # Only the copies are used from here on: training changes weights while they are written.
        self._saver.start(lambda: lightning_io.save(location, staged, ranks=ranks))

    def _as_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What is saved of Lightning's part of a checkpoint."""
        return checkpoint

    @property
    def _saves_in_background(self) -> bool:
        """Whether this save is written in the background: not if nothing would wait for its end, nor if Lightning links to it at once."""
        trainer = self._module.trainer
        links = any(isinstance(call, ModelCheckpoint) and call.save_last == "link" for call in trainer.callbacks)  # type: ignore[attr-defined]
        return self.async_save and not trainer.state.stopped and not links

    def _with_continuation(self, checkpoint: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        """What a run that is resumed needs to continue exactly as this one does."""
        states = dict(checkpoint.get(PARAMETER_STATES, {}))
        if is_inside_a_step(self._module.trainer):
            states[GRADIENTS] = self.parameter_state(PendingGradients(self._module, self._at_first_step))
        own_state = rank_state(checkpoint, self._module, self.root_device, **self._data_place)
        added: dict[str, Any] = {}
        if self.state_dict_type == "full":
            added[RANK_STATES] = ranks.to_first(own_state)
        else:
            states[RANK_STATES], added[RANK_INDEX] = shared_rank_states(own_state, ranks)
        if states:
            added[PARAMETER_STATES] = states
        return {
            **checkpoint,
            **added,
            DATA_POSITIONS: data_positions(self._module.trainer),
            RUN: self._run,
        }

    def check_accumulation(self) -> None:
        """With `global_batch_size` nothing else says how many batches the Trainer accumulates.

        Raises:
            ValueError: Something does.
        """
        if self.global_batch_size is None:
            return
        trainer = self._module.trainer
        given = 1 if trainer.accumulate_grad_batches == self._accumulates else trainer.accumulate_grad_batches
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        check_global_batch(self.global_batch_size, given, callbacks, automatic=self._module.automatic_optimization)

    def process_dataloader(self, dataloader: object) -> object:
        """A training loader in the order of a DistributedSampler can be resumed inside an epoch; others are not changed.

        Raises:
            ValueError: A multiple of its batches is not `global_batch_size`.
        """
        trainer = self._module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        if self.global_batch_size is not None:
            number = microbatches(self.global_batch_size, self._data_place["data_size"], dataloader)
            trainer.accumulate_grad_batches = self._accumulates = number
        return resumable(dataloader)

    def on_train_start(self) -> None:
        """Loaders of a resumed run continue where they were.

        Raises:
            ValueError: Training loaders need different numbers of batches for `global_batch_size`.
        """
        super().on_train_start()
        if self.global_batch_size is not None:
            size, data_ranks = self.global_batch_size, self._data_place["data_size"]
            loaders = training_loaders(self._module.trainer)
            check_equal_microbatches(size, [microbatches(size, data_ranks, loader) for loader in loaders])
        if self._go_on_reading is not None:
            go_on_reading, self._go_on_reading = self._go_on_reading, None
            go_on_reading()

    def _restore_rank_state(self, rest: dict[str, Any]) -> None:
        """Random numbers now, for what shuffles data, and once more if training continues inside an epoch: its loaders draw some again."""
        states, positions = rest.pop(RANK_STATES, None), rest.pop(DATA_POSITIONS, [])
        run = rest.pop(RUN, self._run)
        self._go_on_reading = None
        if self._module.trainer.state.fn != TrainerFn.FITTING or "loops" not in rest:
            return
        self._run = run
        self._restore_random_states(rest, states)
        loop = rest["loops"]["fit_loop"]
        progress = loop["epoch_loop.batch_progress"]
        inside = bool(progress["current"]["ready"] and not progress["is_last_batch"])
        if any(positions):
            inside = any(position and position["seen"] for position in positions)
        epochs = loop["epoch_progress"]["current"]
        # Stopped before the first batch of an epoch, whose loaders have drawn their random numbers.
        at_its_start = epochs["processed"] < epochs["started"] == epochs["ready"] and not progress["current"]["ready"]
        own_state = self._state_of_place(states) if states else None
        if inside and epochs["ready"] == epochs["completed"]:
            rank_zero_warn(
                "the checkpoint was saved after a fit that had ended within an epoch (max_steps, max_time), which Lightning counts as "
                f"complete: the rest of epoch {epochs['ready'] - 1} is trained as epoch {epochs['ready']}, so max_epochs is reached "
                "earlier, and shuffling, schedulers and hooks are not those of a run that was never interrupted. Save while the fit runs "
                "where that matters, with ModelCheckpoint(every_n_train_steps=...)",
                category=PossibleUserWarning,
            )

        def restore_random() -> None:
            if own_state is not None:
                restore_random_state(own_state["random"], self.root_device)

        def go_on() -> None:
            trainer: Trainer = self._module.trainer
            states = loop["state_dict"].get("combined_loader", [])
            step = self.global_batch_size
            exact = go_on_reading(
                trainer,
                positions,
                states,
                inside=inside,
                whole_steps=step is not None,
                same_ranks=own_state is not None,
                restore_random=restore_random,
                drop_gradients=lambda: self._at_first_step.append(self._module.zero_grad),
            )
            self._at_first_step.append(lambda: training_begins(trainer))
            if step is not None and inside and own_state is None and not exact:
                rank_zero_warn(
                    f"global_batch_size={step}: training goes on inside an epoch on another number of ranks, and not all training loaders "
                    "know their samples, so the first step may have fewer. Resume from a checkpoint of an epoch's end, or use PyTorch's "
                    "samplers"
                )
            if at_its_start and exact:
                restore_random()
            elif (at_its_start or inside) and not exact:
                self._at_first_step.append(restore_random)

        self._go_on_reading = go_on

    def _restore_random_states(self, rest: dict[str, Any], states: Sequence[Any] | None) -> None:
        if not states:
            return
        same_ranks = len(states) == self.world_size
        of_gradients = [states[self.global_rank]] if same_ranks and self._rank_of_place(states) is not None else states
        if isinstance(states, RankStates):
            if not states.has_gradients:
                of_gradients = []
            elif of_gradients is states:  # now: when the first step begins, the checkpoint may be replaced
                mean = Ranks().first(
                    "reading gradients of parameters that are not sharded", lambda: mean_gradients(states)
                )
                of_gradients = [{"gradients": mean}]
        self._at_first_step.append(lambda: set_whole_gradients(self._module, of_gradients))
        own_state = self._state_of_place(states)
        if own_state is None:
            saved = _data_size(states)
            rank_zero_info(
                f"the checkpoint was saved by {saved} data ranks, and there are {self._data_place['data_size']}: training continues at "
                f"the same position in the data, and random numbers such as dropout differ from those that {saved} ranks would draw"
            )
            return
        take_loader_states(rest, own_state)
        restore_random_state(own_state["random"], self.root_device)

    @property
    def _data_place(self) -> dict[str, int]:
        """The number of ranks with different batches, and this rank's number among them."""
        place = self.distributed_sampler_kwargs
        return {"data_size": place["num_replicas"], "data_rank": place["rank"]}

    def _state_of_place(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The state of this rank, or of one that read the same data; `None` if the data were divided among another number of ranks."""
        place = self._rank_of_place(states)
        return None if place is None else states[place]

    def _rank_of_place(self, states: Sequence[Mapping[str, Any]]) -> int | None:
        size, rank = self._data_place.values()
        if _data_size(states) != size:
            return None
        if len(states) == self.world_size:
            return self.global_rank
        if isinstance(states, RankStates):
            return states.rank_of(rank)
        return next(number for number, state in enumerate(states) if state.get("data_rank", number) == rank)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; not before the save that replaces it has succeeded."""
        if self._is_alone:  # nothing replaced it
            return
        remove = super().remove_checkpoint
        self._saver.after(f"removing {filepath}", lambda: remove(filepath))

    @with_others
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint for the hooks that may change it. Weights and optimizer states in it are not read yet.

        Raises:
            ValueError: There is nothing readable at the path.
            RuntimeError: The checkpoint is damaged.
            RefusedError: It holds a class that was not allowed, and `weights_only` is not False.
        """
        if not self._can_read:
            self._weights_only = weights_only
            return _NothingYet({"pytorch-lightning_version": LIGHTNING_VERSION})
        weights_only = self._weights_only if weights_only is None else weights_only
        self._saver.wait()
        self._at_first_step.clear()
        same_on_all("the path of load_checkpoint", os.fspath(checkpoint_path), Ranks())
        location = locate(checkpoint_path)
        self._loading, checkpoint = lightning_io.Loading.open(location, self._module, weights_only=weights_only)
        states = rank_states_in(checkpoint, weights_only)
        if states:
            checkpoint[RANK_STATES] = states
            place = self._rank_of_place(states)
            if isinstance(states, RankStates) and place is not None:
                with on_all_ranks(f"opening {location}"):  # before anything changes
                    states.read(place, Ranks())
        if self._loading.directory is not None:
            compare_hyperparameters(location, checkpoint, self._module)
        return checkpoint

    @with_others
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights, after `on_load_checkpoint` of the LightningModule and before that of callbacks.

        Raises:
            RuntimeError: Weights, or optimizer states, do not fit; then nothing was read, as far as that can be seen before.
        """
        loading, content = self._opened, cast("dict[str, Any]", checkpoint)
        compared: Sequence[Optimizer] = ()
        if self._is_fitting:
            # Lightning requires the keys. Without states optimizers start afresh.
            content.setdefault("optimizer_states", [])
            content.setdefault("lr_schedulers", [])
            prepare_optimizers(self._module.trainer, content.get("callbacks", {}))
            callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
            hooks = [getattr(callback.on_load_checkpoint, "__func__", None) for callback in callbacks]
            if all(hook is Callback.on_load_checkpoint for hook in hooks):  # else these may still change states
                compared = self.optimizers
        with self._progress(f"Loading {loading.location}") as progress:
            loading.load_model(
                content,
                ParameterIndex(self._module),
                strict=strict,
                progress=progress,
                parameter_states=self.parameter_states,
                optimizers=compared,
            )
        self.model_to_device()  # on_load_checkpoint may have replaced buffers by tensors on the CPU
        self.precision_plugin.take_fp8_scaling({_MODEL: self._module}, content)  # type: ignore[attr-defined]
        self._restore_rank_state(content)

    @with_others
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states, after `on_load_checkpoint` of callbacks.

        Raises:
            RuntimeError: They do not fit.
        """
        loading = self._opened
        with self._progress(f"Loading optimizers of {loading.location}") as progress:
            loading.load_optimizers(dict(checkpoint), ParameterIndex(self._module), self.optimizers, progress=progress)

    @property
    def _opened(self) -> lightning_io.Loading:
        if self._loading is None:
            raise RuntimeError("no checkpoint was opened; call load_checkpoint(path) first, and pass what it returns")
        return self._loading

    @property
    def _is_fitting(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    def go_on_exactly(self) -> None:
        """Before the first training step after a checkpoint was read: restore what Lightning's own preparations would have undone."""
        for action in self._at_first_step:
            action()
        self._at_first_step.clear()

    @with_others
    def finish_saving(self) -> None:
        """Wait for a save in the background, and free its memory.

        Raises:
            RuntimeError: It failed.
        """
        self._staging = Staging()
        self._saver.close()

    def _finish_saving_alone(self) -> None:
        """As `finish_saving`, while an exception is propagating that must not be replaced."""
        try:
            self.finish_saving()
        except RuntimeError as error:
            _log.warning(
                f"rank {self.global_rank} failed while a checkpoint was written in the background, which is lost: {error}. Go on from "
                "the one before "
                "it; the error that ended the run is another"
            )

    def on_exception(self, exception: BaseException) -> None:
        """After a signal, save where the next start looks, and requeue a SLURM job if that was asked for."""
        trainer = self._trainer  # `None` in the process that forked those that failed
        if trainer is None:
            super().on_exception(exception)
            return
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if (
            isinstance(exception, SIGTERMException)
            and fitting
            and not self._is_alone
            and not self._leave_to_next_start()
        ):
            exception.code = 1
        super().on_exception(exception)

    def on_train_end(self) -> None:
        """The signal that asks for a requeue may have come in the last batch; SLURM ends what the program would do after the fit."""
        super().on_train_end()
        stopping = self._stopping
        if stopping is None or stopping.requeue_signal is None:
            return
        if self.reduce_boolean_decision(stopping.requeues, all=False):
            self._leave_to_next_start()

    def _leave_to_next_start(self) -> bool:
        """Save what the next start finds; collective. `False`: the job was to be requeued, and this rank could not do it."""
        trainer, stopping = self._trainer, self._stopping
        last = Last.of(trainer)
        saved, succeeded, job = [], True, ""
        if stopping is not None and stopping.requeue_signal is not None:
            for logger in trainer.loggers:  # SLURM may end the process before the Trainer does that
                logger.finalize("finished")
            folder = str(trainer.default_root_dir)
            saved.append(Ranks().first(f"looking for checkpoints in {folder}", lambda: next_hpc_path(folder)))
            trainer.save_checkpoint(saved[0])
            self._saver.wait()
            if stopping.requeues and self.is_global_zero:
                try:
                    job = slurm.requeue()
                except slurm.RequeueError as error:
                    succeeded = False
                    _log.warning(f"stopped after step {trainer.global_step} and saved {saved[0]}, but {error}")
            stopping.requeue_was_tried()
        if last is not None:
            saved.append(last.path)
            last.save()
        rank_zero_info(
            f"stopped after step {trainer.global_step}: saved {' and '.join(saved) or 'nothing more'}"
            + (f"; job {job} is in the queue again" if job else "")
        )
        return succeeded

    def _place(self) -> list[int]:
        return [*super()._place(), collectives_begun(self._module)]

    def _progress(self, doing: str) -> AbstractContextManager[Progress | None]:
        """A bar of this rank's bytes, on rank 0, if the Trainer shows bars."""
        trainer = self._module.trainer
        return progress_bar(doing, shown=self.is_global_zero and trainer.progress_bar_callback is not None)


def _data_size(states: Sequence[Mapping[str, Any]]) -> int:
    """How many ranks of a checkpoint had different batches."""
    size: int = states.data_size if isinstance(states, RankStates) else states[0].get("data_size", len(states))
    return size
