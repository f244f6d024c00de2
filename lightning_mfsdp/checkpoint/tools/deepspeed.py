"""Checkpoints of DeepSpeed's ZeRO 1 to 3 as leaves, without DeepSpeed. Tensors are mapped into memory, and read when they are written.

A checkpoint is a folder, named by a tag, in which every rank has files of `torch.save`; the file `latest` beside it holds a tag:

    mp_rank_00_model_states.pt                      ZeRO 1 and 2, rank 0: names, shapes, buffers, frozen parameters, the client's state
    zero_pp_rank_<rank>_mp_rank_00_model_states.pt  ZeRO 3, every rank: the same, with its part of each frozen parameter
    zero_pp_rank_<rank>_mp_rank_00_optim_states.pt  every rank: its part of main weights and optimizer state ("bf16_" before it, if so)

Trained parameters are known by `param_shapes` alone, a list of names and shapes in the order of their elements:

    ZeRO 1, 2   for each group of the optimizer, one vector of all its parameters, cut into equal parts, of which rank r has the r-th. Zeros
                fill its end; main weights are saved without them, moments with them. `param_alignment_paddings`, in newer versions, are
                further zeros behind each parameter
    ZeRO 3      for each subgroup, a vector on each rank of its parts of all parameters: ceil(elements / ranks) of each

Facts about the format: deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/bf16_optimizer.py and
utils/zero_to_fp32.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from typing_extensions import override

from lightning_mfsdp.checkpoint.io.location import DEEPSPEED_TAG
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.leaves import (
    LIGHTNING_VERSION,
    ChunkedTensor,
    Leaves,
    OpenedCheckpoint,
    check_is_file,
    load_file,
)

__all__ = ["is_deepspeed", "open_deepspeed"]

_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_STATES = re.compile(r".*_(model|optim)_states\.pt")
# What DeepSpeed itself saves beside the client's state.
_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *(
            "shared_params",
            "lr_scheduler",
            "data_sampler",
            "random_ltd",
            "skipped_steps",
            "global_steps",
            "global_samples",
        ),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        *("sparse_tensor_module_names", "csr_tensor_module_names", "universal_checkpoint_info"),
    }
)
# Lightning before 2.1 trained the module in a wrapper.
_WRAPPER = "_forward_module."
_CHUNK_ELEMENTS = 1 << 24
_ONE_SAVE = (
    "Remove files of other saves: DeepSpeed does not delete those of an earlier one with more ranks or another stage"
)


@dataclass(frozen=True, kw_only=True)
class _RankFile:
    path: Path
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The files of one save, by rank. `models` has one if all ranks share it."""

    folder: Path
    stage: int
    models: list[_RankFile]
    optimizers: list[_RankFile]

    @property
    def ranks(self) -> int:
        """How many trained."""
        return len(self.optimizers)

    @property
    def model(self) -> dict[str, Any]:
        """Of rank 0, which alone records tied parameters."""
        return self.models[0].content


def is_deepspeed(path: Path) -> bool:
    """Whether a directory is one that DeepSpeed saved into, or that of a tag in it."""
    return path.is_dir() and (
        (path / DEEPSPEED_TAG).is_file() or any(_STATES.fullmatch(file.name) for file in path.iterdir())
    )


