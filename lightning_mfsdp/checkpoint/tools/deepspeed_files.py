"""The files of a checkpoint of DeepSpeed's ZeRO: found, checked against each other, and opened without DeepSpeed.

    mp_rank_00_model_states.pt                      ZeRO 1 and 2, rank 0: names, shapes, buffers, frozen parameters, the client's state
    zero_pp_rank_<rank>_mp_rank_00_model_states.pt  ZeRO 3, every rank: the same, with its part of each frozen parameter
    zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  every rank: its part of main weights and optimizer state ("bf16_" before it, if so)

They are in a folder that is named by a tag; the file `latest` beside it holds a tag.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from lightning_mfsdp.checkpoint.io.location import DEEPSPEED_TAG, looks_like_deepspeed
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.leaves import check_is_file, load_file

__all__ = ["ONE_SAVE", "RankFile", "SavedFiles", "is_deepspeed", "listed", "load_rank_file", "open_files", "states_of"]

_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_STATES = re.compile(r".*_(model|optim)_states\.pt")
ONE_SAVE = (
    "Remove files of other saves: DeepSpeed does not delete those of an earlier one with more ranks or another stage"
)


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """An opened file."""

    path: Path
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """The files of one save, by rank. `models` has one if all ranks share it."""

    folder: Path
    stage: int
    models: list[RankFile]
    optimizers: list[RankFile]

    @property
    def ranks(self) -> int:
        """How many trained."""
        return len(self.optimizers)

    @property
    def model(self) -> dict[str, Any]:
        """Of rank 0, which alone records tied parameters."""
        return self.models[0].content


def _folder_of(path: Path) -> Path:
    """The folder of the tag."""
    latest = path / DEEPSPEED_TAG
    if not latest.is_file():
        return path
    tag = latest.read_text().strip()
    folder = path / tag
    if not tag or Path(tag).name != tag or not folder.is_dir():
        raise CheckpointError(
            f"{latest} names the tag {tag!r}, and there is no such folder beside it. Copy it as well, or pass the folder of another tag"
        )
    return folder


def is_deepspeed(path: Path) -> bool:
    """Whether a path is a directory that DeepSpeed saved into, or that of a tag in it."""
    return path.is_dir() and looks_like_deepspeed(file.name for file in path.iterdir())


def open_files(path: Path, *, trust: bool) -> SavedFiles:
    """Open all files of one save. Tensors are mapped into memory and not read.

    Args:
        path: The directory with `latest`, or that of a tag.
        trust: Read Python objects that `torch.load` refuses by default. Those of DeepSpeed itself are never needed.

    Raises:
        CheckpointError: Files are missing, damaged, of several saves, or of a kind of parallelism that is not read.
    """
    folder = _folder_of(path)
    files = _files(folder)
    optimizers = [RankFile(path=path, content=load_rank_file(path, trust)) for path in files["optim"].values()]
    states = [states_of(file) for file in optimizers]
    # The optimizer of bfloat16 does not save the stage, and has the layout of 1.
    stages = {int(state.get("zero_stage", 1)) for state in states}
    if len(stages) > 1 or not stages <= {1, 2, 3}:
        raise CheckpointError(
            f"{folder}: the files have zero_stage {sorted(stages)}, expected one of 1, 2, 3. {ONE_SAVE}"
        )
    stage = stages.pop()
    counts = {max(count) if isinstance(count := state["partition_count"], list) else int(count) for state in states}
    expected = set(range(max(counts)))
    if len(counts) > 1 or files["optim"].keys() != expected:
        raise CheckpointError(
            f"{folder}: the partition_count of its files is {listed(counts)}, so *_optim_states.pt of as many ranks are expected; "
            f"missing: {listed(expected - files['optim'].keys())}; not expected: {listed(files['optim'].keys() - expected)}. Copy all "
            f"files of the folder. {ONE_SAVE}"
        )
    wanted = expected if stage == 3 else {None}
    if files["model"].keys() != wanted:
        names = f"{'zero_pp_rank_<rank>_' if stage == 3 else ''}mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{folder}: ZeRO {stage} writes {names}{' of each rank' if stage == 3 else ''}; missing: "
            f"{listed(wanted - files['model'].keys())}; not expected: {listed(files['model'].keys() - wanted)} (None is a file without a "
            f"rank). Copy all files of the folder. {ONE_SAVE}"
        )
    models = [RankFile(path=path, content=load_rank_file(path, trust)) for path in files["model"].values()]
    _check_models(folder, models)
    versions = {str(file.content.get("ds_version")) for file in (*models, *optimizers)}
    steps = {str(file.content.get("global_steps")) for file in models}
    if len(versions) > 1 or len(steps) > 1:
        raise CheckpointError(
            f"{folder}: the files have ds_version {listed(versions)} and global_steps {listed(steps)}, expected one of each. {ONE_SAVE}"
        )
    return SavedFiles(folder=folder, stage=stage, models=models, optimizers=optimizers)


def _files(folder: Path) -> dict[str, dict[int | None, Path]]:
    """By kind, "model" or "optim", and rank; `None` is the rank of a file that all share."""
    files: dict[str, dict[int | None, Path]] = {"model": {}, "optim": {}}
    for file in sorted(folder.iterdir()):
        match = _FILE.fullmatch(file.name)
        if file.name.startswith(("layer_", "expp_rank_")) or (file.name == "zero" and file.is_dir()):
            raise CheckpointError(
                f"{folder} has {file.name}, which DeepSpeed writes for pipeline stages, its layers of experts or in its universal format. "
                "Expected parameters that are sharded by ZeRO alone; convert that checkpoint with DeepSpeed's own tools"
            )
        if match is None:
            if _STATES.fullmatch(file.name):
                raise CheckpointError(
                    f"{folder} has {file.name}, a name that no known version of DeepSpeed writes; remove it"
                )
            continue
        rank, tensor_rank, kind = match.groups()
        if int(tensor_rank):
            raise CheckpointError(
                f"{folder} has {file.name}, of a model with tensor parallelism; expected mp_rank_00 alone. Merge its parts with "
                "DeepSpeed's or Megatron's tools first"
            )
        key = None if rank is None else int(rank)
        if key in files[kind]:
            raise CheckpointError(
                f"{folder} has {files[kind][key].name} and {file.name}, expected one of them. {ONE_SAVE}"
            )
        files[kind][key] = file
    if not files["optim"]:
        whole = files["model"].get(None)
        otherwise = f". If ZeRO was off, convert {whole}" if whole is not None else ""
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt, in which ZeRO keeps main weights. Copy all files of the folder{otherwise}"
        )
    return {kind: dict(sorted(paths.items(), key=lambda item: item[0] or 0)) for kind, paths in files.items()}


def _check_models(folder: Path, models: list[RankFile]) -> None:
    for file in models:
        missing = [key for key in ("module", "buffer_names", "param_shapes") if file.content.get(key) is None]
        if missing:
            raise CheckpointError(
                f"{file.path} of DeepSpeed {file.content.get('ds_version', 'of an unknown version')} has no {listed(missing)}. "
                "Expected what versions from 0.5 on write with ZeRO and without pipeline stages; use another checkpoint"
            )
        degrees = {
            "mp_world_size": file.content.get("mp_world_size"),
            **(file.content.get("checkpoint_parallel_dimensions") or {}),
        }
        several = {name: degree for name, degree in degrees.items() if isinstance(degree, int) and degree > 1}
        if several:
            raise CheckpointError(
                f"{file.path} has {several}, expected 1: parts of tensor parallelism and of pipeline stages are not merged. Merge them "
                "with DeepSpeed's tools first"
            )


def states_of(file: RankFile) -> dict[str, Any]:
    """What the optimizer of ZeRO saved.

    Raises:
        CheckpointError: The file has none.
    """
    states = file.content.get("optimizer_state_dict")
    if not isinstance(states, dict) or "partition_count" not in states:
        raise CheckpointError(
            f"{file.path} of DeepSpeed {file.content.get('ds_version', 'of an unknown version')} has no optimizer_state_dict with "
            "partition_count, as ZeRO writes it; use another checkpoint"
        )
    return states


class _Inert:
    """Stands for objects of DeepSpeed's classes, of which nothing is needed."""

    def __new__(cls, *_: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        """Keep nothing."""


def _stand_in(path: str) -> type | None:
    """What replaces a class of DeepSpeed: stages are numbers, loss scalers and places in vectors are not needed."""
    if not path.startswith("deepspeed."):
        return None
    return int if path.endswith(".ZeroStageEnum") else _Inert


class _Unpickler(pickle.Unpickler):
    """Loads any class but DeepSpeed's, which need not be installed."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        return _stand_in(f"{module}.{name}") or super().find_class(module, name)


def load_rank_file(path: Path, trust: bool) -> dict[str, Any]:
    """Load a file without DeepSpeed: objects of its classes become empty ones.

    Raises:
        CheckpointError: It is damaged, or holds something else, or Python objects and `trust` is not set.
    """
    check_is_file(path)
    if trust:
        content = load_file(path, trust=True, unpickler=SimpleNamespace(__name__=pickle.__name__, Unpickler=_Unpickler))
    else:
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is a damaged file of torch.save ({error}). Copy it again, or use another"
            ) from error
        stand_ins: list[Any] = [(kind, name) for name in names if (kind := _stand_in(name)) is not None]
        with torch.serialization.safe_globals(stand_ins):
            content = load_file(path, trust=False)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary, as DeepSpeed saves it, got {type(content).__name__}")
    return content


def listed(values: Iterable[Any]) -> str:
    """Some of them, for messages."""
    texts = sorted(map(str, values), key=lambda text: (len(text), text))
    return (", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")) or "none"
