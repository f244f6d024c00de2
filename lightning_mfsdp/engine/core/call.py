"""Calls: a call is one forward of a unit and its backward. How a unit detects when they begin and end.

    the module is called                       the call opens
    it has returned                            the call waits for its backward, if a result can have one
    a gradient of a result has arrived         the call's backward begins
    the gradients of all inputs have arrived   it has ended; a call without inputs that need gradients ends with the whole backward

Calls say when weights are read. When gradients are complete is asked of autograd (`Gradients.are_complete`).

No hook keeps the unit alive, and none is put on a weight: the modules' references to their unit are the only strong ones, so deleting the
modules frees everything.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.storage import Slot

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.unit import Unit

__all__ = [
    "UNIT",
    "Call",
    "GroupedModules",
    "Hook",
    "Inputs",
    "Shown",
    "attach",
    "attach_inside",
    "begin_call",
    "is_plain_lookup",
    "is_unit",
    "refuse_own_weights",
    "watch_parameters",
]

Hook = Callable[[Any], None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call:
    """One forward in grad mode, until its backward.

    Attributes:
        buffers: Where its saved tensors expect the weights, by group; `None` where they are whole, or packed and in the unit's own memory.
            `None` instead of a list: its backward reads no weights.
        ended_in: The last backward in which the gradients of all its inputs arrived, by autograd's number.
        is_recomputed: Its forward ran inside a backward.
        following: Packs what is saved (side_doors.py), while a module of the unit runs.
        is_followed: What is saved was packed.
        in_transform: Its forward ran inside `torch.func.grad` or the like.
        given: What its inputs are views of, by identity; empty if none needs a gradient, so that the end of its backward is not detected.
        inputs: Several that need gradients, until there are results.
    """

    __slots__ = (
        "buffers",
        "ended_in",
        "following",
        "given",
        "in_transform",
        "inputs",
        "is_followed",
        "is_recomputed",
    )

    def __init__(self, *, is_recomputed: bool = False, in_transform: bool = False) -> None:
        self.buffers: list[Slot | None] | None = None
        self.ended_in = -1
        self.is_recomputed, self.in_transform = is_recomputed, in_transform
        self.following: saved_tensors_hooks | None = None
        self.is_followed = False
        self.given: set[int] = set()
        self.inputs: Inputs | None = None

    def follow(self, packing: saved_tensors_hooks | None) -> bool:
        """A module of the unit runs, and hooks pack what is saved, where they can be put around it. Returns whether they are."""
        self.following = packing
        if packing is not None:
            self.is_followed = True
        return packing is not None

    def end_following(self) -> None:
        """The module has run."""
        if self.following is not None:
            self.following.__exit__()
            self.following = None

    def fail(self) -> None:
        """Its forward has raised: hooks of the inputs hold the call, and it would hold the graph."""
        self.inputs = None

    def read_no_weights(self) -> None:
        """Its backward reads none."""
        self.buffers = None

    def watch_inputs(
        self, unit: Unit, watched: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Have it end when the gradients of these inputs have arrived. Returns arguments with views in place of them."""
        this = weakref.ref(unit)

        def end(_: Any) -> None:
            unit = this()
            if unit is not None:
                if self.in_transform:
                    compat.outside_transforms(unit.post_backward, self)
                else:
                    unit.post_backward(self)

        if len(watched) == 1 and args and args[0] is watched[0]:  # nearly all calls, at a third of the host time
            view = watched[0].view_as(watched[0])
            self.given = {id(view._base)}
            view.grad_fn.register_prehook(end)
            return (view, *args[1:]), kwargs
        # Views of its own: an input shared by many units (an encoder's memory) is finished for each of them separately.
        views = {id(tensor): tensor.view_as(tensor) for tensor in watched}
        self.given = {id(view._base) for view in views.values()}
        if len(views) == 1:
            next(iter(views.values())).grad_fn.register_prehook(end)  # type: ignore[union-attr]
        else:
            self.inputs = _when_all_computed(list(views.values()), end)
        return map_tensors(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))  # type: ignore[no-any-return]

    def watch_results(self, unit: Unit, results: list[Tensor]) -> None:
        """Have its backward begin with the first gradient of a result."""
        inputs, self.inputs = self.inputs, None  # hooks of the inputs hold the call
        if self.in_transform:  # a backward outside of `vmap` goes through the graph of what is inside
            results = [inner for tensor in results for inner in compat.at_all_levels(tensor)]
        for tensor in results:  # a comprehension costs host time, in every module
            if tensor.requires_grad:
                break
        else:
            if results:
                return
        self.buffers = [
            None if not weights.is_sharded or (self.is_followed and weights.client.slot.is_own) else weights.client.slot
            for weights in unit.weights
        ]
        unit.calls.wait_for(self)
        this = weakref.ref(unit)

        def begin(_: Any) -> None:
            unit = this()
            if unit is not None:
                if self.in_transform:
                    compat.outside_transforms(unit.pre_backward, self)
                else:
                    unit.pre_backward(self)

        for tensor in results:
            if not tensor.requires_grad:
                continue
            node = tensor.grad_fn
            if node is not None:  # a tenth of the host time of a tensor's own hook
                node.register_prehook(begin if inputs is None else inputs.held_by(begin, node))
            base = tensor._base  # an in-place write to a view removes the view's own node from the graph
            if base is not None and base.grad_fn is not None and id(base) not in self.given:
                base.grad_fn.register_prehook(begin if inputs is None else inputs.held_by(begin, base.grad_fn))


