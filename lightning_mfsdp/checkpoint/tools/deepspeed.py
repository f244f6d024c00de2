"""Checkpoints of DeepSpeed's ZeRO 1 to 3 as leaves. Tensors are mapped into memory, and read when they are written.

Trained parameters are known by `param_shapes` alone, a list of names and shapes in the order of their elements:

    ZeRO 1, 2   for each group of the optimizer, one vector of all its parameters, cut into equal parts, of which rank r has the r-th. Zeros
                fill its end; main weights are saved without them, moments with them. `param_alignment_paddings`, in newer versions, are
                further zeros behind each parameter
    ZeRO 3      for each subgroup, a vector on each rank of its parts of all parameters: ceil(elements / ranks) of each

Facts about the format: deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/bf16_optimizer.py and
utils/zero_to_fp32.py of DeepSpeed 0.19.8. Its files: `deepspeed_files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.deepspeed_files import ONE_SAVE, SavedFiles, listed, open_files, states_of
from lightning_mfsdp.checkpoint.tools.leaves import LIGHTNING_VERSION, ChunkedTensor, Leaves, OpenedCheckpoint

__all__ = ["open_deepspeed"]

# What DeepSpeed itself saves beside the client's state.
_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "sparse_tensor_module_names", "csr_tensor_module_names", "universal_checkpoint_info"),
    }
)
# Lightning before 2.1 trained the module in a wrapper.
_WRAPPER = "_forward_module."
_CHUNK_ELEMENTS = 1 << 24


def open_deepspeed(path: Path, *, trust: bool = False) -> OpenedCheckpoint:
    """Open what `is_deepspeed` recognizes; parameters and their states are not read.

    Args:
        path: The directory with `latest`, or that of a tag.
        trust: Read Python objects that `torch.load` refuses by default.

    Raises:
        CheckpointError: Files cannot be opened, or do not belong together.
    """
    saved = open_files(path, trust=trust)
    vectors = _vectors(saved)
    parameters: dict[str, Any] = {**_frozen(saved), **_main_weights(saved, vectors)}
    model, tied = _model(saved, parameters)
    leaves: Leaves = {("state_dict", name): leaf for name, leaf in model.items()}
    leaves |= {("optimizer_0", *inner): leaf for inner, leaf in _optimizer(saved, vectors).items()}
    client = {key: value for key, value in saved.model.items() if key not in _OWN_KEYS}
    if LIGHTNING_VERSION not in client:
        leaves |= {(key,): value for key, value in client.items() if not isinstance(value, Tensor)}
        client = {}
    kind = f"DeepSpeed, ZeRO {saved.stage}, {saved.ranks} ranks"
    return OpenedCheckpoint(leaves=leaves, rest=client, tied=tied, kind=kind)


def _model(saved: SavedFiles, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Parameters and what is stored beside them, in the order of the module; further names of tied ones, with the first."""
    shared = {_plain(name): _plain(first) for name, first in (saved.model.get("shared_params") or {}).items()}
    buffers = {_plain(name) for name in saved.model["buffer_names"]}
    model: dict[str, Any] = {}
    unclear = []
    for full_name, value in saved.model["module"].items():
        name = _plain(full_name)
        first = name if name in parameters else shared.get(name, name)
        if first in parameters:
            model[name] = parameters[first]
        elif saved.stage < 3 or name in buffers or not isinstance(value, Tensor):
            model[name] = value  # a parameter too, if it is a frozen one with ZeRO 1
        else:  # with ZeRO 3 parameters are empty in the module
            unclear.append(name)
    unclear += [name for name in parameters if name not in model]
    if unclear:
        raise CheckpointError(
            f"{saved.folder}: the model has {listed(unclear)} and it is unclear where the values are; expected every name of `module` "
            "among param_shapes, frozen_param_shapes, buffer_names or shared_params, and the reverse. Use another checkpoint"
        )
    return model, {name: first for name, first in shared.items() if name in model and name not in parameters}


def _plain(name: str) -> str:
    return name.removeprefix(_WRAPPER)


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

    saved: SavedFiles
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
                f"{self.saved.folder}: ranks have {listed(got)} elements of {what} of the {len(self.shapes)} parameters from "
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


def _vectors(saved: SavedFiles) -> list[_Vector]:
    vectors = []
    gaps = states_of(saved.optimizers[0]).get("param_alignment_paddings") or []
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


def _main_weights(saved: SavedFiles, vectors: Sequence[_Vector]) -> dict[str, PartitionedTensor]:
    key = "fp32_flat_groups" if saved.stage == 3 else "single_partition_of_fp32_groups"
    ranks = [states_of(file).get(key) for file in saved.optimizers]
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


def _frozen(saved: SavedFiles) -> dict[str, Tensor | PartitionedTensor]:
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
                f"parameter {full_name} of shape {tuple(shape)}; expected all of it. {ONE_SAVE}"
            )
        frozen[_plain(full_name)] = (
            parts[0]
            if saved.stage < 3
            else PartitionedTensor(tuple(part.flatten() for part in parts), torch.Size(shape))
        )
    return frozen


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _optimizer(saved: SavedFiles, vectors: Sequence[_Vector]) -> Leaves:
    """State by parameter and name, and groups, as leaves of one optimizer."""
    key = "optimizer_state_dict" if saved.stage == 3 else "base_optimizer_state"
    ranks = [states_of(file).get(key) for file in saved.optimizers]
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
            f"{saved.folder}: the optimizer has {len(numbers)} vectors, expected {len(vectors)}, as param_shapes. {ONE_SAVE}"
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
            f"{vector.saved.folder}: ranks have {listed(numbers)} as {name} of the optimizer, expected vectors or the same number. "
            f"{ONE_SAVE}"
        )
    dtype = values[0].dtype if isinstance(values[0], Tensor) else torch.float32
    return {parameter: torch.tensor(numbers[0], dtype=dtype, device="cpu") for parameter in vector.shapes}


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
