"""Opening a checkpoint: a directory of torch.distributed.checkpoint or a file of `torch.save` becomes leaves by path."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mfsdp.checkpoint.io.location import META_FILE, MODULE_VERSIONS, TIED_WEIGHTS
from lightning_mfsdp.checkpoint.io.stored import (
    TABLE_OF_CONTENTS,
    TRUSTING,
    CheckpointError,
    Leaves,
    NestedPath,
    StoredCheckpoint,
    first_line,
)
from lightning_mfsdp.checkpoint.io.unpickling import RefusedError, key_of, refusal, refused_class

__all__ = [
    "LIGHTNING_VERSION",
    "Opened",
    "check_is_file",
    "check_table_of_contents",
    "flat_name",
    "leaves_of_file",
    "load_file",
    "load_meta",
    "open_checkpoint",
    "state_dict_of",
]

LIGHTNING_VERSION = "pytorch-lightning_version"


def flat_name(path: NestedPath) -> str:
    """A path as one word, for messages."""
    return ".".join(map(str, path))


def check_is_file(path: Path) -> None:
    """Check that a file can be one of `torch.save`.

    Raises:
        CheckpointError: There is no file, or one of another format.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is nothing at that path; expected a checkpoint")
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise CheckpointError(
                f"{path} is no checkpoint: expected a directory with {TABLE_OF_CONTENTS}, a folder of .safetensors files, or a file of "
                "torch.save (PyTorch 1.6 or later)"
            )


def load_file(path: Path, *, trust: bool) -> Any:
    """Load what `torch.save` wrote, with tensors mapped and not read.

    Raises:
        CheckpointError: It is not such a file, is damaged, or holds Python objects and `trust` is not set.
    """
    check_is_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except pickle.UnpicklingError as error:
        refused = refused_class(error)
        with path.open("rb") as file:
            key = key_of(file, refused)
        raise RefusedError(refusal(f"{path}: {key}" if key else str(path), refused, TRUSTING)) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is a damaged file of torch.save ({type(error).__name__}: {first_line(error)}). Copy it again, or use another"
        ) from error


def load_meta(path: Path, *, trust: bool) -> dict[str, Any]:
    """What Lightning writes besides the tensors of a directory; empty if there is no such file.

    Raises:
        CheckpointError: As `load_file`, or it is not a dictionary.
    """
    file = path / META_FILE
    if not file.is_file():
        return {}
    meta = load_file(file, trust=trust)
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file}: expected a dictionary, as this strategy saves it, got {type(meta).__name__}")
    return meta


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An opened checkpoint.

    Attributes:
        leaves: Of model and optimizers.
        rest: What a Lightning checkpoint holds besides them; empty if Lightning did not write it.
        tied: Further names of tied weights, and the name that each is the same as, if the checkpoint records that.
        versions: Of the model's modules, by name; `None` if the checkpoint does not record them.
        metadata: Table of contents of a directory.
    """

    leaves: Leaves
    rest: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] | None = None
    metadata: Metadata | None = None


def check_table_of_contents(path: Path) -> None:
    """Check that a directory has a table of contents.

    Raises:
        CheckpointError: It has none.
    """
    if not (path / TABLE_OF_CONTENTS).is_file():
        raise CheckpointError(
            f"{path} is a directory without {TABLE_OF_CONTENTS}, so no checkpoint of torch.distributed.checkpoint; expected one, or a file "
            "of torch.save"
        )


def open_checkpoint(path: Path, *, trust: bool = False) -> Opened:
    """Open a directory of torch.distributed.checkpoint or a file of `torch.save`; tensor data is not read.

    Raises:
        CheckpointError: There is neither, or it cannot be read.
    """
    if path.is_dir():
        check_table_of_contents(path)
        stored = StoredCheckpoint(path, trust=trust)
        rest = load_meta(path, trust=trust)
        tied = rest.pop(TIED_WEIGHTS, {})
        versions = rest.pop(MODULE_VERSIONS, {}).get("model")
        return Opened(leaves=stored.leaves, rest=rest, tied=tied, versions=versions, metadata=stored.metadata)
    content = load_file(path, trust=trust)
    if not isinstance(content, Mapping) or LIGHTNING_VERSION not in content:
        return Opened(leaves=leaves_of_file(content))
    states = ("state_dict", "optimizer_states")
    return Opened(
        leaves=leaves_of_file({key: content[key] for key in states if key in content}),
        rest={key: value for key, value in content.items() if key not in states},
        versions=getattr(content.get("state_dict"), "_metadata", None),
    )


def state_dict_of(values: Mapping[str, Any], versions: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    """A state dict as modules return it, with the versions that a module of a newer program may look for."""
    made = OrderedDict(values)
    if versions is not None:
        made._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return made


def leaves_of_file(value: Any, path: NestedPath = ()) -> Leaves:
    """Leaves of nested dictionaries and lists. Lists without dictionaries and tensors are leaves themselves, as in a directory."""
    if isinstance(value, Mapping):
        return _merged(leaves_of_file(part, (*path, key)) for key, part in value.items())
    if isinstance(value, list) and any(isinstance(part, Mapping | list | Tensor) for part in value):
        return _merged(leaves_of_file(part, (*path, key)) for key, part in enumerate(value))
    return {path: value}


def _merged(parts: Iterator[Leaves]) -> Leaves:
    return {path: leaf for part in parts for path, leaf in part.items()}
