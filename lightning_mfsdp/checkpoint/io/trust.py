"""Reading pickles from untrusted sources: nothing in them runs unless the user allows it.

`torch.load` refuses unknown classes by itself, with `weights_only=True`. `torch.distributed.checkpoint` does not use that: it reads the
table of contents with `pickle`, and objects other than tensors with `weights_only=False`. Here both are read as by `torch.load`:
None and True are safe, False is the user's decision, and what `torch.serialization.add_safe_globals` allows is allowed.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from typing_extensions import override

__all__ = [
    "WEIGHTS_ONLY",
    "CheckpointError",
    "RefusedError",
    "is_trusted",
    "key_of",
    "not_read",
    "read_table",
    "refusal",
    "refused_class",
]

# How a caller of load functions declares trust in a checkpoint; commands have an option.
_LOADERS = "Trainer.fit, validate, test or predict, Fabric.load, export_checkpoint"
WEIGHTS_ONLY = f"pass weights_only=False to what loads it ({_LOADERS}), or --trust to a command"

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES = f"{_METADATA}.TensorProperties"
# Of plain data, as the table of contents has it in any version of PyTorch that wrote one.
_RECORDS = {
    f"{_METADATA}.BytesStorageMetadata",
    f"{_METADATA}.ChunkStorageMetadata",
    f"{_METADATA}.Metadata",
    f"{_METADATA}.MetadataIndex",
    f"{_METADATA}.StorageMeta",
    f"{_METADATA}.TensorStorageMetadata",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    f"{_OLD_METADATA}.TensorProperties",
}
_MEMORY_FORMATS = (f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_OLD_METADATA}.MEM_FORMAT_ENCODING")
_PLAIN: dict[str, Any] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
}
# A table may record where it was written. That need not be a path of this system.
_PATHS: dict[str, type[PurePath]] = {
    f"{module}.{name}": kind
    for module in ("pathlib", "pathlib._local")
    for name, kind in {
        "Path": PurePath,
        "PurePath": PurePath,
        "PosixPath": PurePosixPath,
        "PurePosixPath": PurePosixPath,
        "WindowsPath": PureWindowsPath,
        "PureWindowsPath": PureWindowsPath,
    }.items()
}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or cannot be mapped to what was requested."""


class RefusedError(CheckpointError):
    """A pickle holds a class that is not loaded unless allowed; the message names it."""


def is_trusted(weights_only: bool | None) -> bool:
    """Whether any class may be loaded. As in `torch.load`, environment variables decide if no argument does."""
    if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return False
    return _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if weights_only is None else not weights_only


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "y", "yes", "true")


def refusal(what: str, name: str, trusting: str) -> str:
    """The message: what holds which class, and both ways out."""
    return (
        f"{what} holds {name}, which is not loaded by default, because a class from a file can run code. If you trust that class, allow "
        f"it with torch.serialization.add_safe_globals([{name}]); if you trust the author of the checkpoint, {trusting}"
    )


def not_read(place: object, reason: object) -> str:
    """The message for a checkpoint that was refused before anything was read from it."""
    return f"{place} was not read: {reason}"


def refused_class(error: BaseException) -> str:
    """Which class `torch.load` refused, by its message; otherwise how the message begins."""
    text = str(error)
    named = re.search(r"GLOBAL ([\w.]+) (?:was not|whose)|but got <class '([\w.]+)'>", text)
    if named is not None:
        return named[1] or named[2]
    return f"something that torch.load refuses ({(text.splitlines() or [''])[0]})"


# -- the table of contents ---------------------------------------------------------------------------------------------


def read_table(file: IO[bytes], what: str, *, trusted: bool, trusting: str = WEIGHTS_ONLY) -> Metadata:
    """The table of contents of a directory, `.metadata`.

    Args:
        file: A pickle.
        what: Names it in messages.
        trusted: Also load classes that a table does not need.
        trusting: In the message, how to trust it.

    Raises:
        RefusedError: It holds such a class.
        ValueError: It is something else, or names files outside of the directory.
    """
    reader = _TrustingUnpickler(file) if trusted else _TableUnpickler(file, what, trusting)
    table = reader.load()
    if not isinstance(table, Metadata):
        raise ValueError(
            f"{what} holds {type(table).__name__}, expected a table of contents; do not use this checkpoint"
        )
    for name in {str(item.relative_path) for item in (table.storage_data or {}).values()}:
        if name in ("", ".", "..") or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise ValueError(
                f"{what} names the file {name!r}, expected the name of a file of the directory; do not use this checkpoint"
            )
    return table