def open_deepspeed(path: Path, *, trust: bool = False) -> OpenedCheckpoint:
    """Open what `is_deepspeed` recognizes; parameters and their states are not read.

    Args:
        path: The directory with `latest`, or that of a tag.
        trust: Read Python objects that `torch.load` refuses by default. Those of DeepSpeed itself are never needed.

    Raises:
        CheckpointError: Files are missing, damaged, of several saves, or of a kind of parallelism that is not read.
    """
    saved = _open(_folder_of(path), trust)
    vectors = _vectors(saved)
    trained = _main_weights(saved, vectors)
    frozen = _frozen(saved)
    shared = {_plain(name): _plain(first) for name, first in (saved.model.get("shared_params") or {}).items()}
    buffers = {_plain(name) for name in saved.model["buffer_names"]}
    model: dict[str, Any] = {}
    without = []
    for full_name, value in saved.model["module"].items():
        name = _plain(full_name)
        known = next((part[name] for part in (trained, frozen) if name in part), None)
        if known is None and name in shared:
            known = trained.get(shared[name], frozen.get(shared[name]))
        # With ZeRO 3 parameters are empty there; others are stored whole, such as frozen ones with ZeRO 1.
        if known is None and (saved.stage < 3 or name in buffers or not isinstance(value, Tensor)):
            known = value
        if known is None:
            without.append(name)
        else:
            model[name] = known
    missing = [name for name in trained if name not in model]
    if without or missing:
        raise CheckpointError(
            f"{saved.folder}: the model has {_listed(without + missing)} and it is unclear where the values are; expected every name of "
            "`module` among param_shapes, frozen_param_shapes, buffer_names or shared_params, and the reverse. Use another checkpoint"
        )
    client = {key: value for key, value in saved.model.items() if key not in _OWN_KEYS}
    from_lightning = LIGHTNING_VERSION in client
    leaves: Leaves = {("state_dict", name): leaf for name, leaf in model.items()}
    leaves |= {("optimizer_0", *inner): leaf for inner, leaf in _optimizer(saved, vectors).items()}
    if not from_lightning:
        leaves |= {(key,): value for key, value in client.items() if not isinstance(value, Tensor)}
    tied = {
        name: first for name, first in shared.items() if name in model and name not in trained and name not in frozen
    }
    return OpenedCheckpoint(
        leaves=leaves,
        rest=client if from_lightning else {},
        tied=tied,
        kind=f"DeepSpeed, ZeRO {saved.stage}, {saved.ranks} ranks",
    )


# -- files -------------------------------------------------------------------------------------------------------------


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


def _open(folder: Path, trust: bool) -> _Saved:
    found = _files(folder)
    optimizers = [_RankFile(path=path, content=_load(path, trust)) for path in found["optim"].values()]
    states = [_states_of(file) for file in optimizers]
    stages = {
        int(state.get("zero_stage", 1)) for state in states
    }  # the optimizer of bfloat16 does not save it, and has the layout of 1
    if len(stages) > 1 or not stages <= {1, 2, 3}:
        raise CheckpointError(
            f"{folder}: the files have zero_stage {sorted(stages)}, expected one of 1, 2, 3. {_ONE_SAVE}"
        )
    stage = stages.pop()
    counts = {max(count) if isinstance(count := state["partition_count"], list) else int(count) for state in states}
    expected = set(range(max(counts)))
    if len(counts) > 1 or found["optim"].keys() != expected:
        raise CheckpointError(
            f"{folder}: the partition_count of its files is {_listed(counts)}, so *_optim_states.pt of as many ranks are expected; "
            f"missing: {_listed(expected - found['optim'].keys())}; not expected: {_listed(found['optim'].keys() - expected)}. Copy all "
            f"files of the folder. {_ONE_SAVE}"
        )
    wanted = expected if stage == 3 else {None}
    if found["model"].keys() != wanted:
        names = f"{'zero_pp_rank_<rank>_' if stage == 3 else ''}mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{folder}: ZeRO {stage} writes {names}{' of each rank' if stage == 3 else ''}; missing: "
            f"{_listed(wanted - found['model'].keys())}; not expected: {_listed(found['model'].keys() - wanted)} (None is a file without a "
            f"rank). Copy all files of the folder. {_ONE_SAVE}"
        )
    models = [_RankFile(path=path, content=_load(path, trust)) for path in found["model"].values()]
    _check_models(folder, models)
    versions = {str(file.content.get("ds_version")) for file in (*models, *optimizers)}
    steps = {str(file.content.get("global_steps")) for file in models}
    if len(versions) > 1 or len(steps) > 1:
        raise CheckpointError(
            f"{folder}: the files have ds_version {_listed(versions)} and global_steps {_listed(steps)}, expected one of each. {_ONE_SAVE}"
        )
    return _Saved(folder=folder, stage=stage, models=models, optimizers=optimizers)


