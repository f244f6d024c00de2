"""How a unit hangs on its modules and on autograd's graph: when its forward begins and ends, and when the backward of a call does.

The backward of a call begins when a gradient of a result is there, and ends when the gradients of all inputs are. No hook keeps the
unit alive: the modules' references to their unit are the only strong ones, so deleting the modules frees everything.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.runtime.call import Call, Hook, Inputs
from lightning_mfsdp.engine.runtime.hooked_unit import Arguments, HookedUnit

__all__ = [
    "UNIT",
    "Series",
    "Shown",
    "attach",
    "attach_inside",
    "cast_inputs",
    "is_plain_lookup",
    "is_unit",
    "listen_to_inputs",
    "listen_to_outputs",
    "refuse_forgotten",
    "refuse_own_weights",
]


UNIT = "_mfsdp_unit"  # where a module keeps its unit


class Shown:
    """Whether modules show the unsharded parameters of their unit now, and which module inside it made them.

    Attributes:
        now: They do.
        by: The module inside whose forward they do so; `None` in the unit's own forward and in a backward.
        depth: How often that module is running.
    """

    __slots__ = ("by", "depth", "now")

    def __init__(self) -> None:
        self.now = False
        self.by: nn.Module | None = None
        self.depth = 0


# -- modules ----------------------------------------------------------------------------------------------------------


def attach(unit: HookedUnit, modules: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Register the unit's hooks on its modules, and return what takes them away.

    A compiler that looks into a module stops at them and goes on inside.
    """
    series = Series(unit, len(modules)) if len(modules) > 1 else None
    hooks: list[RemovableHandle] = []
    for index, module in enumerate(modules):
        hooks += _attach_one(weakref.ref(unit), module, index, series)
    return hooks