class Inputs:
    """Where the graph of a call begins, if it begins in several places.

    Hooks of these nodes have a weak reference to it and hooks of the results hold it. With `register_multi_grad_hook` the nodes' own
    hooks hold the nodes: a reference cycle that keeps the whole graph before them alive for an unknown time, and no CUDA graph can be
    recorded meanwhile.
    """

    __slots__ = ("__weakref__", "_backward", "_lock", "_missing", "_nodes")

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._backward, self._missing = -1, 0
        self._lock = threading.Lock()  # each device has a thread

    def has_all(self) -> bool:
        """Note one more gradient; returns whether it is the last one in the current backward."""
        with self._lock:
            running = compat.backward_task()
            if running != self._backward:
                self._backward, self._missing = running, sum(map(compat.is_due, self._nodes))
            self._missing -= 1
            return self._missing == 0

    def held_by(self, hook: Hook, result: Node) -> Hook:
        """A hook for the node of a result that keeps this alive, unless the graph begins there: the unit returned an input unchanged."""
        if result in self._nodes:
            return hook

        def holding(gradient: Any, _held: Inputs = self) -> None:
            hook(gradient)

        return holding


# -- what hooks use of a unit and of its root --------------------------------------------------------------------------


UNIT = "_mfsdp_unit"  # where a module stores its unit


class Shown:
    """Whether modules show the unsharded parameters of their unit now, and which module inside it made them.

    Attributes:
        now: They do.
        by: The module inside whose forward they do so; `None` in the unit's own forward and in a backward.
    """

    __slots__ = ("_depth", "_hooks", "_opened_call", "by", "now")

    def __init__(self) -> None:
        self.now = False
        self.by: nn.Module | None = None
        self._depth = 0  # how often that module is running
        self._opened_call = False  # the unit counts its forward as one of its own
        self._hooks: list[RemovableHandle] = []  # of the modules inside

    def hook(self, unit: Unit) -> None:
        """Have modules inside a unit, the outermost one, show its parameters when they are called by themselves."""
        self.unhook()
        for module in unit.modules:
            self._hooks += attach_inside(unit, self, unit.tables, module)

    def unhook(self) -> None:
        """The unit is no longer an outermost one."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def begin(self, module: nn.Module, *, opened_call: bool) -> None:
        """A module inside runs, and has modules show them; `opened_call`: the unit counts its forward as one of its own."""
        self.by, self._depth, self._opened_call = module, 1, opened_call

    def go_deeper(self) -> None:
        """The module that made them is called in its own forward."""
        self._depth += 1

    def leave(self) -> bool:
        """A forward of the module that made them has ended. Returns whether it was the outermost one."""
        self._depth -= 1
        return not self._depth

    def end(self) -> bool:
        """The module inside has run. Returns whether it had opened a call."""
        self.by = None
        return self._opened_call

    def hide(self) -> None:
        """Modules show sharded parameters again."""
        self.now, self.by = False, None


# -- modules ----------------------------------------------------------------------------------------------------------


def attach(unit: Unit, modules: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Register the unit's hooks on its modules, and return what removes them.

    A compiler that traces a module stops at them and goes on inside.
    """
    grouped = GroupedModules(unit, len(modules)) if len(modules) > 1 else None
    hooks: list[RemovableHandle] = []
    for index, module in enumerate(modules):
        hooks += _attach_one(weakref.ref(unit), module, index, grouped)
    return hooks


