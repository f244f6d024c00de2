"""ParameterIndex: the parameters of a module by name, by memory and by what optimizers hold. One for each save or load.

A parameter is identified by its memory, never by its name: names in a state dict may have been changed by a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.engine import ParameterView, sharded_parameters
from lightning_mfsdp.engine.internals import Piece

__all__ = ["FullNames", "ParameterIndex", "plain_name"]

# Modules of these names wrap another one and have no state of their own: activation checkpointing and torch.compile.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """The name a parameter has without wrappers around its modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class FullNames:
    """Names of a state dict with the wrappers that they have there, by the plain ones."""

    def __init__(self, names: Iterable[str]) -> None:
        self._full: dict[str, str] = {}
        self._parents: dict[str, str] = {}
        for name in names:
            self._full[plain_name(name)] = name
            parent = name.rpartition(".")[0]
            while parent:
                self._parents.setdefault(plain_name(parent), parent)
                parent = parent.rpartition(".")[0]

    def __getitem__(self, name: str) -> str:
        """That of a plain name; of one that is not there, such as a former one, with the wrappers of the modules that are."""
        if name in self._full:
            return self._full[name]
        parent, rest = name, ""
        while parent:
            parent, _, last = parent.rpartition(".")
            rest = f".{last}{rest}"
            if parent in self._parents:
                return self._parents[parent] + rest
        return name


class ParameterIndex:
    """Finds the sharded parameter behind a name or behind memory, or the name of what an optimizer holds. Names are plain.

    It is created once for an operation (a save, a load) and passed on. Parameters that are added to the module later are not in it.

    Attributes:
        module: The module of these parameters.
        all: The sharded ones, once each, in module order.
        views: The same by every plain name they have.
        others: Parameters that are not sharded, each with its first full name, by the plain one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.all = sharded_parameters(module)
        by_identity = {id(view.dtensor): view for view in self.all}
        self.views: dict[str, ParameterView] = {}
        self.others: dict[str, tuple[str, Tensor]] = {}
        self._names: dict[int, str] = {
            id(tensor): plain_name(view.name) for view in self.all for tensor in (view.dtensor, view.local)
        }
        self._by_memory = {view.main.data_ptr(): view for view in self.all if view.main.numel()}
        self._meshes = {view.dtensor.device_mesh for view in self.all if isinstance(view.dtensor, DTensor)}
        named = list(module.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            if id(parameter) not in self._names:
                self._names[id(parameter)] = plain_name(name)
                self.others[plain_name(name)] = (name, parameter)
        # A module registered twice shows its parameters under names that nothing else lists, and hooks may rename.
        in_state_dict = nn.Module.state_dict(module, keep_vars=True).items()
        for name, parameter in (*named, *in_state_dict):
            self._names.setdefault(id(parameter), plain_name(name))
            if id(parameter) in by_identity:
                self.views[plain_name(name)] = by_identity[id(parameter)]

    def rows_of(self, value: Any) -> Any:
        """What is saved of an entry of a state dict: sharded parameters as their rows, everything else unchanged.

        Returns:
            `None` for a tensor that was computed from a sharded parameter: its rows are not where a DTensor's would be.
        """
        if not isinstance(value, DTensor) or value.device_mesh not in self._meshes:
            return value
        local = value.to_local().detach()
        view = self._by_memory.get(local.data_ptr()) if local.numel() else None
        if (
            view is not None
            and view.shape == value.shape
            and view.main.shape == local.shape
            and view.dtype == local.dtype
        ):
            return DcpShard.of(view.main, view.piece)
        if not any(placement.is_shard() for placement in value.placements):
            return value
        # Of a tensor without rows here nothing is written or read, whatever it is.
        return None if local.numel() else DcpShard.of(local, Piece(shape=value.shape, rows=range(0)))

    def name_of(self, parameter: Tensor) -> str:
        """Name of a parameter an optimizer holds.

        Raises:
            ValueError: It is not part of the module.
        """
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the module; its state cannot be saved or "
                "restored by name. Build optimizers from parameters of the LightningModule, or of the module that is saved along with them"
            )
        return name

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether all that an optimizer holds is part of the module."""
        return all(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"])

    def names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        """Parameter names of each param_group, in order."""
        return [[self.name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
