"""Weights as a folder of safetensors files that Hugging Face's `from_pretrained` reads: from a checkpoint, or from a model in training.

One tensor at a time is whole in memory, and a checkpoint's optimizer states are never read. Files are put in place when all are complete.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base.progress import Progress, progress_bar
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.location import META_FILE, TIED_WEIGHTS, Location
from lightning_mfsdp.checkpoint.io.ranks import on_all_ranks
from lightning_mfsdp.checkpoint.io.trust import RefusedError, not_read
from lightning_mfsdp.checkpoint.safetensors.files import (
    DTYPE_NAMES,
    FolderWriter,
    PlannedTensor,
    plan_files,
)
from lightning_mfsdp.checkpoint.state.index import plain_name
from lightning_mfsdp.checkpoint.state.parameter_state import AVERAGE, PARAMETER_STATES, average_in, under_all_names
from lightning_mfsdp.checkpoint.state.state_dict import tied_names
from lightning_mfsdp.engine import ParameterView
from lightning_mfsdp.engine.internals import unsharded_of, view_of

__all__ = ["export_checkpoint", "export_model"]

_MAX_SHARD_BYTES = 5 * 10**9


def export_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    progress: Progress | None = None,
    weights_only: bool | None = None,
    averaged: bool = False,
) -> list[Path]:
    """Write the weights of a finished checkpoint as safetensors. It runs in one process, without a Trainer or a process group.

    The folder gets `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`. Tied weights
    are in it once, under their first name (a directory that another strategy saved does not record which are tied: there they are written
    under all names). For `from_pretrained` the model's `config.json` must be added.

    Args:
        path: What this strategy saved: a directory, or one file (`state_dict_type="full"`).
        folder: New, empty, or an earlier export, which is replaced.
        max_shard_bytes: Most bytes of tensors in one file; a larger tensor gets a file of its own.
        dtype: Floating-point tensors are cast to it. `None`: they keep the dtype of the main weights.
        prefix: Prefix of all names that the exported model does not have, with its dot: "model." if the LightningModule holds it as
            `self.model`. It is removed.
        progress: Called with the bytes written and all bytes, after each tensor. `None`: a bar on a terminal.
        weights_only: As for `torch.load`: only `False` loads classes that were not allowed.
        averaged: The average that `ShardedEMA` has saved takes the place of the weights; what is not averaged is the model's.

    Returns:
        The safetensors files.

    Raises:
        CheckpointError: With `averaged`, there is no average.
        ValueError: No checkpoint at the path, an argument out of its range, names without the prefix, or entries that are no tensors.
        RuntimeError: The checkpoint is damaged, or holds a class that was not allowed; or another rank than 0 called it.
        IsADirectoryError, NotADirectoryError: Something else is at `folder`.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        raise RuntimeError(
            f"export_checkpoint: rank {dist.get_rank()} called it, but one process does all the work; call it on rank 0 alone, such as "
            "under `if trainer.is_global_zero:`"
        )
    options = _Options(max_shard_bytes=max_shard_bytes, dtype=dtype, prefix=prefix)
    source = locate(path)
    if source.is_sharded():
        described, read_tensor = _sharded_source(source, weights_only, averaged=averaged)
    elif source.is_file():
        described, read_tensor = _file_source(source, weights_only, averaged=averaged)
    else:
        raise ValueError(
            f"export_checkpoint: {source}: expected a checkpoint of this strategy, a directory with {META_FILE} in it or a single file; "
            + (source.other_directory() if source.is_directory() else "there is nothing at that path")
        )
    files = plan_files(options.plan(f"export_checkpoint: {source}", described), max_shard_bytes)
    with (
        progress_bar(f"Writing {folder}", progress) as shown,
        FolderWriter(Path(folder), files, shown) as writer,
    ):
        writer.begin()
        for file in files:
            for tensor in file.tensors:
                writer.add(read_tensor(tensor.origin))
        return writer.finish()


