"""What is measured: a chain of units of four parameters so small that a step is host time alone, under one of three engines.

Units compute with two `Linear` layers of 8 x 8; the root owns one more. Everything is float32; the optimizer is AdamW as it comes.
A checkout's package is imported from its folder, so that today's script can measure the code of any commit; only public names are used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

PACKAGE = "lightning_mfsdp"
DIM, ROWS = 8, 4
Phase: TypeAlias = Literal["forward", "backward"]


class Block(nn.Module):
    """A unit of four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class _Border(torch.autograd.Function):
    """Calls something when a backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return grads[0], None


@dataclass
class Watched:
    """Which block is watched, and what is called at the borders of its forward and backward."""

    index: int
    begin: Callable[[Phase], None]
    end: Callable[[Phase], None]


class Chain(nn.Module):
    """Equal blocks and an output layer.

    Attributes:
        watched: A block whose forward and backward are framed; for counting calls.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.out = nn.Linear(DIM, DIM)
        self.watched: Watched | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            watched = self.watched
            if watched is None or index != watched.index:
                x = block(x)
                continue
            begin, end = watched.begin, watched.end
            x = _Border.apply(x, lambda: end("backward"))  # noqa: B023
            begin("forward")
            x = block(x)
            end("forward")
            x = _Border.apply(x, lambda: begin("backward"))  # noqa: B023
        return self.out(x)


@dataclass(frozen=True)
class Subject:
    """A model ready to train; `step` is forward, backward, optimizer and zero_grad."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch() -> Tensor:
    """`[ROWS, DIM]`."""
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


def chain(blocks: int) -> Chain:
    torch.manual_seed(0)
    return Chain(blocks)


def plain(blocks: int) -> Subject:
    """PyTorch as it is."""
    model = chain(blocks)
    return Subject(model, torch.optim.AdamW(model.parameters()))


def fsdp2(blocks: int) -> Subject:
    """Torch's own fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = chain(blocks)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return Subject(model, torch.optim.AdamW(model.parameters()))


class Package:
    """A checkout's package, imported beside others of the same name; `active` shows it to imports inside functions."""

    def __init__(self, checkout: Path) -> None:
        outside = self._taken_out()
        sys.path.insert(0, str(checkout))
        try:
            self.module: ModuleType = importlib.import_module(PACKAGE)
            found = Path(str(self.module.__file__)).resolve().parents[1]
            if found != checkout.resolve():
                raise SystemExit(f"Error: {PACKAGE} came from {found}, not from {checkout}")
        finally:
            sys.path.remove(str(checkout))
        self._modules = self._taken_out()
        sys.modules.update(outside)

    @staticmethod
    def _taken_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
        return {name: sys.modules.pop(name) for name in names}

    def activate(self) -> None:
        """From now on imports find this one."""
        self._taken_out()
        sys.modules.update(self._modules)

    def subject(self, blocks: int) -> Subject:
        """The chain under this checkout's engine."""
        self.activate()
        model = chain(blocks)
        for block in model.blocks:
            self.module.fully_shard(block)
        self.module.fully_shard(model)
        return Subject(model, self.module.fully_shard_optimizer(torch.optim.AdamW(model.parameters())))