def _attach_one(
    this: weakref.ref[HookedUnit], module: nn.Module, index: int, series: Series | None
) -> tuple[RemovableHandle, ...]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        if unit is None:
            return None
        if series is not None:
            return series.pre_forward(unit, index, module, args, kwargs)
        return unit.pre_forward(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is None:
            return
        if series is not None:
            series.post_forward(unit, index, module, args, output)
        else:
            unit.post_forward(module, args, output)

    def rest(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.release()
            unit.context.note_writes()

    def weights_changed(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.weights_changed()

    return (
        module.register_forward_pre_hook(
            pre_forward, with_kwargs=True, prepend=True
        ),  # other hooks may read the weights
        module.register_forward_hook(post_forward, always_call=True),
        module.register_state_dict_pre_hook(rest),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(rest),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(weights_changed),  # type: ignore[no-untyped-call]
    )


def attach_inside(
    unit: HookedUnit, shown: Shown, tables: Sequence[dict[str, Any]], root: nn.Module
) -> list[RemovableHandle]:
    """Register hooks on modules inside the outermost unit that have parameters of it: called by themselves, they show those.

    A training step calls such modules while its own unit has no forward: outside of theirs it sees sharded parameters, so what it writes
    lasts. Nested units have hooks of their own, and so does `root`.

    Args:
        unit: The outermost one.
        shown: Whether its modules show unsharded parameters.
        tables: The `_parameters` of modules that show its parameters.
        root: Its module.

    Returns:
        What takes the hooks away again.
    """
    this = weakref.ref(unit)
    handles: list[RemovableHandle] = []
    for module in _modules_inside(root, {id(table) for table in tables}):
        handles += _attach_inside_one(this, shown, module)
    return handles


def _modules_inside(module: nn.Module, tables: set[int]) -> list[nn.Module]:
    """Modules below `module` and outside of nested units that hold parameters in one of the tables, or contain such a module."""
    found: dict[nn.Module, bool] = {}
    _find_inside(module, tables, found)
    del found[module]
    return [child for child, has_some in found.items() if has_some and not isinstance(child, torch.jit.ScriptModule)]


def _find_inside(module: nn.Module, tables: set[int], found: dict[nn.Module, bool]) -> bool:
    if module not in found:
        found[module] = False  # in case it contains itself
        below = [_find_inside(child, tables, found) for child in module.children() if not is_unit(child)]
        found[module] = id(module._parameters) in tables or any(below)
    return found[module]


def _attach_inside_one(this: weakref.ref[HookedUnit], shown: Shown, module: nn.Module) -> list[RemovableHandle]:
    # What a compiler looks into are the two quick ways out; inside the unit's own forward they are all that happens.
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not shown.now:
            return enter(module, args, kwargs)
        if shown.by is module:
            shown.depth += 1
        return None

    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if shown.by is not module:
            return
        shown.depth -= 1
        if not shown.depth:
            leave(module, args, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        return None if unit is None else unit.enter_inside(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is not None:
            unit.leave_inside(module, args, output)

    return [
        module.register_forward_pre_hook(pre_forward, with_kwargs=True, prepend=True),
        module.register_forward_hook(post_forward, always_call=True),
    ]


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return UNIT in module.__dict__


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding and nothing more: its backward needs the indices alone, so no weight is gathered for it."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and len(module._parameters) == 1
        and not module._modules
        and "forward" not in vars(module)
        and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1  # the unit's own
        and not compat.has_global_hooks()
    )


class Series:
    """Where a unit of several modules stands, which run one after the other, gathered once before the first and given back after the last.

    Small blocks cost more to gather, reduce and wait for than their bytes do. As one unit, a few of them pay once. Their number in a
    unit is the user's choice; what follows here holds for any program that calls them:

        the next module of the series is called     the unit stays as it is
        anything else                               what was running is given back, and the call begins a run of its own

    so a skipped module, another order, a change of grad mode or a recomputation are never wrong, only gathered more often. Every
    module's result is listened to: a backward may begin at any of them. Called by themselves, outside of the root's forward, modules run
    one by one, so that nothing stays gathered afterwards.

    Source: `torch.distributed.fsdp.fully_shard` also takes a list of modules; its pre-forward runs before the first and its post-forward
    once all have run.

    Attributes:
        busy: One of its modules is running at the moment.
    """

    def __init__(self, unit: HookedUnit, length: int) -> None:
        self._unit = weakref.ref(unit)
        self._last = length - 1
        self._next = 0
        self._with_grad = True
        self.busy = False

    def pre_forward(
        self, unit: HookedUnit, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Before module `index`: go on with the run, or begin one."""
        expected = 0 < index == self._next and unit.live and compat.backward_task() == -1
        going_on = expected and self._with_grad == torch.is_grad_enabled()
        if going_on:
            unit.install()
            args, kwargs = cast_inputs(unit, args, kwargs)
            unit.note_run()
        else:
            self.stop()
            args, kwargs = unit.pre_forward(module, args, kwargs)
            self._with_grad = torch.is_grad_enabled()
        self.busy = True
        unit.context.note_series(self)
        return args, kwargs

    def post_forward(self, unit: HookedUnit, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After module `index`; also runs when its forward raised, with `output` None."""
        self.busy = False
        failed = output is None and sys.exc_info()[0] is not None
        if failed or index == self._last or compat.backward_task() != -1 or not unit.is_inside_root:
            self._next = 0
            unit.context.note_series(None)
            unit.post_forward(module, args, output)
        else:
            self._next = index + 1
            unit.context.note_series(self)
            unit.listen_to_result(unit.open_call, output)
            if not unit.is_inside_forward_of_root:  # what comes next is code of a step, which sees sharded weights
                unit.hide()

    def stop(self) -> None:
        """The run ends here, before the last module, if there is one."""
        unit = self._unit()
        if self._next and unit is not None:
            self._next = 0
            unit.context.note_series(None)
            unit.close()


# -- autograd ---------------------------------------------------------------------------------------------------------


def cast_inputs(unit: HookedUnit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Floating-point arguments in the compute dtype, if the policy says so."""
    dtype = unit.policy.compute_dtype
    if dtype is None or not (unit.policy.cast_forward_inputs and _differs(dtype, _tensors_of(args, kwargs))):
        return args, kwargs
    return map_tensors(lambda tensor: _cast(tensor, dtype), (args, kwargs))  # type: ignore[no-any-return]


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return tensors_in((args, kwargs) if kwargs else args)


def _differs(dtype: torch.dtype, tensors: list[Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator costs host time, in every unit
        if tensor.dtype is not dtype and tensor.is_floating_point():
            return True
    return False


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def listen_to_inputs(unit: HookedUnit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Have `post_backward` run when gradients of all inputs are there."""
    tensors = [tensor for tensor in _tensors_of(args, kwargs) if tensor.requires_grad]
    if not tensors:
        return args, kwargs
    this = weakref.ref(unit)
    call.has_end = unit.hears_end = True

    def end(_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.post_backward(call)

    if len(tensors) == 1 and args and args[0] is tensors[0]:  # nearly all calls, at a third of the host time
        view = tensors[0].view_as(tensors[0])
        call.given = {id(view._base)}
        _when_computed(view, end)
        return (view, *args[1:]), kwargs
    # Views of its own: an input shared by many units (an encoder's memory) is finished for each of them separately.
    views = {id(tensor): tensor.view_as(tensor) for tensor in tensors}
    call.given = {id(view._base) for view in views.values()}
    if len(views) == 1:
        _when_computed(next(iter(views.values())), end)
    else:
        _when_all_computed(call, list(views.values()), end)
    return map_tensors(lambda tensor: views.get(id(tensor), tensor), (args, kwargs))  # type: ignore[no-any-return]


def _when_computed(view: Tensor, hook: Hook) -> None:
    """Have `hook` run when the gradient of a view is there."""
    node = view.grad_fn
    assert node is not None, "a view of what needs a gradient"
    node.register_prehook(hook)


def _when_all_computed(call: Call, views: list[Tensor], hook: Hook) -> None:
    call.inputs = Inputs([view.grad_fn for view in views])
    these = weakref.ref(call.inputs)

    def one(gradient: Any) -> None:
        inputs = these()
        if inputs is not None and inputs.has_all():
            hook(gradient)

    for view in views:
        _when_computed(view, one)


def listen_to_outputs(unit: HookedUnit, call: Call, outputs: list[Tensor]) -> None:
    """Have `pre_backward` run when the backward of this call begins."""
    inputs, call.inputs = call.inputs, None  # hooks of the inputs hold the call
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    if not differentiable and outputs:
        return
    call.slots = [group.slot for group in unit.all_groups]
    unit.awaited.add(call)
    if not outputs:
        call.hides = unit.awaited.hides_calls = True
        unit.share_no_memory()
        _listen_to_parameters(unit)
        return
    this = weakref.ref(unit)

    def begin(_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.pre_backward(call)

    def listen(node: Node) -> None:
        node.register_prehook(begin if inputs is None else inputs.held_by(begin, node))

    for tensor in differentiable:
        if tensor.grad_fn is not None:
            listen(tensor.grad_fn)  # a tenth of the host time of a tensor's own hook
        else:
            unit.leaf_hooks.append(tensor.register_hook(begin))  # type: ignore[no-untyped-call]
        base = tensor._base  # who writes into a view in place takes the view's own node out of the graph
        if base is not None and base.grad_fn is not None and id(base) not in call.given:
            listen(base.grad_fn)


def _listen_to_parameters(unit: HookedUnit) -> None:
    """Where a result hides its tensors, notice a backward by the gradients it leaves.

    Hooks are on the nodes that the graphs end in and go with these. Hooks on the weights themselves would stay, and layers look at those.
    """
    this = weakref.ref(unit)

    def begin(_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.begin_backward()

    while unit.awaited.hooks:
        unit.awaited.hooks.pop().remove()  # a weight has one such node at a time
    for group in unit.all_groups:
        for entry in group.entries:
            if entry.full.requires_grad:
                unit.awaited.hooks.append(get_gradient_edge(entry.full).node.register_prehook(begin))


def refuse_forgotten(unit: HookedUnit) -> NoReturn:
    """The backward of hidden results was not expected any more, so that the weights it read may not have been there."""
    raise EngineStateError(
        f"{unit.name}: its forward returned an object whose tensors the engine cannot see, and the backward of that came after "
        "two other backwards, when its weights were gone; return tensors, or containers of them, or call backward earlier"
    )


def refuse_own_weights(unit: HookedUnit, outputs: list[Tensor]) -> None:
    """A result that lies in gathered memory would change or vanish once that memory is given back.

    Raises:
        EngineStateError: There is one.
    """
    if not any(tensor._is_view() or tensor.is_leaf for tensor in outputs):
        return  # computed, so it has memory of its own
    places = {group.slot.address for group in unit.all_groups if group.slot is not None and group.gathered}
    strided = [tensor for tensor in outputs if tensor.layout is torch.strided] if places else []
    if any(tensor.untyped_storage().data_ptr() in places for tensor in strided):
        raise EngineStateError(
            f"{unit.name}: its forward returned one of its own parameters, or a view of one, whose memory is given back "
            "after forward; return a copy (parameter.clone()), or keep that parameter in the module around the unit"
        )