class _Properties(TensorProperties):
    """Reads what any version of PyTorch wrote: fields are only ever added at the end (`strides` in 2.15), and none of those is needed."""

    @override
    def __setstate__(self, state: Any) -> None:
        """Become what this version of PyTorch has, with the fields that it knows."""
        num_fields = len(TensorProperties().__getstate__())
        super().__setstate__(tuple(state)[:num_fields])
        object.__setattr__(self, "__class__", TensorProperties)  # so that it is written as one again


class _TrustingUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        return _Properties if f"{module}.{name}" == _PROPERTIES else super().find_class(module, name)


class _TableUnpickler(pickle.Unpickler):
    """Accepts only plain data and the records of a table of contents."""

    def __init__(self, file: IO[bytes], what: str, trusting: str) -> None:
        super().__init__(file)
        self._what, self._trusting = what, trusting

    @override
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == _PROPERTIES:
            return _maker(_Properties)
        if path in _RECORDS:
            return _maker(super().find_class(module, name))
        if path in _MEMORY_FORMATS:
            return _caller(super().find_class(module, name))
        if path in _PLAIN:
            return _PLAIN[path]
        if path in _PATHS:
            return _caller(_PATHS[path])
        if path == "builtins.getattr":  # of a memory format, in some versions of Python
            return _memory_format
        if path == "torch.serialization._get_layout":
            return _layout
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        for entry in torch.serialization.get_safe_globals():  # what the user has allowed
            kind, kind_path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
            if kind_path == path:
                return kind
        raise RefusedError(refusal(self._what, path, self._trusting))


class _Sealed(type):
    """Metaclass of classes that a pickle can only instantiate: nothing in it can change them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise RefusedError(
            f"a table of contents would set {name} of the class {cls.__name__}; do not use this checkpoint"
        )


def _maker(kind: type) -> type:
    """Stands for `kind` in a pickle."""
    return _Sealed(kind.__name__, (), {"__new__": lambda cls, *args: kind.__new__(kind, *args)})


def _caller(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for `kind` in a pickle that calls it: what the pickle would set is set on this function."""
    return lambda *args: kind(*args)


def _memory_format(_: Any, name: str) -> Any:
    for path in _MEMORY_FORMATS:
        module, _, kind_name = path.rpartition(".")
        kind = getattr(import_module(module), kind_name, None)
        if kind is not None and name in kind.__members__:
            return kind[name]
    raise ValueError(f"a table of contents holds the unknown memory format {name!r}; do not use this checkpoint")


def _layout(name: str) -> Any:
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.layout):
        raise ValueError(f"a table of contents holds the unknown layout {name!r}; do not use this checkpoint")
    return value


# -- where in a file a class is ----------------------------------------------------------------------------------------


def key_of(file: IO[bytes], name: str) -> str:
    """Under which keys of a dictionary from `torch.save` a class occurs first, joined with dots; empty if that cannot be determined.

    Nothing in the file runs: every class in it is replaced by one that only stores its name.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            inner = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
            with archive.open(inner) as pickled:
                outline = _OutlineUnpickler(pickled).load()
    except Exception:  # the file was refused already, and this only adds a detail to the message
        return ""
    return next((".".join(keys) for keys, path in _walk(outline, (), set()) if path == name), "")


class _Named:
    """Any object of a class that is not loaded."""

    path = ""
    parts: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> _Named:
        stand_in = super().__new__(cls)
        stand_in.parts = [args, kwargs]
        return stand_in

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def append(self, value: Any) -> None:
        """As of a list."""
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        """As of a list."""
        self.parts.extend(values)


class _OutlineUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        return _PLAIN.get(path) or type(name, (_Named,), {"path": path})

    @override
    def persistent_load(self, pid: Any) -> None:
        return None


def _walk(value: Any, keys: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys that lead to each class in an outline, and the class."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type) and issubclass(value, _Named):
        yield keys, value.path
    elif isinstance(value, _Named):
        yield keys, value.path
        yield from _walk(value.parts, keys, seen)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _walk(key, keys, seen)
            yield from _walk(part, (*keys, str(key)), seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _walk(part, keys, seen)
