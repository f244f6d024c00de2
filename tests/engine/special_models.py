"""Models with one unusual thing each, for test_special_parameters.py. Inputs are `[rows, 6]`; the loss is a mean over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

DIM = 6


class Chain(nn.Module):
    """`first`, `second` and `last` one after the other; `last` has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 7)
        self.second = nn.Linear(7, DIM)
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).flatten()


def frozen() -> nn.Module:
    model = Chain()
    model.first.bias.requires_grad_(False)
    model.second.requires_grad_(False)
    return model


class TiedInside(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.mirror = nn.Linear(DIM, 7, bias=False)
        self.mirror.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mirror(x).mean(-1)


class Ids(nn.Module):
    """Embedding and head; ids come from the sign pattern of x."""

    def __init__(self, *, tied: bool, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, DIM, sparse=sparse)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :4] > 0).sum(-1)
        return self.head(torch.tanh(self.middle(self.embedding(ids)))).logsumexp(-1)


class Sometimes(nn.Module):
    """`branch` runs only where some row of the batch is positive in column 0; `never` never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, 1)
        self.branch = nn.Linear(DIM, 1)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        wanted = (x[:, :1] > 1.0).to(x)
        return (y + wanted * self.branch(x) if wanted.any() else y).flatten()


class Twice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(torch.tanh(self.again(x))))


class OddShapes(Chain):
    """0-D, one row, no rows, three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.row = nn.Parameter(torch.randn(1, DIM))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.cube = nn.Parameter(torch.randn(2, 3, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.row + torch.einsum("abi,ri->ri", self.cube, x) + self.nothing.sum()
        return super().forward(x) * self.scale


class Buffers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-1, 1, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x + self.offset) * self.calls


class SharedModule(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.second

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.alias(self.first(x)).mean(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(x.unflatten(-1, (3, 2)))
        return self.last(output[:, -1]).flatten() + hidden.mean((0, 2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.last = weight_norm(nn.Linear(DIM, 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(-1, (3, 2))
        return self.last(self.attention(tokens, key=tokens, value=tokens, need_weights=False)[0].flatten(1)).flatten()


def with_pre_hook() -> nn.Module:
    """As `weight_norm` and pruning do: a hook before forward looks at the module's own weight."""
    model = Chain()
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))
    return model


class AttentionInPlace(Attention):
    """Attention returns a view, into which the caller writes."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(-1, (3, 2))
        attended = self.attention(tokens, key=tokens, value=tokens, need_weights=False)[0]
        attended += tokens
        return self.last(attended.flatten(1)).flatten()


class Images(nn.Module):
    """Convolutions, a norm that does not look at other rows, an activation that writes into its unit's input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 2)
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(10, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.conv(x.view(-1, 1, 2, 3))).flatten()


@dataclass
class Record:
    value: Tensor
    note: str = "note"


class Pair(NamedTuple):
    value: Tensor
    other: Tensor | None


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Returns(nn.Module):
    """`inner` returns its result in some container, and takes its input by keyword among things that are no tensors."""

    class Inner(nn.Module):
        def __init__(self, wrap: Callable[[Tensor], object]) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.wrap = wrap
            self.seen: Tensor | None = None

        def forward(self, *, x: Tensor, mask: Tensor, options: dict[str, object]) -> object:
            self.seen = self.linear(x) * mask * options["factor"]
            return self.wrap(self.seen)

    def __init__(self, wrap: Callable[[Tensor], object], unwrap: Callable[[Returns.Inner, object], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.inner = Returns.Inner(wrap)
        self.last = nn.Linear(DIM, 1)
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x=torch.tanh(self.first(x)), mask=x > 0, options={"factor": 2.0, "name": None})
        return self.last(F.gelu(self.unwrap(self.inner, output))).flatten()


def returning(kind: str) -> nn.Module:
    ways: dict[str, tuple[Callable[[Tensor], object], Callable[..., Tensor]]] = {
        "dict": (lambda y: {"y": y, "n": 1}, lambda inner, output: output["y"]),
        "dataclass": (Record, lambda inner, output: output.value),
        "namedtuple": (lambda y: Pair(y, None), lambda inner, output: output.value),
        "nested tuple": (lambda y: (None, [y]), lambda inner, output: output[1][0]),
        "None": (lambda y: None, lambda inner, output: inner.seen),
        "an object": (Opaque, lambda inner, output: output.value),
    }
    return Returns(*ways[kind])


class OpaqueRoot(Chain):
    """The root itself returns something the engine cannot look into."""

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(super().forward(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(DIM))
        self.outer = nn.ModuleDict({"inner": Chain(), "side": nn.Linear(DIM, 1)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.own
        return self.outer["inner"](x) + self.outer["side"](x).flatten()


class Block(nn.Module):
    """A unit with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Twice()
        self.own = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.own(x)) + self.own(x).mean(-1)


class NestedUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Parameterless(Chain):
    """Units without parameters between units with some."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.second(self.activation(self.first(x))))).flatten()
