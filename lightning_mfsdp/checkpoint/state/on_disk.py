"""What a sharded directory holds, as the dictionaries that one file would hold. Names and shapes are known; tensors are read on request.

    state_dict          {name: TensorOnDisk}, in the order of the save, with the versions of modules that `load_state_dict` looks for
    optimizer_states    [{"state": {name: {state name: TensorOnDisk}}, "param_groups": [...]}]

Programs may delete, rename, replace, compute with and write into entries. What they leave untouched is read straight into shards.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.engine.internals import Piece

__all__ = ["Reads", "StoredOptimizer", "StoredState", "TensorOnDisk", "UnreadObject", "tensors_under"]


class TensorOnDisk(StandIn):
    """A tensor in a checkpoint. The first computation with it reads all of it, on this rank alone; what is written into it is loaded."""

    _directory: Directory
    _name: str
    _whole: Tensor | None

    @classmethod
    def of(cls, directory: Directory, name: str) -> TensorOnDisk | None:
        """That of a flat name; `None` for other objects."""
        entry = directory.entry(name)
        if entry is None:
            return None
        tensor: TensorOnDisk = cls.shaped(*entry)
        tensor._directory, tensor._name, tensor._whole = directory, name, None
        return tensor

    def rows(self, rows: range, ranks: Ranks) -> Tensor:
        """Some rows of it, on the CPU. All of `ranks` call it, each for rows of its own."""
        part = torch.empty(len(rows), *self.shape[1:], dtype=self.dtype, device="cpu")
        self._directory.read_rows(self._name, DcpShard.of(part, Piece(shape=self.shape, rows=rows)), ranks)
        return part

    @property
    def is_read(self) -> bool:
        """Whether something computed with it, and may have changed it."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """All of it, on the CPU."""
        if self._whole is None:
            self._whole = self._directory.values([self._name])[self._name]
        assert self._whole is not None
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.copy_ and isinstance(args[0], DTensor) and isinstance(args[1], TensorOnDisk):
            target, source = args[0], args[1]
            if not source.is_read and target.shape == source.shape:
                # Shards need no more than their rows.
                rows = torch.empty_like(target.detach(), dtype=source.dtype)
                source._directory.read_rows(source._name, rows)
                return target.copy_(rows, **kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def tensors_under(directory: Directory, key: str) -> dict[str, Tensor]:
    """The tensors of a directory that lie right under `key`, by name."""
    tensors = {
        str(path[0]): TensorOnDisk.of(directory, flat) for flat, path in directory.paths(key).items() if len(path) == 1
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True)
class UnreadObject:
    """A value that is no tensor, under a name that the model does not know."""

    directory: Directory
    paths: dict[str, tuple[Any, ...]]

    def read(self) -> Any:
        """The value, whose leaves have these paths."""
        holder: dict[Any, Any] = {}
        for flat, value in self.directory.values(self.paths).items():
            _place(holder, ("value", *self.paths[flat]), value)
        return holder["value"]


class Reads:
    """What is to be read from a checkpoint, and where to.

    Args:
        directory: `None` for a checkpoint in one file, whose tensors are mapped into memory.
    """

    def __init__(self, directory: Directory | None) -> None:
        self._directory = directory
        self._rounds: list[dict[str, Any]] = []

    def takes(self, value: Any) -> TypeGuard[TensorOnDisk]:
        """Whether a tensor is to be read from the directory, and nothing may have changed it."""
        return isinstance(value, TensorOnDisk) and not value.is_read and value._directory is self._directory

    def add(self, source: TensorOnDisk, target: Tensor) -> None:
        """Read this tensor, or a `DcpShard` of it."""
        name = source._name
        free = next((targets for targets in self._rounds if name not in targets), None)
        if free is None:  # the first, or of a tensor that is loaded under several names
            self._rounds.append({name: target})
        else:
            free[name] = target

    def run(self, progress: Progress | None) -> None:
        """Read everything. All ranks call it; what each of them reads may differ."""
        if self._directory is None:
            return
        for number in range(Ranks().decide(len(self._rounds), max)):
            self._directory.read(self._rounds[number] if number < len(self._rounds) else {}, progress)


class StoredState(OrderedDict[str, Any]):
    """A state dict of a checkpoint. A name that it lacks is an error that says which ones there are."""

    _metadata: dict[str, Any]

    def __init__(self, items: Any = (), /, *, where: str = "the checkpoint") -> None:
        super().__init__(items)  # as other dictionaries take them: `copy` and `|` call it
        self._where = where

    @classmethod
    def of(cls, directory: Directory, key: str, is_known: Callable[[str], bool]) -> StoredState:
        """The tensors under `key`.

        Args:
            directory: That holds them.
            key: Their parent.
            is_known: Whether the model has an entry of a name: its value is read now if it is no tensor.
        """
        by_name: dict[str, dict[str, tuple[Any, ...]]] = {}
        for flat, path in directory.paths(key).items():
            by_name.setdefault(str(path[0]), {})[flat] = path[1:]
        state = cls(where=f"{directory.location}: its {key}")
        for name, parts in by_name.items():
            first = next(iter(parts))
            tensor = TensorOnDisk.of(directory, first) if not parts[first] else None
            if tensor is not None:
                state[name] = tensor
            else:
                value = UnreadObject(directory, parts)
                state[name] = value.read() if is_known(name) else value
        return state

    def __reduce__(self) -> Any:
        versions = {key: value for key, value in vars(self).items() if key == "_metadata"}
        return OrderedDict, (list(self.items()),), versions

    def __missing__(self, name: Any) -> NoReturn:
        raise KeyError(self._missing(name))

    def __delitem__(self, name: Any) -> None:
        if name not in self:
            raise KeyError(self._missing(name))
        super().__delitem__(name)

    def pop(self, name: Any, *default: Any) -> Any:
        """As of a dict."""
        if name not in self and not default:
            raise KeyError(self._missing(name))
        return super().pop(name, *default)

    def _missing(self, name: Any) -> str:
        close = ", ".join(difflib.get_close_matches(str(name), list(self), 3, 0.5) or list(self)[:3])
        if isinstance(name, int):
            return f"{self._where} goes by parameter name, not by number; use one of its {len(self)} names, such as {close}"
        return f"{self._where} has no {name!r}; use one of its {len(self)} names, such as {close}"


class StoredOptimizer(MutableMapping[str, Any]):
    """State of an optimizer: "state" by parameter name and "param_groups", made when one of them is asked for."""

    def __init__(self, directory: Directory, key: str) -> None:
        self._directory = directory
        self._key = key
        self._content: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._read()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> dict[str, Any]:
        """Small values now, tensors of parameters when they are asked for."""
        if self._content is not None:
            return self._content
        directory = self._directory
        paths = directory.paths(self._key)
        values: dict[str, Any] = {
            flat: tensor
            for flat, path in paths.items()
            if path[0] == "state" and (tensor := TensorOnDisk.of(directory, flat)) is not None
        }
        values.update(directory.values([flat for flat in paths if flat not in values]))
        state = StoredState(where=f"{directory.location}: the state of {self._key}")
        groups: dict[int, dict[str, Any]] = {}
        for flat, path in paths.items():
            if path[0] == "param_groups":
                _place(groups.setdefault(int(path[1]), {}), path[2:], values[flat])
            elif len(path) > 2:
                _place(state.setdefault(str(path[1]), {}), path[2:], values[flat])
        self._content = {"state": state, "param_groups": [groups[number] for number in sorted(groups)]}
        return self._content


def _place(values: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Put the value of one flat key of a checkpoint back in its place: state may be lists of tensors (LBFGS)."""
    inside: Any = values
    for key, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(inside, list):
            inside += [None] * (key + 1 - len(inside))
            inside[key] = empty if inside[key] is None else inside[key]
            inside = inside[key]
        else:
            inside = inside.setdefault(key, empty)
    if isinstance(inside, list):
        inside += [None] * (path[-1] + 1 - len(inside))
    inside[path[-1]] = value
