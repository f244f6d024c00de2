"""Programs that reach a unit by its result and by side doors, for a plain model and a sharded one (test_side_door_programs.py runs them).

Each is called once a step with a `Run` and the rank's batch; what it returns is compared, too. They are those that three designs of the
engine were compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import around_backward, fully_shard, fully_shard_optimizer, no_sync

DIM, HIDDEN, BLOCKS = 8, 16, 6
ORDINARY = 2  # steps before a side door is used alone: slots are shared from then on


class Block(nn.Module):
    """Two layers around a residual path; `inner` says what else its forward does."""

    def __init__(self, inner: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.spare = nn.Linear(DIM, DIM)
        self.inner = inner
        self.child: nn.Module | None = None
        self.features: Tensor | None = None
        self.penalty: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return getattr(self, f"_{self.inner}", self._plain)(x)

    def _plain(self, x: Tensor) -> Tensor:
        return x + self.body(x)

    def _attribute(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.a(x))
        return x + self.b(self.features)

    def _penalty(self, x: Tensor) -> Tensor:
        self.penalty = self.a.weight.square().sum() + (self.b.weight @ self.a.weight).square().sum()
        return x + self.body(x)

    def _input_term(self, x: Tensor) -> Tensor:
        self.penalty = (self.a.weight @ x.mean(0)).square().sum()
        return x + self.body(x)

    def _checkpoint(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)

    def _checkpoint_feature(self, x: Tensor) -> Tensor:
        self.features = checkpoint(self.body, x, use_reentrant=False)
        return x + self.features

    def _user_hooks(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            self.features = self.body(x)
        return x + self.features

    def _func_grad(self, x: Tensor) -> Tensor:
        return x + self.body(x) + torch.func.grad(lambda z: self.body(z).square().sum())(x)

    def _func_jvp(self, x: Tensor) -> Tensor:
        return x + torch.func.jvp(self.body, (x,), (torch.ones_like(x),))[1]

    def _func_vmap(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(self.body)(x)

    def _itself(self, x: Tensor) -> Tensor:
        self.inner = ""
        try:
            x = self(x)
        finally:
            self.inner = "itself"
        return x + self.body(x)

    def _fails_once(self, x: Tensor) -> Tensor:
        self.inner = ""
        raise ValueError("a forward that fails")

    def _nested(self, x: Tensor) -> Tensor:
        assert self.child is not None
        return x + self.b(self.child(torch.tanh(self.a(x))))

    def _nested_weight(self, x: Tensor) -> Tensor:
        assert self.child is not None
        self.features = self.child(torch.tanh(self.a(x)), self.a.weight)
        return x + self.b(self.features)

    def _write(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.spare.weight.mul_(0.9)
        return x + self.spare(x)

    def _write_after_use(self, x: Tensor) -> Tensor:
        y = self.spare(x)
        with torch.no_grad():
            self.spare.weight.mul_(0.9)
        return x + y

    def _activation_write(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = self.b(h)
        h.detach().add_(1)
        return x + y

    def _body_feature(self, x: Tensor) -> Tensor:
        self.features = self.body(x)
        return x + self.features

    def _object(self, x: Tensor) -> Hidden:
        return Hidden(x + self.body(x))

    def _closure(self, x: Tensor) -> Callable[[], Tensor]:
        y = x + self.body(x)
        return lambda: y

    def _dataclass(self, x: Tensor) -> Result:
        return Result(x + self.body(x))


class Hidden:
    """A result whose tensor nobody sees."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclasses.dataclass
class Result:
    """The same as a dataclass."""

    tensor: Tensor


