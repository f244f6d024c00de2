"""What is expected: plain PyTorch on one process.

Every rank's batch goes through one model, and the loss is the mean of theirs, so the gradients are those that ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzzing.description import Description, Micro
from tests.fuzzing.model import seeded
from tests.fuzzing.running import Event, Run, make_optimizer, run_loop


class PlainRun(Run):
    """One process, plain PyTorch, the batches of all ranks.

    Args:
        case: What to run.
        nudge: By which share every element of the initial weights is changed, up or down.
    """

    def __init__(self, case: Description, nudge: float = 0.0) -> None:
        super().__init__(case, range(case.configuration.ranks))
        self._mixed = case.configuration.precision == "mixed"
        if self._mixed:  # weights are cast around the forward, and a block computed again would find them uncast
            kept = {"reentrant": "kept"}
            blocks = tuple(replace(block, checkpoint=kept.get(block.checkpoint, "")) for block in case.model.blocks)
            self.case = replace(case, model=replace(case.model, blocks=blocks))
        self.model = seeded(self.case)
        if nudge:
            generator = torch.Generator().manual_seed(case.program.data)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                    changed = parameter * (1 + nudge * signs.to(parameter))
                    if parameter.dtype == torch.bfloat16:  # half a unit is rounded away: a whole one
                        changed = torch.nextafter(parameter, (signs * nudge * torch.inf).to(parameter))
                    parameter.copy_(changed)
        self.optimizer = make_optimizer(case, self.model.parameters())
        self._averages = case.configuration.precision in ("mixed", "bfloat16")
        if self._averages:  # gradients, as ranks do: a third of a loss is rounded in every operation on the way
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient / len(self.ranks))
        if case.configuration.late_root:
            self.go_back_early()
        self.start()

    def once(self, x: Tensor, skipped: tuple[int, ...], exits: bool = False) -> Tensor:
        return super().once(x.bfloat16() if self._mixed else x, skipped, exits)

    @contextmanager
    def casting(self) -> Iterator[None]:
        if not self._mixed:
            yield
            return
        nets = [self.model, *(self.model.judges if self.case.model.judge else ())]
        cast = {parameter: parameter.bfloat16() for net in nets for parameter in net.parameters()}
        tables = [module._parameters for module in dict.fromkeys(module for net in nets for module in net.modules())]
        before = [dict(table) for table in tables]
        try:
            for table in tables:  # torch.func.functional_call leaves cast weights in modules that are there twice
                table.update({key: cast[value] for key, value in table.items() if value is not None})
            yield
        finally:
            for table, values in zip(tables, before, strict=True):
                table.update(values)

    def mean(self, losses: list[Tensor]) -> Tensor:
        return sum(losses) if self._averages else super().mean(losses)  # type: ignore[return-value]

    def gradients(self) -> dict[str, tuple[int, Tensor | None]]:
        found = self.model.named_parameters()
        return {name: (0, None if p.grad is None else p.grad.detach().clone()) for name, p in found}

    def finish(self) -> None:
        self.events.append(Event("weights", {n: (0, p.detach().clone()) for n, p in self.model.named_parameters()}))
        self.events.append(self.events[-1]._replace(tag="whole weights"))
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        state = {
            f"{names[id(parameter)]}: {key}": (0, torch.as_tensor(value))
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }
        self.events.append(Event("optimizer state", state))
        self.evaluate((9, 0), Micro())
        self.note("gradient memory", bytes=0)
        self.note("reductions", too_many=0)


def run_plainly(case: Description, nudge: float = 0.0) -> list[Event]:
    """The expected events, or those of weights that begin a nudge away."""
    return run_loop(PlainRun(case, nudge))
