"""Summarizes what a checkpoint holds, without reading its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.read import file_problems, sizes_needed
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.leaves import (
    LIGHTNING_VERSION,
    Leaves,
    TensorLeaf,
    UnreadTensor,
    flat_name,
    is_tensor,
    size_bytes,
)
from lightning_mfsdp.checkpoint.tools.opened import open_checkpoint
from lightning_mfsdp.checkpoint.tools.parts import CheckpointParts, OptimizerPart, find_parts

__all__ = ["OptimizerSummary", "Summary", "TensorSummary", "summarize", "summarize_leaves"]

_WRITER = re.compile(r"__(\d+)_[\d_]+\.distcp")


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """One tensor.

    Attributes:
        name: Its path, joined with dots.
        shape: Of the whole tensor.
        dtype: As PyTorch spells it, without "torch.".
        size_bytes: Of the whole tensor.
        pieces: How many it was written in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    pieces: int


@dataclass(frozen=True, kw_only=True)
class OptimizerSummary:
    """One optimizer.

    Attributes:
        name: Its name in the checkpoint.
        parameters: How many its groups hold.
        groups: How many there are.
        states: For each kind of state how many parameters have it.
        bytes_by_dtype: Of its state.
    """

    name: str
    parameters: int
    groups: int
    states: dict[str, int]
    bytes_by_dtype: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a checkpoint holds. Sizes in bytes.

    Attributes:
        path: As it was given.
        kind: "sharded directory", "full file" or "safetensors folder".
        epoch: `None` if it is not recorded.
        global_step: The same.
        versions: By program.
        writers: Ranks that wrote data; `None` where one process wrote the file.
        tensors: Of the model.
        elements: Of all of them.
        bytes_by_dtype: Of all of them.
        optimizers: In order.
        rest: Names of what Lightning saves besides the two.
        states: How many tensors of parameters lie beside the model, by key: averages.
        left_out: Names of everything else.
        largest: The largest tensors of model and optimizers.
    """

    path: str
    kind: str
    epoch: int | None = None
    global_step: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    writers: list[int] | None = None
    tensors: int = 0
    elements: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)
    optimizers: list[OptimizerSummary] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    largest: list[TensorSummary] = field(default_factory=list)


def summarize(path: Path, *, trust: bool = False, largest: int = 10) -> Summary:
    """Inspect a sharded directory or a file of `torch.save`; tensor data is not read.

    Args:
        path: Of the checkpoint.
        trust: Read Python objects that `torch.load` refuses by default.
        largest: How many of the largest tensors are listed.

    Raises:
        CheckpointError: It cannot be read, or files are missing.
    """
    opened = open_checkpoint(path, trust=trust)
    versions, others = {}, list(opened.rest)
    if LIGHTNING_VERSION in opened.rest:
        versions["lightning"] = str(opened.rest[LIGHTNING_VERSION])
        others.remove(LIGHTNING_VERSION)
    writers = None
    if opened.metadata is not None:
        if problems := list(file_problems(LocalLocation(path).sizes(), sizes_needed(opened.metadata)).values()):
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"{path} is incomplete: {'; '.join(problems[:8])}{more}. Copy files from where they were written, or use another checkpoint"
            )
        files = {str(item.relative_path) for item in (opened.metadata.storage_data or {}).values()}
        writers = sorted({int(match[1]) for file in files if (match := _WRITER.fullmatch(file))})
        if opened.metadata.version:
            versions["torch.distributed.checkpoint"] = str(opened.metadata.version)
    return replace(
        summarize_leaves(path, opened.leaves, largest=largest),
        kind=opened.kind,
        epoch=opened.rest.get("epoch"),
        global_step=opened.rest.get("global_step"),
        versions=versions,
        writers=writers,
        rest=others,
    )


def summarize_leaves(path: Path, leaves: Leaves, *, kind: str = "", largest: int = 10) -> Summary:
    """What can be derived from leaves alone. If no model can be distinguished from other tensors, all tensors count as the model."""
    tensors = {flat_name(leaf_path): leaf for leaf_path, leaf in leaves.items() if is_tensor(leaf)}
    try:
        parts = find_parts(path, leaves)
    except CheckpointError:
        parts = CheckpointParts(model=tensors, optimizers=[], left_out=[])
    model = [leaf for leaf in parts.model.values() if is_tensor(leaf)]
    by_size = sorted(tensors.items(), key=lambda item: size_bytes(item[1]), reverse=True)
    return Summary(
        path=str(path),
        kind=kind,
        tensors=len(model),
        elements=sum(leaf.shape.numel() for leaf in model),
        bytes_by_dtype=_by_dtype(model),
        optimizers=[_optimizer(optimizer) for optimizer in parts.optimizers],
        states={key: len(state) for key, state in parts.states.items()},
        left_out=parts.left_out,
        largest=[
            TensorSummary(
                name=name,
                shape=tuple(leaf.shape),
                dtype=_dtype_name(leaf),
                size_bytes=size_bytes(leaf),
                pieces=leaf.pieces if isinstance(leaf, UnreadTensor) else 1,
            )
            for name, leaf in by_size[:largest]
        ],
    )


def _optimizer(optimizer: OptimizerPart) -> OptimizerSummary:
    leaves = [(key, leaf) for own in optimizer.state.values() for key, leaf in own.items()]
    return OptimizerSummary(
        name=optimizer.where,
        parameters=sum(len(group["params"]) for group in optimizer.groups),
        groups=len(optimizer.groups),
        states=dict(Counter(key for key, _ in leaves)),
        bytes_by_dtype=_by_dtype(leaf for _, leaf in leaves if is_tensor(leaf)),
    )


def _by_dtype(leaves: Iterable[TensorLeaf]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        sizes[_dtype_name(leaf)] += size_bytes(leaf)
    return dict(sizes)


def _dtype_name(leaf: TensorLeaf) -> str:
    return str(leaf.dtype).removeprefix("torch.")
