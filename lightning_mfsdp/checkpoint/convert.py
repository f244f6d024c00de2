"""Checkpoints of other programs become directories of this one, and directories become single files. Memory holds one piece at a time."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_mfsdp.checkpoint.files import META_FILE, part_of, put_in_place, remove
from lightning_mfsdp.checkpoint.opened import (
    LIGHTNING_VERSION,
)
from lightning_mfsdp.checkpoint.portable import (
    Portable,
    PortableOptimizer,
    Source,
    read_portable,
    value_of,
)
from lightning_mfsdp.checkpoint.stored import (
    CheckpointError,
    StoredTensor,
    is_tensor,
    size_bytes,
)

__all__ = ["Progress", "consolidate_checkpoint", "convert_checkpoint"]

Progress = Callable[[int, int], None]
"""Told of the bytes that are done, and of all."""


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
) -> Portable:
    """Write a checkpoint of another program as a directory that `Trainer.fit(ckpt_path=...)` reads with this strategy.

    Args:
        path: What to convert.
        output: A free path. It is there once everything was written.
        source: Who wrote it; see `read_portable`, also for the next five.
        model_key: Where the model is.
        parameters: Names for numbers.
        strip_prefix: Taken from names.
        add_prefix: Put before names.
        trust: Read Python objects.
        progress: Called after each piece.

    Returns:
        What was written, and what was left out.

    Raises:
        CheckpointError: `path` cannot be read or mapped.
        FileExistsError: `output` is there already.
    """
    _refuse_taken(output)
    parts = read_portable(
        path,
        source=source,
        model_key=model_key,
        parameters=parameters,
        strip_prefix=strip_prefix,
        add_prefix=add_prefix,
        trust=trust,
    )
    state: dict[str, Any] = {"model": {name: _unread(leaf) for name, leaf in parts.model.items()}}
    for number, optimizer in enumerate(parts.optimizers):
        values = {name: {key: _unread(leaf) for key, leaf in own.items()} for name, own in optimizer.state.items()}
        state[f"optimizer_{number}"] = {"state": values, "param_groups": optimizer.groups}
    part = part_of(output)
    remove(part)
    part.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            # It says that it assumes one process, which is what it was told.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            planner = _ReadingPlanner(progress, _total_bytes(parts))
            dcp_save(state, storage_writer=FileSystemWriter(part), planner=planner, no_dist=True)
        torch.save(_completed(parts.rest), part / META_FILE)
        put_in_place(output)
    except BaseException:
        remove(part)
        raise
    return parts


def consolidate_checkpoint(
    path: Path, output: Path, *, trust: bool = False, progress: Progress | None = None
) -> Portable:
    """Write a sharded directory as one file, as training without sharding would have.

    Tensors are put together in files beside `output`, so the disk needs room for them twice, and memory for the largest chunk.

    Args:
        path: A directory that this strategy wrote, or another that `read_portable` understands.
        output: A free path. It is there once everything was written.
        trust: Read Python objects that `torch.load` refuses by default.
        progress: Called after each piece.

    Returns:
        What was written, and what was left out.

    Raises:
        CheckpointError: `path` is a file, or cannot be read or mapped.
        FileExistsError: `output` is there already.
    """
    _refuse_taken(output)
    if path.is_file():
        raise CheckpointError(f"{path} is a single file already; expected a sharded directory")
    parts = read_portable(path, trust=trust)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(output)
    scratch = Path(tempfile.mkdtemp(prefix=f"{output.name}.", dir=output.parent))
    try:
        assembly = _Assembly(scratch, progress, _total_bytes(parts))
        checkpoint = {
            **_completed(parts.rest),
            "state_dict": {name: assembly.whole(leaf) for name, leaf in parts.model.items()},
        }
        if parts.optimizers:
            checkpoint["optimizer_states"] = [_numbered(optimizer, assembly) for optimizer in parts.optimizers]
        torch.save(checkpoint, part)
        put_in_place(output)
    finally:
        remove(part)
        shutil.rmtree(scratch)
    return parts


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each chunk of a stored tensor when it is its turn to be written."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        super().__init__()
        self._progress, self._done, self._total = progress, 0, total

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if isinstance(found, StoredTensor):
            assert index.offset is not None, "chunks of tensors have a place"
            found = found.read(index.offset)
        if isinstance(found, Tensor):
            self._done += found.numel() * found.element_size()
            if self._progress is not None:
                self._progress(self._done, self._total)
        return found


class _Assembly:
    """Puts tensors together in memory that is backed by files, so that the system can write it out and forget it."""

    def __init__(self, folder: Path, progress: Progress | None, total: int) -> None:
        self._folder, self._progress, self._done, self._total, self._count = folder, progress, 0, total, 0

    def whole(self, leaf: Any) -> Any:
        """The tensor, `[*shape]`; other leaves as values."""
        if not isinstance(leaf, StoredTensor):
            return value_of(leaf)
        tensor = self._empty(leaf)
        for done in leaf.read_into(tensor):
            self._done += done
            if self._progress is not None:
                self._progress(self._done, self._total)
        return tensor

    def _empty(self, leaf: StoredTensor) -> Tensor:
        if not size_bytes(leaf):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        self._count += 1
        file = self._folder / str(self._count)
        storage: Any = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=size_bytes(leaf))
        return torch.empty(0, dtype=leaf.dtype).set_(storage).view(leaf.shape)


def _numbered(optimizer: PortableOptimizer, assembly: _Assembly) -> dict[str, Any]:
    """As `Optimizer.state_dict()` has it: parameters counted through all groups."""
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.groups:
        numbers.update({name: len(numbers) + place for place, name in enumerate(group["params"])})
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    state = {
        numbers[name]: {key: assembly.whole(leaf) for key, leaf in optimizer.state[name].items()}
        for name in numbers
        if name in optimizer.state
    }
    return {"state": state, "param_groups": groups}


def _completed(rest: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer needs to begin; counts and schedules start afresh where Lightning did not write the checkpoint."""
    if LIGHTNING_VERSION in rest:
        return rest
    return {**rest, LIGHTNING_VERSION: version("lightning"), "epoch": 0, "global_step": 0, "lr_schedulers": []}


def _unread(leaf: Any) -> Any:
    """Tensors as they are, other leaves as values."""
    return leaf if is_tensor(leaf) else value_of(leaf)


def _total_bytes(parts: Portable) -> int:
    states = (leaf for optimizer in parts.optimizers for own in optimizer.state.values() for leaf in own.values())
    return sum(size_bytes(leaf) for leaf in (*parts.model.values(), *states) if is_tensor(leaf))


def _refuse_taken(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise FileExistsError(f"{output} is there already; choose a free path")
