"""The module that a description asks for; the same for plain PyTorch and for the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.description import Block, Description
from tests.fuzzing.hooks import put_hooks

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


class KeepsWeight(torch.autograd.Function):
    """A product whose backward reads the weight from an attribute, where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return gradient @ ctx.weight if of_x else None, gradient.t() @ x if of_weight else None


def loss_of(value: Tensor) -> Tensor:
    """A mean of squares, or the number itself."""
    value = value.float() if value.dtype is torch.bfloat16 else value
    return value.square().mean() if value.dim() else value


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
        self.kept: list[Tensor] = []
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
        if spec.keeps == "hook":
            layer = self.inner.layer if spec.kind == "nested" else self.linear
            layer.register_forward_hook(lambda _module, _inputs, output: self.kept.append(output))

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
        if self.spec.keeps == "penalty":
            self.kept.append(self.linear.weight.square().mean())
        elif self.spec.keeps == "sum":
            self.kept.append(1 + self.linear.weight.sum() / 8)  # no digits are lost where the sum is nearly zero
        by_function = self.spec.keeps == "function"
        x = KeepsWeight.apply(x, self.linear.weight) + self.linear.bias if by_function else self.linear(x)  # type: ignore[no-untyped-call]
        if self.spec.keeps in ("map", "function"):
            self.kept.append(x)
        x = torch.tanh(x)
        if self.spec.kind == "nested":
            x = self.inner(x)
        if self.spec.kind in ("mlp", "narrow"):
            x = self.back(x)
        if self.spec.keeps == "branch":
            self.kept.append(self.linear(x))
        x = x.to(given)
        if self.spec.result == "dict":
            return {"value": x, "note": None}
        return Hidden(x) if self.spec.result == "hidden" else x


class JudgeLayer(nn.Module):
    """A unit of the frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.kept: list[Tensor] = []
        self.layer.register_forward_hook(lambda _module, _inputs, output: self.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


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
        if model.before in ("layer", "block"):
            self.stem = nn.Linear(DIM, DIM)
        elif model.before:
            self.gain = nn.Parameter(torch.linspace(0.8, 1.2, DIM))
        if model.judge:
            judges = [nn.Sequential(*(JudgeLayer() for _ in range(3))).requires_grad_(False)]
            # The module of a Trainer has it as a part; a list does not show it to the root.
            self.judges = judges if case.program.loop == "raw" else nn.ModuleList(judges)

    def before(self: Any, x: Tensor, inside: bool) -> Tensor:
        """What a step does with its batch before it calls the root. `inside`: in a training_step, where the root's parameters are shown."""
        how = self.case.model.before
        if how in ("layer", "block"):
            x = self.stem(x)
        if how == "block":
            x = x + shown(self.blocks[0](x))
        return x * self.gain if how == "parameter" and inside else x

    def exit_early(self: Any, x: Tensor, skipped: tuple[int, ...]) -> Tensor:
        """Layer by layer, up to the last block that keeps something."""
        last = max((index for index, block in enumerate(self.blocks) if block.spec.keeps), default=len(self.blocks))
        x = self.inputs(x)
        for index, block in enumerate(self.blocks[: last + 1]):
            if index not in skipped:
                x = x + shown(block(x))
        return x

    def judged(self: Any, x: Tensor) -> Tensor:
        """What the frozen network makes of a result."""
        judge = self.judges[0]
        for layer in judge:
            layer.kept.clear()
        result = judge(x)
        return judge[1].kept[0] if self.case.model.judge == "feature" else result

    def begin_to_keep(self: Any) -> None:
        """Forget what blocks kept."""
        for block in self.blocks:
            block.kept.clear()

    def side_loss(self: Any) -> Tensor | None:
        """Of all that blocks keep with a graph, if there is any."""
        found = [loss_of(value) for block in dict.fromkeys(self.blocks) for value in block.kept if value.requires_grad]
        return sum(found) if found else None  # type: ignore[return-value]

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
        made = make(case).to(case.configuration.device)
        if case.model.judge:
            made.judges[0].to(case.configuration.device)
        if not case.model.hooks_late:
            put_hooks(case, made)
        return made
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
