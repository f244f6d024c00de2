"""Converts checkpoints of other programs to directories of this one, and directories to single files, in bounded memory."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.local import part_of, put_in_place, remove
from lightning_mfsdp.checkpoint.io.location import META_FILE, MODULE_VERSIONS, TIED_WEIGHTS, beside
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.io.write import Writer
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES
from lightning_mfsdp.checkpoint.state.rank_states import RankStates
from lightning_mfsdp.checkpoint.tools.leaves import (
    LIGHTNING_VERSION,
    ChunkedTensor,
    is_tensor,
    size_bytes,
    state_dict_of,
)
from lightning_mfsdp.checkpoint.tools.parts import CheckpointParts, Source, read_parts, value_of

__all__ = ["consolidate_checkpoint", "convert_checkpoint"]


def convert_checkpoint(
    path: Path,
    output: Path,
    *,
    source: Source = "auto",
    model_key: str | None = None,
    parameters: Sequence[str] | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    trust: bool = False,
    progress: Progress | None = None,
) -> CheckpointParts:
    """Write a checkpoint of another program as a directory that `Trainer.fit(ckpt_path=...)` reads with this strategy.

    Args:
        path: What to convert.
        output: A free path. It exists once everything was written.
        source: The program that wrote it; see `read_parts`, also for the next five.
        model_key: Where the model is.
        parameters: Names for numbers.
        strip_prefix: Removed from names.
        add_prefix: Prepended to names.
        trust: Read Python objects.
        progress: Called after each piece.

    Returns:
        What was written, and what was left out.

    Raises:
        CheckpointError: `path` cannot be read or mapped, or `output` not be written.
        FileExistsError: `output` exists already.
    """
    _refuse_taken(output)
    parts = read_parts(
        path,
        source=source,
        model_key=model_key,
        parameters=parameters,
        strip_prefix=strip_prefix,
        add_prefix=add_prefix,
        trust=trust,
    )
    state: dict[str, Any] = {"model": {name: _unread(leaf) for name, leaf in parts.model.items()}}
    state |= parts.states_by(_unread)
    for number, optimizer in enumerate(parts.optimizers):
        values = {name: {key: _unread(leaf) for key, leaf in own.items()} for name, own in optimizer.state.items()}
        state[f"optimizer_{number}"] = {"state": values, "param_groups": optimizer.groups}
    part = part_of(output)
    remove(part)
    part.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            # It warns that it assumes one process, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            planner = _ReadingPlanner(progress, _total_bytes(parts))
            dcp_save(state, storage_writer=_SmallFilesWriter(part), planner=planner, no_dist=True)
        tied = {TIED_WEIGHTS: parts.tied} if parts.tied and not (strip_prefix or add_prefix) else {}
        versions = {MODULE_VERSIONS: {"model": dict(parts.versions)}} if parts.versions is not None else {}
        torch.save({**_completed(parts.rest), **tied, **versions}, part / META_FILE)
        put_in_place(output)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # one for each rank, and there is one
        raise CheckpointError(f"{output} was not written ({type(cause).__name__}): {cause}") from cause
    finally:
        remove(part)
    return parts


def consolidate_checkpoint(
    path: Path, output: Path, *, trust: bool = False, progress: Progress | None = None
) -> CheckpointParts:
    """Write a sharded directory as one file, as training without sharding would have.

    Tensors are assembled in files next to `output`, so the disk needs room for them twice, and memory for the largest chunk.

    Args:
        path: A directory that this strategy wrote, or another that `read_parts` supports.
        output: A free path. It exists once everything was written.
        trust: Read Python objects that `torch.load` refuses by default.
        progress: Called after each piece.

    Returns:
        What was written, and what was left out.

    Raises:
        CheckpointError: `path` is a file, or cannot be read or mapped.
        FileExistsError: `output` exists already.
    """
    _refuse_taken(output)
    if path.is_file():
        raise CheckpointError(f"{path} is a single file already; expected a sharded directory")
    parts = read_parts(path, trust=trust)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(output)
    scratch = Path(tempfile.mkdtemp(prefix=f"{beside(output.name, 'scratch')}-", dir=output.parent))
    try:
        assembly = _Assembly(scratch)
        full = {name: assembly.full(leaf) for name, leaf in parts.model.items() if name not in parts.tied}
        state = state_dict_of({name: full[parts.tied.get(name, name)] for name in parts.model}, parts.versions)
        checkpoint = {**_completed(parts.rest), "state_dict": state}
        if parts.optimizers:
            checkpoint["optimizer_states"] = [optimizer.by_number(assembly.full) for optimizer in parts.optimizers]
        if parts.states:
            checkpoint[PARAMETER_STATES] = parts.states_by(assembly.full)
        assembly.fill(progress)
        with part.open("wb") as file:  # by a path it would name the archive after it, which cannot begin with a dot
            torch.save(checkpoint, file)
        put_in_place(output)
    finally:
        remove(part)
        shutil.rmtree(scratch)
    return parts


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each chunk of a stored tensor when it is its turn to be written."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        super().__init__()
        self._read = ByteCount(progress, total)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, ChunkedTensor):
            assert index.offset is not None, "chunks of tensors have a place"
            value = value.read(index.offset)
        if isinstance(value, Tensor):
            self._read.add(value.nbytes)
        return value


class _SmallFilesWriter(Writer):
    file_bytes = 256 * 2**20


class _Assembly:
    """Assembles tensors in memory that is backed by files, so that the system can write it out and evict it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: list[tuple[ChunkedTensor, Tensor]] = []

    def full(self, leaf: Any) -> Any:
        """The tensor, `[*shape]`, to be filled in; other leaves as values."""
        if not isinstance(leaf, ChunkedTensor):
            return value_of(leaf)
        tensor = torch.empty(0, dtype=leaf.dtype, device="cpu")
        if size_bytes(leaf):
            file = self._folder / str(len(self._tensors))
            storage: Any = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=size_bytes(leaf))
            tensor.set_(storage)
        self._tensors.append((leaf, tensor.view(leaf.shape)))
        return self._tensors[-1][1]

    def fill(self, progress: Progress | None) -> None:
        """Read all of them. Nothing that stays is allocated meanwhile, so the allocator can use the memory of one piece for the next."""
        read = ByteCount(progress, sum(size_bytes(leaf) for leaf, _ in self._tensors))
        for leaf, tensor in self._tensors:
            for num_bytes in leaf.read_into(tensor):
                read.add(num_bytes)


def _completed(rest: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer needs to start; counts and schedules start from zero if Lightning did not write the checkpoint."""
    rest = {key: list(value) if isinstance(value, RankStates) else value for key, value in rest.items()}
    if LIGHTNING_VERSION in rest:
        return rest
    return {**rest, LIGHTNING_VERSION: version("lightning"), "epoch": 0, "global_step": 0, "lr_schedulers": []}


def _unread(leaf: Any) -> Any:
    """Tensors unchanged, other leaves as values."""
    return leaf if is_tensor(leaf) else value_of(leaf)


def _total_bytes(parts: CheckpointParts) -> int:
    states = [leaf for optimizer in parts.optimizers for own in optimizer.state.values() for leaf in own.values()]
    states += [leaf for values in parts.states.values() for leaf in values.values()]
    return sum(size_bytes(leaf) for leaf in (*parts.model.values(), *states) if is_tensor(leaf))


def _refuse_taken(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise FileExistsError(f"{output} is there already; choose a free path")
