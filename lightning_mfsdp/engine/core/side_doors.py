"""Side doors: what a unit's forward computes and leaves elsewhere than in its result, such as a feature that a hook keeps or a penalty.

A backward that begins there touches no result of the unit, so no hook of the unit gathers its weights again (call.py). `SideDoors` looks
whether there is one, and `Following` packs what autograd saves in the forwards of such a unit: a weight as its place in the unit, and it is
gathered again where a backward reads it.

Packing takes about 5 us for each tensor that is saved, activations too, so it is done where the look has found something or the user asks
for it. Everywhere else a backward that reads a resharded weight raises (versions.py).

Alternatives considered: weights of such a unit stay unsharded until the backward (the memory of all of them, where each block keeps a
penalty; the first forward does so, when a side door is found after it); `torch.autograd.graph.node_creation_hook`, with a prehook on each
node (torch 2.14, and 2.5 times the time).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.call import is_unit

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.unit import Unit
    from lightning_mfsdp.engine.core.versions import Place
    from lightning_mfsdp.engine.core.weights import Weights

__all__ = ["Choice", "SideDoors", "follow"]

Choice = Literal["find", "follow", "raise"]


class SideDoors:
    """What a forward may leave beside its result, by which a backward comes that touches no result: attributes with a graph, and hooks.

    The looks are cheap, some ten calls a unit: what came since shows in the lengths of tables, and of the attributes that were there before
    the few are looked at that hold nothing yet, a tensor or a container. Hooks of the unit's own modules get no more than results. What
    code keeps elsewhere is not seen.

    Attributes:
        choice: What to do about one: as `fully_shard` has it.
        found: There is one. It counts for good.
    """

    __slots__ = ("_hooks", "_lengths", "_num_hooks", "_open", "_own", "_tables", "choice", "found")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.found = choice == "follow"
        self._hooks: list[dict[Any, Any]] = []  # tables of hooks of the modules inside
        self._num_hooks: list[int] = []  # of each module inside, when they were looked at
        self._tables: list[dict[str, Any]] = []  # attributes of the modules inside
        self._own: list[weakref.ref[nn.Module]] = []  # the unit's; not their tables: these hold the unit, and it this
        self._lengths: list[int] = []  # of the tables of attributes, when these were noted
        self._open: list[tuple[int, str, object]] = []  # table, name, and what it held before the forward

    def _look_at_modules(self, modules: Sequence[nn.Module]) -> None:
        """Before the first forward in grad mode, when modules are complete."""
        inside = [child for module in modules for child in _modules_of_own(module)]
        self._hooks = [hooks for child in inside for hooks in (child._forward_hooks, child._forward_pre_hooks)]
        self._num_hooks = list(map(len, self._hooks))
        self._tables = [vars(child) for child in inside]
        self._own = [weakref.ref(module) for module in modules]
        self._note_attributes(self._all_tables(), are_new=False)
        self.found = self._keeps_something()

    def _all_tables(self) -> list[dict[str, Any]]:
        return self._tables + [module.__dict__ for reference in self._own if (module := reference()) is not None]

    def _note_attributes(self, tables: list[dict[str, Any]], *, are_new: bool) -> None:
        self._lengths = list(map(len, tables))
        self._open = [
            (index, key, None if are_new else value)
            for index, table in enumerate(tables)
            for key, value in table.items()
            if key not in _OF_EVERY_MODULE and (value is None or isinstance(value, (Tensor, list, dict)))
        ]

    def _keeps_something(self) -> bool:
        return any(_keeps_something(hook) for hooks in self._hooks for hook in hooks.values())

    def look_at_hooks(self, unit: Unit) -> bool:
        """Whether the forward that begins, of a module of the unit, has one."""
        if self.found:
            return True
        if not self._own:
            self._look_at_modules(unit.modules)
        elif list(map(len, self._hooks)) != self._num_hooks:
            self._num_hooks = list(map(len, self._hooks))
            self.found = self._keeps_something()
        return self.found

    def look_at_attributes(self) -> bool:
        """Whether the forward that has ended leaves one."""
        if self.found:
            return True
        tables = self._all_tables()
        if list(map(len, tables)) != self._lengths:
            self._note_attributes(tables, are_new=True)
        for index, key, before in self._open:
            table = tables[index]
            if key in table:
                value = table[key]
                if value is not None and (value is not before or value.__class__ in (list, dict)) and _has_graph(value):
                    self.found = True
                    return True
        return False


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


# Hooks of these are known to keep nothing of a forward.
_KNOWN = frozenset({"lightning", "lightning_mfsdp", "pytorch_lightning", "torch", "transformer_engine"})


def _keeps_something(hook: Any) -> bool:
    """Whether a hook may keep what it is called with."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in _KNOWN


