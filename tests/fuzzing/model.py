"""The module that a description asks for; the same for plain PyTorch and for the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.description import Block, Description

DIM = 4
ROWS = 3  # of each rank's batch
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "mixed": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(case: Description) -> torch.dtype:
    """What the model is built in."""
    return _DTYPES[case.configuration.precision]


class Hidden:
    """A result into which nobody can look."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def shown(result: Any) -> Tensor:
    """The tensor in a result."""
    if isinstance(result, Hidden):
        return result.value
    return result["value"] if isinstance(result, dict) else result


class Inner(nn.Module):
    """A unit inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class BlockModule(nn.Module):
    """One block; see `Block` for what it does."""

    def __init__(self, spec: Block) -> None:
        super().__init__()
        self.spec = spec
        width = {"mlp": 2 * DIM, "narrow": 2}.get(spec.kind, DIM)
        if spec.kind == "norm":
            self.norm = nn.LayerNorm(DIM)
        if spec.kind == "cube":
            self.cube = nn.Parameter(torch.randn(2, 3, DIM) / 3)
        self.linear = nn.Linear(DIM, width)
        if spec.kind == "nested":
            self.inner = Inner()
        if width != DIM:
            self.back = nn.Linear(width, DIM, bias=False)
        if spec.unused:
            self.unused = nn.Parameter(torch.randn(3))
        if spec.dtype:
            self.to(getattr(torch, spec.dtype))

    def forward(self, x: Tensor) -> Any:
        if self.spec.clamps:
            self.linear.weight.data.clamp_(-0.2, 0.2)
        given = x.dtype
        if self.spec.dtype:
            x = x.to(getattr(torch, self.spec.dtype))
        if self.spec.kind == "norm":
            x = self.norm(x)
        if self.spec.kind == "cube":
            x = x * self.cube.sum((0, 1))
        x = torch.tanh(self.linear(x))
        if self.spec.kind == "nested":
            x = self.inner(x)
        if self.spec.kind in ("mlp", "narrow"):
            x = self.back(x)
        x = x.to(given)
        if self.spec.result == "dict":
            return {"value": x, "note": None}
        return Hidden(x) if self.spec.result == "hidden" else x


class Parts:
    """What the root is made of, for a plain module and for a LightningModule."""

    def build(self: Any, case: Description) -> None:
        self.case = case
        model = case.model
        self.inputs = nn.Linear(DIM, DIM)
        made: list[nn.Module] = []
        for spec in model.blocks:
            block = made[spec.same_as] if spec.same_as >= 0 else BlockModule(spec)
            if spec.tied_to >= 0 and spec.same_as < 0:
                block.linear.weight = made[spec.tied_to].linear.weight
            made.append(block)
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(DIM, DIM)
        if model.tied:
            self.head.weight = self.inputs.weight
        if model.scale:
            self.scale = nn.Parameter(torch.tensor(0.7))
        if model.row:
            self.row = nn.Parameter(torch.linspace(0.5, 1.5, DIM)[None])
        if model.empty:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if model.unused:
            self.unused = nn.Parameter(torch.randn(2, 3))
        for spec, block in zip(model.blocks, made, strict=True):
            if spec.frozen and spec.same_as < 0:
                (block.linear.weight if spec.frozen == "weight" else block).requires_grad_(False)
        if model.frozen:
            self.inputs.bias.requires_grad_(False)
            if not model.tied:
                self.inputs.weight.requires_grad_(False)

    def compute(self: Any, x: Tensor, skipped: tuple[int, ...] = ()) -> Any:
        model = self.case.model
        x = self.inputs(x)
        if model.row:
            x = x * self.row
        for index, (spec, block) in enumerate(zip(model.blocks, self.blocks, strict=True)):
            if index in skipped:
                continue
            for _ in range(spec.calls):
                if spec.checkpoint == "kept" and torch.is_grad_enabled():
                    with torch.set_grad_enabled(x.requires_grad):
                        result = block(x)
                elif spec.checkpoint and torch.is_grad_enabled():
                    result = checkpoint(block, x, use_reentrant=spec.checkpoint == "reentrant")
                else:
                    result = block(x)
                x = x + shown(result)
        x = self.head(x)
        if model.scale:
            x = x * self.scale
        if model.empty:
            x = x + self.empty.sum()
        return Hidden(x) if model.hidden else x


class Net(Parts, nn.Module):
    """The root of a loop of one's own."""

    def __init__(self, case: Description) -> None:
        super().__init__()
        self.build(case)

    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Any:
        return self.compute(x, skipped)


def seeded(case: Description, make: Any = Net, seed: int = 0) -> Any:
    """A root in the dtype of the case, with the same values for the same seed."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(case))
    try:
        return make(case).to(case.configuration.device)
    finally:
        torch.set_default_dtype(default)


def batch(case: Description, turn: tuple[int, int, int], rank: int) -> Tensor:
    """`[ROWS, DIM]` for a step, a microbatch, one of its forwards and a rank."""
    step, micro, which = turn
    generator = torch.Generator().manual_seed(10000 * case.program.data + 1000 * step + 100 * micro + 10 * which + rank)
    values = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    return values.to(case.configuration.device, dtype_of(case))


def skipped_blocks(case: Description, turn: tuple[int, int, int], rank: int) -> tuple[int, ...]:
    """Blocks that this forward leaves out."""
    step, micro, _ = turn
    return tuple(
        index
        for index, block in enumerate(case.model.blocks)
        if (block.dropped == "all" and (step + micro) % 2)
        or (block.dropped == "by rank" and (step + micro + rank + index) % 2)
    )