def _files(folder: Path) -> dict[str, dict[int | None, Path]]:
    """By kind, "model" or "optim", and rank; `None` is the rank of a file that all share."""
    found: dict[str, dict[int | None, Path]] = {"model": {}, "optim": {}}
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
        if key in found[kind]:
            raise CheckpointError(
                f"{folder} has {found[kind][key].name} and {file.name}, expected one of them. {_ONE_SAVE}"
            )
        found[kind][key] = file
    if not found["optim"]:
        whole = found["model"].get(None)
        advice = f"If ZeRO was off, convert {whole}" if whole is not None else "Copy all files of the folder"
        raise CheckpointError(f"{folder} has no *_optim_states.pt, in which ZeRO keeps main weights. {advice}")
    return {kind: dict(sorted(files.items(), key=lambda item: item[0] or 0)) for kind, files in found.items()}


def _check_models(folder: Path, models: list[_RankFile]) -> None:
    for file in models:
        missing = [key for key in ("module", "buffer_names", "param_shapes") if file.content.get(key) is None]
        if missing:
            raise CheckpointError(
                f"{file.path} of DeepSpeed {file.content.get('ds_version', 'of an unknown version')} has no {_listed(missing)}. "
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


def _states_of(file: _RankFile) -> dict[str, Any]:
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


def _load(path: Path, trust: bool) -> dict[str, Any]:
    check_is_file(path)
    if trust:
        content = load_file(path, trust=True, unpickler=SimpleNamespace(__name__=pickle.__name__, Unpickler=_Unpickler))
    else:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins: list[Any] = [(kind, name) for name in names if (kind := _stand_in(name)) is not None]
        with torch.serialization.safe_globals(stand_ins):
            content = load_file(path, trust=False)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary, as DeepSpeed saves it, got {type(content).__name__}")
    return content


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PartitionedTensor(ChunkedTensor):
    """A tensor whose elements lie one after another in flat pieces, with unused ones behind the last.

    Attributes:
        parts: `[elements]` each, mapped from files.
        size: Of the tensor.
    """

    parts: tuple[Tensor, ...]
    size: torch.Size

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.parts[0].dtype

    @property
    def pieces(self) -> int:
        """How many ranks have a part of it."""
        return len(self.parts)

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Rows that are read at a time."""
        if not self.size.numel() or not self.size:
            return [ChunkStorageMetadata(torch.Size([0] * len(self.size)), self.size)]
        rest = self.size[1:]
        rows = max(1, _CHUNK_ELEMENTS // rest.numel())
        zeros = [0] * len(rest)
        return [
            ChunkStorageMetadata(torch.Size([start, *zeros]), torch.Size([min(rows, self.size[0] - start), *rest]))
            for start in range(0, self.size[0], rows)
        ]

    def read(self, offsets: torch.Size) -> Tensor:
        """The chunk at these offsets, `[*chunk.sizes]`, in new memory."""
        sizes = next(chunk.sizes for chunk in self.chunks if chunk.offsets == offsets)
        begin = offsets[0] * self.size[1:].numel() if offsets else 0
        elements = list(_cut(self.parts, begin, torch.Size(sizes).numel()))
        return torch.cat(elements).view(sizes) if elements else torch.empty(sizes, dtype=self.dtype, device="cpu")


def _cut(vector: Iterable[Tensor], begin: int, elements: int) -> Iterator[Tensor]:
    """Views of what lies in a range of elements of vectors that follow one another."""
    start = 0
    for part in vector:
        first, last = max(begin - start, 0), min(begin + elements - start, part.numel())
        if first < last:
            yield part[first:last]
        start += part.numel()


@dataclass(frozen=True, kw_only=True)
class _Vector:
    """Trained parameters in one vector: of a group of the optimizer, or with ZeRO 3 of a subgroup, where each rank has one.

    Attributes:
        saved: Where it is.
        number: Among the vectors.
        shapes: By name, in the order of the elements.
        begins: By name, the first element: of the whole vector, with ZeRO 3 of each rank's.
        elements: Up to the end of the last parameter, as `begins`.
    """

    saved: _Saved
    number: int
    shapes: dict[str, torch.Size]
    begins: dict[str, int]
    elements: int

    def tensors(self, parts: Sequence[Tensor], what: str) -> dict[str, PartitionedTensor]:
        """Parameters, or something of their shape, from what each rank has of the vector.

        Raises:
            CheckpointError: The ranks have more or fewer elements than the parameters.
        """
        got = [part.numel() for part in parts]
        if self.saved.stage == 3:
            fits = all(count == self.elements for count in got)
        else:
            fill = 2 * self.saved.ranks  # a vector is filled up to a multiple of it
            fits = -(-sum(got) // fill) == -(-self.elements // fill)
        if not fits:
            expected = (
                f"{self.elements} on each" if self.saved.stage == 3 else f"{self.elements} and a filling together"
            )
            raise CheckpointError(
                f"{self.saved.folder}: ranks have {_listed(got)} elements of {what} of the {len(self.shapes)} parameters from "
                f"{next(iter(self.shapes), 'none')} on, expected {expected}. The files belong to several saves, or a part was kept on "
                "NVMe; use another checkpoint"
            )
        return {name: PartitionedTensor(self._parts_of(name, parts), shape) for name, shape in self.shapes.items()}

    def _parts_of(self, name: str, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        begin, elements = self.begins[name], self.shapes[name].numel()
        if self.saved.stage < 3:
            return tuple(_cut(parts, begin, elements))
        own = -(-elements // self.saved.ranks)
        return tuple(part[begin : begin + own] for part in parts)


def _vectors(saved: _Saved) -> list[_Vector]:
    vectors = []
    gaps = _states_of(saved.optimizers[0]).get("param_alignment_paddings") or []
    for number, named in enumerate(saved.model["param_shapes"]):
        shapes = {_plain(name): torch.Size(shape) for name, shape in named.items()}
        if saved.stage == 3:
            lengths = [-(-shape.numel() // saved.ranks) for shape in shapes.values()]
        else:
            behind = gaps[number] if gaps else [0] * len(shapes)
            lengths = [shape.numel() + gap for shape, gap in zip(shapes.values(), behind, strict=True)]
        *begins, elements = accumulate(lengths, initial=0)
        places = dict(zip(shapes, begins, strict=True))
        vectors.append(_Vector(saved=saved, number=number, shapes=shapes, begins=places, elements=elements))
    return vectors


def _main_weights(saved: _Saved, vectors: Sequence[_Vector]) -> dict[str, PartitionedTensor]:
    key = "fp32_flat_groups" if saved.stage == 3 else "single_partition_of_fp32_groups"
    ranks = [_states_of(file).get(key) for file in saved.optimizers]
    for file, own in zip(saved.optimizers, ranks, strict=True):
        if not isinstance(own, list) or len(own) != len(vectors):
            got = f"{len(own)} vectors" if isinstance(own, list) else "nothing"
            raise CheckpointError(
                f"{file.path} has {got} under {key}, expected {len(vectors)}, as param_shapes. The files belong to several saves, or to an "
                "unknown version of DeepSpeed; use another checkpoint"
            )
    weights: dict[str, PartitionedTensor] = {}
    for vector in vectors:
        weights |= vector.tensors([own[vector.number].flatten() for own in ranks if own is not None], "main weights")
    return weights


def _frozen(saved: _Saved) -> dict[str, Tensor | PartitionedTensor]:
    """Parameters that the optimizer does not have; none with ZeRO 1, which stores them in the module, and if they were excluded."""
    shapes = saved.model.get("frozen_param_shapes") or {}
    fragments = [file.content.get("frozen_param_fragments") or {} for file in saved.models]
    frozen: dict[str, Tensor | PartitionedTensor] = {}
    for full_name, shape in shapes.items():
        parts = [own[full_name] for own in fragments if full_name in own]
        elements = torch.Size(shape).numel()
        if len(parts) != len(saved.models) or sum(part.numel() for part in parts) < elements:
            raise CheckpointError(
                f"{saved.folder}: {len(parts)} of {len(saved.models)} files have {[part.numel() for part in parts]} elements of the frozen "
                f"parameter {full_name} of shape {tuple(shape)}; expected all of it. {_ONE_SAVE}"
            )
        frozen[_plain(full_name)] = (
            parts[0]
            if saved.stage < 3
            else PartitionedTensor(tuple(part.flatten() for part in parts), torch.Size(shape))
        )
    return frozen


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _optimizer(saved: _Saved, vectors: Sequence[_Vector]) -> Leaves:
    """State by parameter and name, and groups, as leaves of one optimizer."""
    key = "optimizer_state_dict" if saved.stage == 3 else "base_optimizer_state"
    ranks = [_states_of(file).get(key) for file in saved.optimizers]
    if not all(isinstance(own, dict) and {"state", "param_groups"} <= own.keys() for own in ranks):
        raise CheckpointError(
            f"{saved.folder}: the optimizer's state dict is not under {key}, where the options of its groups are read. Versions before "
            "0.5, and elastic_checkpoint=True, do not save them; use another checkpoint"
        )
    optimizers: list[dict[str, Any]] = [own for own in ranks if own is not None]
    groups = optimizers[0]["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(vectors):
        raise CheckpointError(
            f"{saved.folder}: the optimizer has {len(numbers)} vectors, expected {len(vectors)}, as param_shapes. {_ONE_SAVE}"
        )
    leaves: Leaves = {}
    for number, vector in zip(numbers, vectors, strict=True):
        states = [own["state"].get(number, {}) for own in optimizers]
        group = next(group for group in groups if number in group["params"])
        if states[0] and "step" not in states[0] and "step" in group:  # where some of DeepSpeed's optimizers count
            states = [{**own, "step": group["step"]} for own in states]
        for name in states[0]:
            for parameter, value in _state(vector, name, [own.get(name) for own in states]).items():
                leaves["state", parameter, name] = value
    remaining = iter(vectors)
    for index, group in enumerate(groups):
        names = [name for _ in group["params"] for name in _in_order(next(remaining))]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "step")}
        leaves |= {("param_groups", index, key): value for key, value in {**options, "params": names}.items()}
    return leaves


def _state(vector: _Vector, name: str, values: Sequence[Any]) -> dict[str, Any]:
    """A state of the parameters of a vector: one of their shapes, or a number that is the same for all."""
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return dict(vector.tensors([value.flatten() for value in values], name))
    numbers = [value.item() if isinstance(value, Tensor) and not value.dim() else value for value in values]
    if any(number != numbers[0] for number in numbers) or not isinstance(numbers[0], int | float):
        raise CheckpointError(
            f"{vector.saved.folder}: ranks have {_listed(numbers)} as {name} of the optimizer, expected vectors or the same number. "
            f"{_ONE_SAVE}"
        )
    dtype = values[0].dtype if isinstance(values[0], Tensor) else torch.float32
    return {parameter: torch.tensor(numbers[0], dtype=dtype) for parameter in vector.shapes}


def _in_order(vector: _Vector) -> list[str]:
    """Names in the order in which the program gave them to the optimizer. `round_robin_gradients` deals them out to the ranks."""
    names = list(vector.shapes)
    options = vector.saved.model.get("ds_config")
    zero = options.get("zero_optimization") if isinstance(options, Mapping) else None
    if vector.saved.stage < 3 and isinstance(zero, Mapping) and zero.get("round_robin_gradients"):
        ranks = vector.saved.ranks
        dealt = [place for rank in range(ranks) for place in range(rank, len(names), ranks)]
        return [name for _, name in sorted(zip(dealt, names, strict=True))]
    return names


# -- names -------------------------------------------------------------------------------------------------------------


def _plain(name: str) -> str:
    return name.removeprefix(_WRAPPER)


def _listed(values: Iterable[Any]) -> str:
    """Some of them, for messages."""
    texts = sorted(map(str, values), key=lambda text: (len(text), text))
    return (", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")) or "none"