def _modules_of_own(module: nn.Module) -> list[nn.Module]:
    """Modules below, outside of nested units."""
    found = []
    for child in module.children():
        if not is_unit(child):
            found += [child, *_modules_of_own(child)]
    return found


def _has_graph(value: Any, levels: int = 5) -> bool:
    """Whether a tensor with a graph is in what an attribute holds. Libraries keep settings in tables, which are looked at in every forward.

    So it costs half a microsecond for each item, and containers are looked into so many levels deep, since one may hold itself.
    """
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    items: Any = value
    if isinstance(value, dict):
        items = value.values()
    elif not isinstance(value, (list, tuple)):
        fields = getattr(value, "__dict__", None)
        if fields is None:  # a dataclass with slots
            return any(tensor.grad_fn is not None for tensor in tensors_in(value))
        items = fields.values()
    for item in items:
        is_container = isinstance(item, (Tensor, dict, list, tuple)) or hasattr(item.__class__, "__dataclass_fields__")
        if is_container and levels and _has_graph(item, levels - 1):
            return True
    return False


class _SavedWeight:
    """A weight, or a view of one, that a forward has saved: where it lies among the unsharded weights of its group.

    Attributes:
        weights: Of the group.
        values: Of the place where they were, which know whether they are the same still.
        number: Of the parameter, or raw data, among what has versions there.
        version: Of it, when it was saved.
        form: Which of those that a codec keeps.
        view: Shape, stride and offset from the beginning of the memory, in elements.
    """

    __slots__ = ("form", "number", "values", "version", "view", "weights")

    def __init__(self, weights: Weights, place: Place, tensor: Tensor) -> None:
        self.weights, self.values = weights, place.values
        offset = int(tensor.storage_offset())
        self.view = (tensor.shape, tensor.stride(), offset)
        self.form, self.number = place.number_at(offset * tensor.element_size())
        self.version = place.tensors[self.number]._version  # what was taken of its `data` has another counter

    @property
    def name(self) -> str:
        return self.weights.name_of(self.number)

    def read(self) -> Tensor:
        """It, where it lies now; its group is unsharded. With the version of the parameter: what a backward saves of it is checked, too."""
        place = self.weights.versions.place
        assert place is not None, "it was just gathered"
        with torch.inference_mode(False), torch.no_grad():
            return place.tensors[self.number].detach().as_strided(*self.view)


class _SavedElsewhere:
    """What hooks of the program, around the unit, have made of a tensor."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed


def follow(unit: Unit) -> saved_tensors_hooks | None:
    """Pack what is saved from now on, until the hooks that are returned are left; `None` inside a transform that admits none.

    Weights of the unit are packed as where they lie. Of other tensors the version is kept, since autograd compares none where hooks are;
    hooks of the program around the unit (offloading, a checkpoint) see all of them, as without these.
    """
    if not compat.allows_saved_tensors_hooks():
        return None
    this, outer = weakref.ref(unit), compat.saved_tensors_hooks_around()

    def pack(tensor: Tensor) -> Any:
        unit = this()
        saved = None if unit is None else _as_weight(unit, tensor)
        if outer is not None:
            packed = outer[0](tensor)
            return _SavedElsewhere(packed) if saved is None else saved
        # Detached, since a node that saved its own result would keep itself alive.
        return (tensor.detach(), tensor._version) if saved is None else saved

    def unpack(packed: Any) -> Any:
        if packed.__class__ is _SavedWeight:
            return _gathered(this(), packed)
        if packed.__class__ is _SavedElsewhere:
            return outer[1](packed.packed)  # type: ignore[index]
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: [{tensor.type()} "
                f"{list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
            )
        return tensor

    hooks = saved_tensors_hooks(pack, unpack)
    hooks.__enter__()
    return hooks


def _as_weight(unit: Unit, tensor: Tensor) -> _SavedWeight | None:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a wrapper, around tensors that lie there perhaps
    memory = compat.memory_of(tensor)
    for weights in unit.weights:
        place = weights.versions.place
        if place is not None and weights.is_sharded and compat.storage_of(weights.memory) == memory:
            return _SavedWeight(weights, place, tensor)
    return None


def _gathered(unit: Unit | None, saved: _SavedWeight) -> Tensor:
    weights = saved.weights
    if unit is None:
        raise EngineStateError(
            f"{weights.name}: a backward reads {saved.name} of a unit that no longer exists; keep the model until then"
        )
    context = unit.context
    if compat.backward_task() != -1:
        context.begin_backward()
    if context.writes.needs_refresh:
        context.refresh()
    if saved.values.version_of(saved.number) != saved.version:
        raise EngineStateError(
            f"{unit.name}: a backward reads {saved.name}, which was written after the forward that saved it (by an optimizer, or in "
            "place); call backward before the write, or compute the forward again"
        )
    weights.unshard_form(saved.form)
    weights.wait()
    return saved.read()
