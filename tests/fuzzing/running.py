"""A program, step by step: the same for plain PyTorch (plain.py) and for the engine (sharded.py).

What is compared is noted on the way, as `Event`s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.fuzzing.description import Description, Micro, Step
from tests.fuzzing.hooks import put_hooks, put_step_hooks
from tests.fuzzing.model import batch, loss_of, shown, skipped_blocks

FACTOR = 0.9  # of weights that are written
LIMIT = 0.05  # of clipping: it bites


class Event(NamedTuple):
    """What was seen: by name, the first row of dim 0 that is here and the rows, or `None` for what is not there."""

    tag: str
    values: dict[str, tuple[int, Tensor | None]]


def _apart(value: Any) -> Tensor:
    """A copy that keeps nothing alive."""
    return torch.as_tensor(value).detach().clone()


class Run:
    """The program, on whatever model and optimizer a subclass makes.

    Attributes:
        ranks: Whose batches this execution computes with.
        events: What was seen so far.
    """

    model: Any
    optimizer: Any

    def __init__(self, case: Description, ranks: Sequence[int]) -> None:
        self.case, self.ranks = case, list(ranks)
        self.events: list[Event] = []
        self._saved: dict[str, Tensor] = {}
        self._stale: list[Tensor] = []
        self._held: list[Any] = []
        self._trained: list[str] = []
        self.inside = False  # a training_step computes its loss

    def start(self) -> None:
        """The model and the optimizer are there: keep what later steps come back to."""
        if self.case.model.hooks_late:
            put_hooks(self.case, self.model)
            put_step_hooks(self.case, self.optimizer)
        self._trained = [name for name, p in self.model.blocks[0].named_parameters() if p.requires_grad]
        if any(step.state == "restore" for step in self.case.program.steps):
            self._save()

    # -- what differs -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, skipped: tuple[int, ...]) -> Any:
        return self.model(x, skipped)

    def casting(self) -> Any:
        """Around all that computes with weights."""
        return nullcontext()

    def around_backward(self) -> Any:
        return nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        with self.around_backward():
            loss.backward(**options)  # type: ignore[no-untyped-call]

    def holding_back(self, sync: str) -> Any:
        return nullcontext()

    def clip_norm(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)

    def writing(self) -> Any:
        return nullcontext()

    def gradients(self) -> dict[str, tuple[int, Tensor | None]]:
        raise NotImplementedError

    def shown_gradients(self) -> dict[str, tuple[int, Tensor | None]]:
        """What `p.grad` says."""
        return self.gradients()

    def unsharding(self, module: nn.Module) -> Any:
        """Inside, parameters are whole."""
        return nullcontext()

    def note(self, tag: str, **values: Any) -> None:
        self.events.append(Event(tag, {name: (0, _apart(value)) for name, value in values.items()}))

    def mean(self, losses: list[Tensor]) -> Tensor:
        """The loss of which gradients are wanted."""
        return sum(losses) / len(losses)  # type: ignore[return-value]

    def go_back_early(self) -> None:
        """A backward of the first unit alone, before there is a root."""
        block = next(block for block in self.model.blocks if block.spec.unit)
        losses = [shown(block(batch(self.case, (8, 0, 0), rank))).square().mean() for rank in self.ranks]
        self.mean(losses).backward()

    # -- forwards and backwards ----------------------------------------------------------------------------------------

    def losses(
        self,
        turn: tuple[int, int, int],
        inputs: list[Tensor] | None = None,
        side: str = "",
        sides: list[Tensor] | None = None,
        weights: list[list[Tensor]] | None = None,
    ) -> list[Tensor]:
        """One for each rank; see `Micro.side`.

        Args:
            turn: Of the batches.
            inputs: Collects what gradients are asked of.
            side: What the losses have of what blocks keep.
            sides: Collects losses of that.
            weights: Collects what hooks see, for each rank.
        """
        found = []
        for rank in self.ranks:
            x = batch(self.case, turn, rank)
            if inputs is not None:
                inputs.append(x.requires_grad_())
            with ExitStack() as stack:
                stack.enter_context(self.casting())
                if weights is not None:
                    weights.append([])
                    for block in dict.fromkeys(self.model.blocks):
                        stack.callback(block.linear.register_forward_hook(_keeps_weight(weights[-1])).remove)
                self.model.begin_to_keep()
                out = self.once(x, skipped_blocks(self.case, turn, rank), exits=side == "exit")
                kept = self.model.side_loss()
            loss = loss_of(out)
            if sides is not None:
                sides.append(torch.zeros_like(loss) if kept is None else kept)
            elif side and kept is not None:
                loss = loss + kept if side == "beside" else kept
            found.append(loss)
        return found

    def once(self, x: Tensor, skipped: tuple[int, ...], exits: bool = False) -> Tensor:
        """What a step computes from a batch."""
        x = self.model.before(x, self.inside)
        out: Tensor = self.model.exit_early(x, skipped) if exits else shown(self.forward(x, skipped))
        return self.model.judged(out) if self.case.model.judge and not exits else out

    def tangents(self, turn: tuple[int, int, int]) -> None:
        """torch.func.jvp of a forward."""
        found = {}
        for rank in self.ranks:
            x, skipped = batch(self.case, turn, rank), skipped_blocks(self.case, turn, rank)
            with self.casting():
                _, found[str(rank)] = torch.func.jvp(
                    lambda x, skipped=skipped: self.once(x, skipped), (x,), (torch.ones_like(x),)
                )
        self.note("tangent", **found)

    def ask_for_weights(self, losses: list[Tensor], weights: list[list[Tensor]] | None) -> None:
        """autograd.grad of what hooks saw, or of what the model shows now."""
        seen: dict[str, tuple[int, Tensor | None]] = {}
        for number, (rank, loss) in enumerate(zip(self.ranks, losses, strict=True)):
            at_rest = [block.linear.weight for block in self.model.blocks if not block.spec.dropped]
            asked = [weight for weight in (at_rest if weights is None else weights[number]) if weight.requires_grad]
            if asked and loss.requires_grad:
                with self.around_backward():
                    found = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=weights is not None)
                seen |= {f"{rank} {n}": (0, None if one is None else _apart(one)) for n, one in enumerate(found)}
        self.events.append(Event("weight gradient", seen))

    def evaluate(self, at: tuple[int, int], micro: Micro) -> None:
        with torch.inference_mode() if micro.inference else torch.no_grad():
            losses = self.losses((*at, 5))
        self.note_losses("evaluation", losses)

    def note_losses(self, tag: str, losses: list[Tensor]) -> None:
        named = {str(rank): loss.detach().clone() for rank, loss in zip(self.ranks, losses, strict=True)}
        self.note(tag, **named)

    def loss(
        self,
        at: tuple[int, int],
        micro: Micro,
        share: float,
        backward: Callable[..., Any],
        between: Callable[[], None] = lambda: None,
    ) -> Tensor | None:
        """All of a microbatch but its last backward; returns the loss for that, if there is one."""
        self.inside = True
        try:
            return self._loss(at, micro, share, backward, between)
        finally:
            self.inside = False

    def _loss(
        self, at: tuple[int, int], micro: Micro, share: float, backward: Callable[..., Any], between: Callable[[], None]
    ) -> Tensor | None:
        if micro.evaluates == "before":
            self.evaluate(at, micro)
        inputs: list[Tensor] | None = [] if micro.kind == "input_grad" else None
        side = micro.side if micro.side in ("beside", "alone", "exit") else ""
        sides: list[Tensor] | None = [] if micro.side in ("first", "last") else None
        weights: list[list[Tensor]] | None = [] if micro.kind == "weight_grad" else None
        if micro.kind == "jvp":
            self.tangents((*at, 0))
        first = self.losses((*at, 0), inputs, side, sides, weights)
        self.note_losses("loss", first)
        mean = self.mean(first)
        loss = mean * share
        if micro.poisoned:
            loss = loss * float("nan")
        if micro.kind in ("two_forwards", "interleaved", "stale"):
            second = self.losses((*at, 1), side=side)
            self.note_losses("second loss", second)
            other = self.mean(second) * share
        if micro.evaluates == "between":
            self.evaluate(at, micro)
        between()
        if micro.kind == "no_backward":
            self._held.append(loss)
            return None
        if micro.kind == "retained":
            backward(loss, retain_graph=True)
        elif micro.kind == "two_losses":
            backward(loss, retain_graph=True)
            return loss * 0.3
        elif micro.kind == "two_forwards":
            return loss + other
        elif micro.kind == "interleaved":
            backward(loss)
            return other
        elif micro.kind == "two_backwards":
            backward(loss)
            second = self.losses((*at, 1), side=side)
            self.note_losses("second loss", second)
            return self.mean(second) * share
        elif micro.kind == "input_grad":
            assert inputs is not None
            with self.around_backward():
                found = torch.autograd.grad(sum(first), inputs, retain_graph=True)  # type: ignore[arg-type]
            self.note(
                "input gradient", **{str(rank): gradient for rank, gradient in zip(self.ranks, found, strict=True)}
            )
        elif micro.kind in ("weight_grad", "rest_grad"):
            self.ask_for_weights(first, weights)
        elif micro.kind == "stale":
            self._stale.append(loss)
            return other
        if sides is not None:
            return self._apart_from(loss, sides, micro, share, backward)
        return loss

    def _apart_from(
        self, loss: Tensor, sides: list[Tensor], micro: Micro, share: float, backward: Callable[..., Any]
    ) -> Tensor:
        """A backward of the loss, or of what blocks keep; returns the other of both."""
        self.note_losses("side loss", sides)
        other = self.mean(sides) * share
        if not other.requires_grad:
            return loss
        first, last = (other, loss) if micro.side == "first" else (loss, other)
        # Losses of weights have graphs of their own.
        backward(first, retain_graph=any(block.keeps not in ("", "penalty", "sum") for block in self.case.model.blocks))
        return last

    def microbatch(
        self, at: tuple[int, int], micro: Micro, share: float, backward: Callable[..., Any], between: Callable[[], None]
    ) -> None:
        with self.holding_back(micro.sync):
            loss = self.loss(at, micro, share, backward, between)
            if loss is not None:
                backward(loss)
        if micro.evaluates == "after":
            self.evaluate(at, micro)

    # -- around the step -----------------------------------------------------------------------------------------------

    def whole_step(self, number: int, step: Step, backward: Callable[..., Any], optimizer: Any) -> None:
        """A step of a raw loop or of manual optimization."""
        self.begin(step)
        if step.zero_at == "before":
            self.clear(step)
        for index, micro in enumerate(step.micros):
            clears = index == 0 and step.zero_at == "between"
            between = (lambda: self.clear(step)) if clears else (lambda: None)
            self.microbatch((number, index), micro, 1 / len(step.micros), backward, between)
        if step.takes_step:
            self.look_and_edit(step)
            optimizer.step()
        for loss in self._stale:
            backward(loss)
        self._stale.clear()
        if step.zero_at == "after":
            self.clear(step)

    def begin(self, step: Step) -> None:
        """What a training_step does first."""
        if step.write_at == "inside":
            self.write(step)
        if step.state_at == "inside":
            self.state(step)

    def end(self, step: Step) -> None:
        """After a step, outside of training_step."""
        self._held.clear()
        if self.case.program.decays:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.7
        if step.write_at == "end":
            self.write(step)
        if step.state_at == "end":
            self.state(step)
        if step.freezes:
            for name, parameter in self.model.blocks[0].named_parameters():
                if name in self._trained:
                    parameter.requires_grad_(step.freezes == "thaw")

    def clear(self, step: Step) -> None:
        if step.zero:
            where, how = step.zero.split()
            (self.optimizer if where == "optimizer" else self.model).zero_grad(set_to_none=how == "none")

    def look_and_edit(self, step: Step) -> None:
        self.events.append(Event("gradients", self.gradients()))
        if step.edit:
            self.events.append(Event("shown gradients", self.shown_gradients()))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if step.edit == "clip_norm":
            self.note("norm", norm=self.clip_norm().detach().clone())
        elif step.edit == "clip_value":
            torch.nn.utils.clip_grad_value_(parameters, LIMIT / 5)
        elif step.edit == "torch_clip_norm":
            norm = torch.nn.utils.clip_grad_norm_(parameters, LIMIT)
            self.note("norm", norm=torch.tensor(norm.item(), dtype=norm.dtype))
        elif step.edit == "drop_one":
            parameters[-1].grad = None
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if step.edit == "in_place":
                parameter.grad.mul_(0.5)
            elif step.edit == "out_of_place":
                parameter.grad = parameter.grad * 0.5
            elif step.edit == "data":
                parameter.grad.data.mul_(0.5)
            elif step.edit == "view":
                with torch.enable_grad():
                    parameter.grad.view(-1).mul_(0.5)

    def write(self, step: Step) -> None:
        if not step.write:
            return
        with self.writing() if step.write == "unshard" else nullcontext(), torch.no_grad():
            targets = {
                name: parameter
                for name, parameter in self.model.named_parameters()
                if step.write_to == "all" or (step.write_to == "blocks") == name.startswith("blocks.")
            }
            if step.write == "load_state_dict":
                values = {name: value * FACTOR for name, value in self.model.state_dict().items() if name in targets}
                self.model.load_state_dict(values, strict=False)
            for parameter in targets.values():
                if step.write in ("in_place", "unshard"):
                    parameter.mul_(FACTOR)
                elif step.write == "copy":
                    parameter.copy_(parameter.detach() * FACTOR)
                elif step.write == "data":
                    parameter.data.mul_(FACTOR)
                elif step.write == "view":
                    with torch.enable_grad():
                        parameter.data.view(-1).mul_(FACTOR)
                elif step.write == "assign_data":
                    parameter.data = parameter.data * FACTOR

    def state(self, step: Step) -> None:
        if step.state == "look":
            found = self.model.state_dict()
            self.note("kinds in state_dict", kinds=len({isinstance(value, DTensor) for value in found.values()}))
            whole = {
                name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()
            }
            self.events.append(Event("state", {name: (0, value.detach().clone()) for name, value in whole.items()}))
        elif step.state == "unshard_part":
            with self.unsharding(self.model.head):
                whole = {name: (0, p.detach().clone()) for name, p in self.model.head.named_parameters()}
            self.events.append(Event("unsharded part", whole))
        elif step.state == "save":
            self._save()
        elif step.state == "restore":
            self.model.load_state_dict(self._saved)
        elif step.state == "optimizer":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _save(self) -> None:
        self._saved = {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def _keeps_weight(kept: list[Tensor]) -> Callable[..., None]:
    """A forward hook."""
    return lambda module, _inputs, _output: kept.append(module.weight)


class Lars(torch.optim.Optimizer):
    """Looks at norms of whole tensors, so it works on sharded tensors and not on their rows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = (1 + parameter.norm()) / (1 + parameter.grad.norm())
                    parameter.sub_(parameter.grad * ratio * group["lr"])


def make_optimizer(case: Description, parameters: Any) -> torch.optim.Optimizer:
    """Its steps are no quotients of rounding errors: eps is large. Nor do kernels depend on whether parameters are DTensors."""
    kind, parameters = case.program.optimizer, list(parameters)
    if case.program.groups and len(parameters) > 1:
        parameters = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
    made: torch.optim.Optimizer
    if kind == "lars":
        made = Lars(parameters)
    elif kind == "adamw":
        made = torch.optim.AdamW(parameters, lr=0.05, eps=0.1, weight_decay=0.1, foreach=False)
    elif kind == "adagrad":
        made = torch.optim.Adagrad(parameters, lr=0.05, eps=0.1, foreach=False)
    else:
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0, foreach=False)
    if not case.model.hooks_late:
        put_step_hooks(case, made)
    return made


def run_loop(run: Any) -> list[Event]:
    """A loop of one's own."""
    for number, step in enumerate(run.case.program.steps):
        run.whole_step(number, step, run.backward, run.optimizer)
        run.end(step)
    run.finish()
    return run.events