def export_model(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    progress: Progress | None = None,
) -> list[Path]:
    """Write the main weights of a sharded model as safetensors. All ranks call it; rank 0 writes.

    As `export_checkpoint`; and if the model has a Hugging Face `config` (and `generation_config`), that is saved, too, so that
    `from_pretrained(folder)` reads the folder without changes.

    Args:
        module: Sharded, or a part of it such as `self.model` of a LightningModule.
        folder: Of rank 0; new, empty, or an earlier export, which is replaced.
        max_shard_bytes: As in `export_checkpoint`.
        dtype: As in `export_checkpoint`.
        prefix: As in `export_checkpoint`; a part of the module by that name is the model whose config is saved.
        progress: Called on rank 0 with the bytes written and all bytes, after each tensor. `None`: a bar on a terminal.

    Returns:
        The safetensors files, on every rank.

    Raises:
        ValueError, IsADirectoryError, NotADirectoryError: As `export_checkpoint`; on the other ranks as a RuntimeError.
    """
    options = _Options(max_shard_bytes=max_shard_bytes, dtype=dtype, prefix=prefix)
    doing = f"export_model: {type(module).__name__}"
    writes = not dist.is_initialized() or dist.get_rank() == 0
    state = module.state_dict(keep_vars=True)
    described: _Described = {name: _describe(value) for name, value in state.items()}
    # A value that a hook computed from a parameter is not tied to it.
    tied = tied_names({name: value for name, value in state.items() if _view(value) or not isinstance(value, DTensor)})
    described.update(tied)
    files = plan_files(options.plan(doing, described), max_shard_bytes)
    with (
        progress_bar(f"Writing {folder}", progress) as shown,
        FolderWriter(Path(folder), files, shown) as writer,
    ):
        with on_all_ranks(doing):
            if writes:
                writer.begin()
        for file in files:
            for tensor in file.tensors:
                full = _full(state[tensor.origin])
                with on_all_ranks(doing):
                    if writes:
                        writer.add(full)
                del full  # frees its memory before the next one is gathered
        with on_all_ranks(doing):
            if writes:
                inner = dict(module.named_modules()).get(prefix.removesuffix("."), module)
                _save_configs(inner, writer.part, [tensor for file in files for tensor in file.tensors])
                writer.finish()
    return writer.paths