def _attach_one(
    this: weakref.ref[Unit], module: nn.Module, index: int, grouped: GroupedModules | None
) -> tuple[RemovableHandle, ...]:
    @compat.untraced
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        if unit is None:
            return None
        if grouped is not None:
            return grouped.pre_forward(unit, index, module, args, kwargs)
        return unit.pre_forward(module, args, kwargs)

    @compat.untraced
    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is None:
            return
        if grouped is not None:
            grouped.post_forward(unit, index, module, args, output)
        else:
            unit.post_forward(module, args, output)

    def rest(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.reshard()
            unit.context.writes.look()

    def weights_changed(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.weights_changed()

    return (
        module.register_forward_pre_hook(
            pre_forward, with_kwargs=True, prepend=True
        ),  # other hooks may read the weights
        module.register_forward_hook(post_forward, always_call=True),
        module.register_state_dict_pre_hook(rest),
        module.register_load_state_dict_pre_hook(rest),
        module.register_load_state_dict_post_hook(weights_changed),
    )


def attach_inside(unit: Unit, shown: Shown, tables: Sequence[dict[str, Any]], root: nn.Module) -> list[RemovableHandle]:
    """Register hooks on modules inside the outermost unit that have parameters of it: called by themselves, they show those.

    A training step calls such modules while its own unit has no forward: outside of theirs it sees sharded parameters, so what it writes
    lasts. Nested units have hooks of their own, and so does `root`.

    Args:
        unit: The outermost one.
        shown: Whether its modules show unsharded parameters.
        tables: The `_parameters` of modules that show its parameters.
        root: Its module.

    Returns:
        What removes the hooks.
    """
    this = weakref.ref(unit)
    handles: list[RemovableHandle] = []
    for module in _modules_inside(root, {id(table) for table in tables}):
        handles += _attach_inside_one(this, shown, module)
    return handles


def _modules_inside(module: nn.Module, tables: set[int]) -> list[nn.Module]:
    """Modules below `module` and outside of nested units that hold parameters in one of the tables, or contain such a module."""
    contains: dict[nn.Module, bool] = {}
    _find_inside(module, tables, contains)
    del contains[module]
    return [child for child, has_some in contains.items() if has_some and not isinstance(child, torch.jit.ScriptModule)]


def _find_inside(module: nn.Module, tables: set[int], contains: dict[nn.Module, bool]) -> bool:
    if module not in contains:
        contains[module] = False  # in case it contains itself
        below = [_find_inside(child, tables, contains) for child in module.children() if not is_unit(child)]
        contains[module] = id(module._parameters) in tables or any(below)
    return contains[module]


def _attach_inside_one(this: weakref.ref[Unit], shown: Shown, module: nn.Module) -> list[RemovableHandle]:
    # A compiler traces only the two early returns; inside the unit's own forward nothing else happens.
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not shown.now:
            return enter(module, args, kwargs)
        if shown.by is module:
            shown.go_deeper()
        return None

    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if shown.by is module and shown.leave():
            leave(module, args, output)

    @compat.untraced
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        return None if unit is None else unit.enter_inside(module, args, kwargs)

    @compat.untraced
    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is not None:
            unit.leave_inside(module, args, output)

    return [
        module.register_forward_pre_hook(pre_forward, with_kwargs=True, prepend=True),
        module.register_forward_hook(post_forward, always_call=True),
    ]


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on exactly this module."""
    return UNIT in module.__dict__


def is_plain_lookup(module: nn.Embedding) -> bool:
    """Whether this is a plain embedding: its backward needs the indices alone, so no weight is gathered for it."""
    return (
        type(module).forward is nn.Embedding.forward
        and len(module._parameters) == 1
        and not module._modules
        and "forward" not in vars(module)
        and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1  # the unit's own
        and not compat.has_global_hooks()
    )


class GroupedModules:
    """State of a unit of several modules that run one after the other: unsharded once before the first, resharded after the last.

    For small blocks, the fixed costs of a gather and a reduction exceed the cost of their bytes. As one unit, several blocks pay these
    once. Their number in a unit is the user's choice; the following holds for any program that calls them:

        the next module of the group is called      the unit stays unsharded
        anything else                               what was running is resharded, and the call begins a run of its own

    so a skipped module, another order, a change of grad mode or a recomputation are never wrong, they only cost more gathers. Every
    module's result is hooked: a backward may begin at any of them. Called by themselves, outside of the root's forward, modules run
    one by one, so that nothing stays gathered afterwards.

    Source: `torch.distributed.fsdp.fully_shard` also takes a list of modules; its pre-forward runs before the first and its post-forward
    once all have run.

    Attributes:
        busy: One of its modules is running at the moment.
    """

    def __init__(self, unit: Unit, length: int) -> None:
        self._unit = weakref.ref(unit)
        self._last = length - 1
        self._next = 0
        self._with_grad = True
        self.busy = False

    def pre_forward(
        self, unit: Unit, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Before module `index`: continue the run, or begin one."""
        expected = 0 < index == self._next and unit.uses_weights and compat.backward_task() == -1
        going_on = expected and self._with_grad == torch.is_grad_enabled()
        if going_on:
            unit.register()
            args, kwargs = begin_call(unit, None, args, kwargs)
            if not self._with_grad:
                unit.note_run()
            if unit.side_doors.found:
                unit.follow()
        else:
            self.stop()
            args, kwargs = unit.pre_forward(module, args, kwargs)
            self._with_grad = torch.is_grad_enabled()
            unit.context.note_grouped_modules(self)
        self.busy = True
        return args, kwargs

    def post_forward(self, unit: Unit, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After module `index`; also runs when its forward raised, with `output` None."""
        self.busy = False
        call = unit.calls.open[-1] if unit.calls.open else None
        if call is not None and call.following is not None:
            call.end_following()
        failed = output is None and sys.exc_info()[0] is not None
        if failed or index == self._last or compat.backward_task() != -1 or not unit.is_inside_root:
            self._next = 0
            unit.context.note_grouped_modules(None)
            unit.post_forward(module, args, output)
        else:
            self._next = index + 1
            unit.context.note_grouped_modules(self)
            unit.watch_result(call, output)
            if not unit.is_inside_forward_of_root:  # the code of a step follows, which sees sharded weights
                unit.unregister()

    def stop(self) -> None:
        """The run ends here, before the last module, if there is one."""
        unit = self._unit()
        if self._next and unit is not None:
            self._next = 0
            unit.context.note_grouped_modules(None)
            unit.close()


# -- autograd ---------------------------------------------------------------------------------------------------------


def begin_call(unit: Unit, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Cast a module's inputs, if the policy requires it, and have the call end when the gradients of all inputs have arrived."""
    policy = unit.policy
    dtype = policy.compute_dtype if policy.cast_forward_inputs else None
    if call is None and dtype is None:
        return args, kwargs
    tensors = tensors_in((args, kwargs) if kwargs else args)
    if dtype is not None and _differs(dtype, tensors):
        args, kwargs = map_tensors(lambda tensor: _cast(tensor, dtype), (args, kwargs))
        tensors = tensors_in((args, kwargs))
    watched = [tensor for tensor in tensors if tensor.requires_grad]
    if call is None or not watched:
        return args, kwargs
    return call.watch_inputs(unit, watched, args, kwargs)


def _differs(dtype: torch.dtype, tensors: list[Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator costs host time, in every unit
        if tensor.dtype is not dtype and tensor.is_floating_point():
            return True
    return False


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _when_all_computed(views: list[Tensor], hook: Hook) -> Inputs:
    """Have a hook called when the gradients of all views have arrived."""
    inputs = Inputs([view.grad_fn for view in views])
    these = weakref.ref(inputs)

    def count(gradient: Any) -> None:
        inputs = these()
        if inputs is not None and inputs.has_all():
            hook(gradient)

    for view in views:
        view.grad_fn.register_prehook(count)  # type: ignore[union-attr]
    return inputs


def watch_parameters(unit: Unit) -> None:
    """Detect a backward by the gradients it leaves, where a result hides its tensors, or a backward may touch none.

    Hooks are on the nodes where the graphs end, and are freed with them. Hooks on the weights would stay, and layers check for those.
    """
    if compat.is_transformed():  # a transform runs no backward that accumulates gradients
        return
    this = weakref.ref(unit)

    def begin(_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.begin_backward()

    hooks = unit.calls.parameter_hooks
    while hooks:
        hooks.pop().remove()  # a weight has one such node at a time
    for group in unit.all_groups:
        for entry in group.entries:
            if entry.full.requires_grad:
                hooks.append(compat.accumulator_of(entry.full).register_prehook(begin))


def refuse_own_weights(unit: Unit, outputs: list[Tensor]) -> None:
    """Refuse a result that lies in gathered memory: it would change or vanish once that memory is reused."""
    places = {compat.storage_of(weights.memory) for weights in unit.weights if weights.is_sharded and weights.present}
    strided = [tensor for tensor in outputs if tensor.layout is torch.strided] if places else []
    if any(compat.memory_of(tensor) in places for tensor in strided):
        raise EngineStateError(
            f"{unit.name}: its forward returned one of its own parameters, or a view of one, whose memory is freed "
            "after forward; return a copy (parameter.clone()), or keep that parameter in the module around the unit"
        )