class Inner(nn.Module):
    """A unit inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = self.layer(x)
        return torch.tanh(y if weight is None else y + x @ (weight @ weight.t() @ self.layer.weight))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, until: int = BLOCKS) -> Tensor:
        for block in self.blocks[:until]:
            y = block(x)
            x = y.tensor if isinstance(y, (Hidden, Result)) else y if isinstance(y, Tensor) else y()
        return self.head(x)


class Run:
    """A model in training, plain (gradients are averaged by hand) or sharded.

    Attributes:
        step: From 0.
    """

    def __init__(self, model: Net, units: Sequence[nn.Module] | None = None, **options: Any) -> None:
        self.model, self.is_sharded, self.step = model, units is not None, 0
        for unit in (*units, model) if units is not None else ():
            fully_shard(unit, **options)
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.05, momentum=0.9, weight_decay=0.01)
        if self.is_sharded:
            fully_shard_optimizer(self.optimizer)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return no_sync(self.model) if self.is_sharded else contextlib.nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        with around_backward(self.model) if self.is_sharded else contextlib.nullcontext():
            loss.backward(**options)

    def update(self) -> None:
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if grads and not self.is_sharded:
            with torch.no_grad():
                mean = nn.utils.parameters_to_vector(grads) / dist.get_world_size()
                dist.all_reduce(mean)
                nn.utils.vector_to_parameters(mean, grads)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_inner(self, inner: str, numbers: Sequence[int] = range(BLOCKS)) -> None:
        for number in numbers:
            self.model.blocks[number].inner = inner  # type: ignore[assignment]

    def loss(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.model(x * scale).square().mean()

    def loss_or_features(self, x: Tensor, numbers: Sequence[int] = (0, 2)) -> Tensor:
        """An ordinary loss first, then features alone."""
        loss = self.loss(x)
        if self.step < ORDINARY:
            return loss
        return sum(self.model.blocks[number].features.square().mean() for number in numbers)  # type: ignore[return-value, union-attr, operator]

    def penalty(self) -> Tensor:
        return sum(block.penalty for block in self.model.blocks) * 0.01  # type: ignore[return-value, misc]


Program = Callable[[Run, Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- by the result ------------------------------------------------------------------------------------------------------


@program
def plain(run: Run, x: Tensor) -> None:
    run.backward(run.loss(x))


@program
def shared_module_twice(run: Run, x: Tensor) -> None:
    blocks = run.model.blocks
    for block in (*blocks, blocks[0], blocks[3], blocks[0]):
        x = block(x)
    run.backward(run.model.head(x).square().mean())


@program
def retain_graph(run: Run, x: Tensor) -> None:
    loss = run.loss(x)
    run.backward(loss, retain_graph=True)
    run.backward(loss * 2)


@program
def two_losses(run: Run, x: Tensor) -> None:
    for block in run.model.blocks[:3]:
        x = block(x)
    first = x.square().mean()
    for block in run.model.blocks[3:]:
        x = block(x)
    run.backward(first, retain_graph=True)
    run.backward(run.model.head(x).square().mean())


@program
def module_inside_itself(run: Run, x: Tensor) -> None:
    run.set_inner("itself", (1, 2, 4))
    run.backward(run.loss(x))


@program
def unit_inside_unit(run: Run, x: Tensor) -> None:
    run.backward(run.loss(x))


@program
def unused_parameters(run: Run, x: Tensor) -> None:
    run.backward(run.model(x, until=2 + run.step % 3).square().mean())


@program
def frozen_and_unfrozen(run: Run, x: Tensor) -> None:
    run.model.blocks[1].requires_grad_(run.step not in (1, 2))
    run.model.blocks[2].a.requires_grad_(run.step % 2 == 0)  # type: ignore[union-attr, operator]
    run.backward(run.loss(x))


@program
def self_of_own_layer(run: Run, x: Tensor) -> None:
    run.backward(run.model(run.model.pre(x)).square().mean())


@program
def branches(run: Run, x: Tensor) -> None:
    blocks = run.model.blocks
    a, b = blocks[1](blocks[0](x)), blocks[3](blocks[2](x))
    run.backward(run.model.head(blocks[4](a * b) + blocks[5](a - b)).square().mean())


@program
def tied_units(run: Run, x: Tensor) -> None:
    run.backward(run.loss(x))


@program
def inference_between(run: Run, x: Tensor) -> Any:
    loss = run.loss(x)
    with torch.inference_mode():
        first = run.model(x * 3)
    with torch.no_grad():
        second = run.model(x * 4)
    run.backward(loss)
    return first, second


@program
def two_forwards_other_order(run: Run, x: Tensor) -> None:
    first, second = run.loss(x), run.loss(x, 2)
    run.backward(second)
    run.backward(first)


@program
def two_forwards_interleaved(run: Run, x: Tensor) -> None:
    first, second = run.loss(x), run.loss(x, 2)
    run.backward(first)
    run.backward(second)


@program
def accumulation_no_sync(run: Run, x: Tensor) -> None:
    with run.no_sync():
        run.backward(run.loss(x))
        run.backward(run.model(x * 2, until=4).square().mean())
    run.backward(run.model(x * 3, until=3).square().mean())


@program
def accumulation_synced(run: Run, x: Tensor) -> None:
    run.backward(run.loss(x))
    run.backward(run.model(x * 2, until=3).square().mean())


@program
def backward_inside_forward(run: Run, x: Tensor) -> None:
    def inner(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            run.backward(output.square().mean() * 0.1, retain_graph=True)

    handle = run.model.blocks[2].register_forward_hook(inner)
    loss = run.loss(x)
    handle.remove()
    run.backward(loss)


@program
def forward_fails(run: Run, x: Tensor) -> None:
    if run.step == 1:
        run.set_inner("fails_once", (2,))
        with contextlib.suppress(ValueError):
            run.model(x)
    run.backward(run.loss(x))


def _fail(_: Any) -> None:
    raise ValueError("a backward that fails")


@program
def backward_fails(run: Run, x: Tensor) -> None:
    if run.step == 1:
        y = run.model.blocks[0](x)
        y.register_hook(_fail)
        with contextlib.suppress(ValueError):
            run.backward(run.model.blocks[2](y).sum())
        run.optimizer.zero_grad()
    run.backward(run.loss(x))


# -- writes -------------------------------------------------------------------------------------------------------------


@program
def write_in_forward(run: Run, x: Tensor) -> None:
    run.set_inner("write", (1, 3))
    run.backward(run.loss(x))


@program
def write_in_forward_after_use(run: Run, x: Tensor) -> None:
    run.set_inner("write_after_use", (1, 3))
    run.backward(run.loss(x))


@program
def step_between_forward_and_backward(run: Run, x: Tensor) -> None:
    loss, other = run.loss(x), run.loss(x, 2)
    run.backward(loss)
    run.update()
    run.backward(other)


@program
def activation_written(run: Run, x: Tensor) -> None:
    run.set_inner("activation_write", (1, 3))
    run.backward(run.loss(x))


# -- recomputed, compiled, transformed ----------------------------------------------------------------------------------


@program
def checkpoint_around(run: Run, x: Tensor) -> None:
    for block in run.model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    run.backward(run.model.head(x).square().mean())


@program
def checkpoint_around_reentrant(run: Run, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    for block in (*run.model.blocks, run.model.blocks[0]):
        x = checkpoint(block, x, use_reentrant=True)
    run.backward(run.model.head(x).square().mean())


@program
def checkpoint_inside(run: Run, x: Tensor) -> None:
    run.set_inner("checkpoint")
    run.backward(run.loss(x))


@program
def compiled(run: Run, x: Tensor) -> None:
    if run.step == 0:
        torch._dynamo.reset()
        for block in run.model.blocks[1:3]:
            block.compile(backend="aot_eager")
    run.backward(run.loss(x))


@program
def func_grad_inside(run: Run, x: Tensor) -> None:
    run.set_inner("func_grad", (1, 4))
    run.backward(run.loss(x))


@program
def func_jvp_inside(run: Run, x: Tensor) -> None:
    run.set_inner("func_jvp", (1, 4))
    run.backward(run.loss(x))


@program
def func_vmap_inside(run: Run, x: Tensor) -> None:
    run.set_inner("func_vmap", (1, 4))
    run.backward(run.loss(x))


@program
def func_grad_around(run: Run, x: Tensor) -> Any:
    found = torch.func.grad(lambda z: run.model(z).square().mean())(x)
    run.backward(run.loss(x))
    return found


@program
def func_jvp_around(run: Run, x: Tensor) -> Any:
    value, found = torch.func.jvp(run.model, (x,), (torch.ones_like(x),))
    run.backward((value + found).square().mean())
    return found


# -- by side doors ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_outputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    handles = [module.register_forward_hook(lambda _m, _i, output: found.append(output)) for module in modules]
    yield found
    for handle in handles:
        handle.remove()


@program
def feature_by_hook(run: Run, x: Tensor) -> None:
    with kept_outputs([run.model.blocks[number].a for number in (0, 2)]) as found:  # type: ignore[misc]
        loss = run.loss(x)
    run.backward(loss if run.step < ORDINARY else sum(one.square().mean() for one in found))  # type: ignore[arg-type]


@program
def feature_by_attribute(run: Run, x: Tensor) -> None:
    run.set_inner("attribute")
    run.backward(run.loss_or_features(x))


@program
def stored_penalty_alone(run: Run, x: Tensor) -> None:
    run.set_inner("penalty")
    loss = run.loss(x)
    run.backward(loss if run.step < ORDINARY else run.penalty())


@program
def stored_penalty_added(run: Run, x: Tensor) -> None:
    run.set_inner("penalty")
    run.backward(run.loss(x) + run.penalty())


@program
def early_exit_with_penalty(run: Run, x: Tensor) -> None:
    run.set_inner("penalty")
    run.model(x)
    for block in run.model.blocks[:2]:
        x = block(x)
    run.backward(run.model.head(x).square().mean() + run.penalty())


@program
def grad_to_input(run: Run, x: Tensor) -> Any:
    run.set_inner("input_term")
    x = x.clone().requires_grad_()
    loss = run.loss(x)
    found = torch.autograd.grad(run.model.blocks[0].penalty, x, retain_graph=True)[0]  # type: ignore[arg-type]
    again = torch.autograd.grad(loss, x, retain_graph=True)[0]
    run.backward(loss)
    return found, again


@program
def grad_to_weight(run: Run, x: Tensor) -> Any:
    loss = run.loss(x)
    weights = [run.model.blocks[1].a.weight, run.model.head.weight]  # type: ignore[union-attr]
    found = torch.autograd.grad(loss, weights, retain_graph=True)  # type: ignore[arg-type]
    run.backward(loss)
    return found


@program
def hidden_object(run: Run, x: Tensor) -> None:
    run.set_inner("object", (0, 2, 3))
    run.backward(run.loss(x))


@program
def hidden_closure(run: Run, x: Tensor) -> None:
    run.set_inner("closure", (0, 2, 3))
    run.backward(run.loss(x))


@program
def hidden_dataclass(run: Run, x: Tensor) -> None:
    run.set_inner("dataclass", (0, 2, 3))
    run.backward(run.loss(x))


@program
def hidden_everywhere_two_backwards(run: Run, x: Tensor) -> None:
    run.set_inner("object")
    loss, other = run.loss(x), run.loss(x, 2)
    run.backward(loss)
    run.backward(other)


@program
def frozen_perceptual(run: Run, x: Tensor) -> None:
    """The first three blocks are trained, the last three judge them by features."""
    blocks = run.model.blocks
    for block in blocks[3:]:
        block.requires_grad_(False)
    with kept_outputs([blocks[number].a for number in (3, 4)]) as found:  # type: ignore[misc]
        for block in blocks:
            x = block(x)
    run.backward(sum(one.square().mean() for one in found))  # type: ignore[arg-type]


@program
def checkpoint_inside_feature(run: Run, x: Tensor) -> None:
    run.set_inner("checkpoint_feature")
    run.backward(run.loss_or_features(x))


@program
def hooks_around(run: Run, x: Tensor) -> None:
    with save_on_cpu():
        loss = run.loss(x)
    run.backward(loss)


@program
def hooks_around_feature(run: Run, x: Tensor) -> None:
    run.set_inner("attribute")
    with saved_tensors_hooks(lambda t: t.clone() if t.numel() < 200 else t.detach(), lambda t: t):
        loss = run.loss_or_features(x)
    run.backward(loss)


@program
def hooks_that_keep_around_feature(run: Run, x: Tensor) -> None:
    run.set_inner("attribute")
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        loss = run.loss_or_features(x)
    run.backward(loss)


@program
def hooks_inside(run: Run, x: Tensor) -> None:
    run.set_inner("user_hooks")
    run.backward(run.loss(x))


@program
def hooks_inside_feature(run: Run, x: Tensor) -> None:
    run.set_inner("user_hooks")
    run.backward(run.loss_or_features(x))


@program
def compiled_body_feature(run: Run, x: Tensor) -> None:
    if run.step == 0:
        torch._dynamo.reset()
        for block in run.model.blocks[:3:2]:
            block.body = torch.compile(block.body, backend="aot_eager")  # type: ignore[arg-type, assignment]
    run.set_inner("body_feature", (0, 2))
    run.backward(run.loss_or_features(x))


@program
def double_backward_to_input(run: Run, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(run.loss(x), x, create_graph=True)[0]
    run.backward(slope.square().sum())


@program
def double_backward_of_weights(run: Run, x: Tensor) -> None:
    run.backward(run.loss(x), create_graph=True)
    run.update()


@program
def weight_as_argument_of_inner_unit(run: Run, x: Tensor) -> None:
    run.backward(run.loss_or_features(x, (1, 3)))


def build(name: str, **options: Any) -> Run:
    """A run of a program, sharded if there are options (`sharding=...`)."""
    torch.manual_seed(0)
    model = Net()
    units: list[nn.Module] = [*model.blocks]
    if name in ("unit_inside_unit", "weight_as_argument_of_inner_unit"):
        for block in model.blocks[1:4]:
            block.child, block.inner = Inner(), "nested" if name == "unit_inside_unit" else "nested_weight"  # type: ignore[assignment]
        units = [*(block.child for block in model.blocks[1:4]), *units]  # type: ignore[list-item, misc]
    if name == "tied_units":
        model.blocks[3].a.weight = model.blocks[0].a.weight  # type: ignore[union-attr]
        model.blocks[4].b = model.blocks[2].b
    return Run(model, units if options else None, **options)