# By name: shape and dtype of a tensor, or the name that it is tied to, or `None` for other objects.
_Described: TypeAlias = dict[str, tuple[torch.Size, torch.dtype] | str | None]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The common part of the two exports."""

    max_shard_bytes: int
    dtype: torch.dtype | None
    prefix: str

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={self.max_shard_bytes!r}: expected a positive number of bytes")
        if self.dtype is not None and not (self.dtype in DTYPE_NAMES and self.dtype.is_floating_point):
            raise ValueError(f"dtype={self.dtype}: expected a floating-point dtype that safetensors knows, or None")
        if self.prefix and not self.prefix.endswith("."):
            raise ValueError(
                f'prefix={self.prefix!r}: expected "" or the beginning of names with its dot, such as "model."'
            )

    def plan(self, doing: str, described: _Described) -> list[PlannedTensor]:
        """Names, shapes and dtypes in the files."""
        adapted = [name for name in described if "base_model.model." in name and ".base_layer." in name]
        if adapted:
            raise ValueError(
                f"{doing}: {adapted[0]} belongs to a model that peft has wrapped, whose names from_pretrained of the base model does not "
                "know. Save the adapters: state = full_state_dict(model) on all ranks, then on rank 0 alone "
                "model.save_pretrained(folder, state_dict=state). Or call unshard_model and merge_and_unload, and export the merged model"
            )
        foreign = [name for name in described if not plain_name(name).startswith(self.prefix)]
        if foreign:
            raise ValueError(
                f"{doing}: {', '.join(foreign[:4])} (of {len(foreign)}) do not begin with prefix={self.prefix!r}. Export the part of the "
                "module that is the model, or choose a prefix that all names have"
            )
        self._refuse_packed(doing, described)
        tensors, unfit = [], []
        for name, value in described.items():
            if isinstance(value, str):
                continue
            if value is None or value[1] not in DTYPE_NAMES:
                unfit.append(f"{name} ({'no tensor' if value is None else value[1]})")
                continue
            cast = self.dtype if self.dtype is not None and value[1].is_floating_point else value[1]
            short = plain_name(name).removeprefix(self.prefix)
            tensors.append(PlannedTensor(name=short, origin=name, shape=value[0], dtype=cast))
        if unfit:
            raise ValueError(
                f"{doing}: safetensors cannot hold {', '.join(unfit[:4])} (of {len(unfit)}); expected tensors of the usual dtypes. Keep "
                "other state out of state_dict()"
            )
        return tensors

    def _refuse_packed(self, doing: str, described: _Described) -> None:
        """Quantized weights are written where others can read them, and are not cast."""
        bytes_alone = [
            name
            for name, value in described.items()
            if ".parametrizations." in name and isinstance(value, tuple) and value[1] is torch.uint8
        ]
        if bytes_alone:
            raise ValueError(
                f"{doing}: {bytes_alone[0]} (of {len(bytes_alone)}) is the bytes of a quantized weight, which from_pretrained cannot read. "
                "Call unshard_model on the model and save it as its library does, or save adapters alone with save_pretrained on rank 0"
            )
        scaled = [name for name in described if ".quant_state.bitsandbytes__" in name]
        if scaled and self.dtype is not None:
            raise ValueError(
                f"{doing}: dtype={self.dtype}, and {scaled[0]} (of {len(scaled)}) belongs to a 4-bit weight, whose scales must keep their "
                "dtype; expected None. To have a model without 4-bit weights, dequantize it first"
            )


# -- from a checkpoint -------------------------------------------------------------------------------------------------


def _sharded_source(
    path: Location, weights_only: bool | None, *, averaged: bool
) -> tuple[_Described, Callable[[str], Tensor]]:
    directory, problem = Directory.look_over(path, weights_only=weights_only)
    if isinstance(problem, RefusedError):
        raise RefusedError(not_read(path, problem)) from problem
    if problem or directory is None:
        raise RuntimeError(f"export_checkpoint: {path} is incomplete or damaged: {problem}. Use another checkpoint")
    described: _Described = {}
    flat_names: dict[str, str] = {}
    for flat_name, (name, *inside) in directory.paths("model").items():
        described[str(name)] = None if inside else directory.entry(flat_name)
        flat_names[str(name)] = flat_name
    tied = path.read_file(META_FILE, weights_only).get(TIED_WEIGHTS, {})
    if averaged:
        of_average = {str(name): flat_name for flat_name, (name, *_) in directory.paths(AVERAGE).items()}
        flat_names.update(under_all_names(path, average_in(path, {AVERAGE: of_average}), flat_names, tied))
        described = {
            name: None if value is None else directory.entry(flat_names[name]) for name, value in described.items()
        }
    described.update({name: first for name, first in tied.items() if name in described and first in described})

    def read_tensor(name: str) -> Tensor:
        tensor: Tensor = directory.values([flat_names[name]])[flat_names[name]]
        return tensor

    return described, read_tensor


def _file_source(
    path: Location, weights_only: bool | None, *, averaged: bool
) -> tuple[_Described, Callable[[str], Tensor]]:
    content = path.read_file(None, weights_only)
    state = content.get("state_dict")
    if not isinstance(state, dict):
        raise ValueError(
            f"export_checkpoint: {path} holds no state_dict; expected a checkpoint file that Lightning saved"
        )
    if averaged:
        average = average_in(path, content.get(PARAMETER_STATES))
        state = {**state, **under_all_names(path, average, state, tied_names(state))}
    described: _Described = {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else None for name, value in state.items()
    }
    described.update(tied_names(state))
    return described, state.__getitem__


# -- from a model ------------------------------------------------------------------------------------------------------


def _view(value: Any) -> ParameterView | None:
    """The parameter that a value of a state dict is, in any representation; `None` for what was computed from one."""
    view = view_of(value) if isinstance(value, Tensor) else None
    if view is None:
        return None
    representations = (view.dtensor, view.local, unsharded_of(value))
    return view if any(value is tensor for tensor in representations) else None


def _describe(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    if not isinstance(value, Tensor):
        return None
    view = _view(value)
    return (value.shape, value.dtype) if view is None else (view.shape, view.dtype)


def _full(value: Tensor) -> Tensor:
    """The whole of a value of a state dict; for a parameter, that of its main weight. Collective."""
    view = _view(value)
    if view is not None:
        value = view.dtensor
    return value.full_tensor() if isinstance(value, DTensor) else value


def _save_configs(model: nn.Module, folder: Path, tensors: Sequence[PlannedTensor]) -> None:
    """Hugging Face's configs besides weights, if the model has them: with the class and the dtype of the files."""
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        saved = copy.deepcopy(config)
        saved.architectures = [type(model).__name__]
        dtypes = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
        if dtypes:
            saved.dtype = dtypes[0]
        saved.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)
