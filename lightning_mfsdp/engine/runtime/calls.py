"""Call: one forward of a unit until its backward, and how the unit hears of both ends of that backward.

The backward begins when a gradient of a result is there, and ends when the gradients of all inputs are. Nothing here keeps a unit
alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.memory.storage import Slot

if TYPE_CHECKING:
    from lightning_mfsdp.engine.runtime.unit import Unit

__all__ = ["Call", "cast_inputs", "listen_to_inputs", "listen_to_outputs", "refuse_forgotten", "refuse_own_weights"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Hook = Callable[[Any], None]


class Call:
    """One forward in grad mode, until its backward.

    Attributes:
        slots: Where its saved tensors expect the weights, by group.
        has_end: Some input needs a gradient, so its backward has a visible end.
        begun_in: The backward in which its own has begun and not ended, by `Context.backwards_finished`.
        ended_in: The backward whose gradients of all its inputs came last.
        reads_weights: Its backward needs the weights.
        hides: A result had no tensors to listen to.
        is_recomputed: Its forward ran inside a backward.
        is_inside_root: It ran in the forward of a root around its unit, or in a step of one.
        is_doubtful: Nobody knows whether its graph counts (awaited.py), so it is not waited for.
        missed: Backwards that have ended without reaching it since one did.
        outlasts_pass: It may come after further forwards.
        given: What its inputs are views of, by identity.
        inputs: Several that need gradients, until there are results.
    """

    __slots__ = (
        *(
            "begun_in",
            "ended_in",
            "given",
            "has_end",
            "hides",
            "inputs",
            "is_doubtful",
            "is_inside_root",
            "is_recomputed",
        ),
        *("missed", "outlasts_pass", "reads_weights", "slots"),
    )

    def __init__(self) -> None:
        self.slots: list[Slot | None] = []
        self.has_end = False
        self.begun_in = self.ended_in = -1
        self.reads_weights = True
        self.hides = self.is_recomputed = self.is_doubtful = self.is_inside_root = False
        self.missed, self.outlasts_pass = 0, True
        self.given: set[int] = set()
        self.inputs: _Inputs | None = None


class _Inputs:
    """Where the graph of a call begins, if it begins in several places.

    Hooks of these nodes know it weakly and hooks of the results hold it. With `register_multi_grad_hook` the nodes' own hooks hold the
    nodes: a circle that keeps the whole graph before them alive for an unknown time, and a CUDA graph cannot be recorded while it lives.
    """

    __slots__ = ("__weakref__", "_backward", "_lock", "_missing", "_nodes")

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._backward, self._missing = -1, 0
        self._lock = threading.Lock()  # each device has a thread

    def has_all(self) -> bool:
        """Note one more gradient; whether the backward that runs brings no other."""
        with self._lock:
            running = compat.backward_task()
            if running != self._backward:
                self._backward, self._missing = running, sum(map(compat.is_due, self._nodes))
            self._missing -= 1
            return self._missing == 0

    def held_by(self, hook: Hook, result: Node) -> Hook:
        """A hook for the node of a result that keeps this alive, unless the graph begins there: the unit returned an input as it was."""
        if result in self._nodes:
            return hook

        def holding(gradient: Any, _held: _Inputs = self) -> None:
            hook(gradient)

        return holding


def cast_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
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


def listen_to_inputs(unit: Unit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
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
    call.inputs = _Inputs([view.grad_fn for view in views])
    these = weakref.ref(call.inputs)

    def one(gradient: Any) -> None:
        inputs = these()
        if inputs is not None and inputs.has_all():
            hook(gradient)

    for view in views:
        _when_computed(view, one)


def listen_to_outputs(unit: Unit, call: Call, outputs: list[Tensor]) -> None:
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


def _listen_to_parameters(unit: Unit) -> None:
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


def refuse_forgotten(unit: Unit) -> NoReturn:
    """The backward of hidden results was not expected any more, so that the weights it read may not have been there."""
    raise EngineStateError(
        f"{unit.name}: its forward returned an object whose tensors the engine cannot see, and the backward of that came after "
        "two other backwards, when its weights were gone; return tensors, or containers of them, or call backward earlier"
    )


def refuse_own_weights(unit: Unit, outputs: list[Tensor]) -> None:
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
