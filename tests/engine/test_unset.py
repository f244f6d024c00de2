"""No parameter or buffer that was on the meta device trains with a value that nothing has set: the error names it.

Each class stands beside the same one that sets what it adds; that one has the values of a model built on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_mfsdp import ShardingError
from lightning_mfsdp.base.initialize import materialize

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
)
# All values of the others are in use, so that only a tensor of which nothing was written is recognized.
KNOW_PARTS = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class MaskedLinear(nn.Linear):
    """Masks of autoregressive flows, of pruning."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())


class ScaledLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


class Position(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.register_buffer("ids", torch.arange(6), persistent=False)


class Counting(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("keep", torch.ones(4, dtype=torch.uint8), persistent=False)


class Resets:
    """Initializes every matrix, as a mixin."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):  # type: ignore[attr-defined]
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)


class FromMixin(Resets, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.reset_parameters()


class Rotary(nn.Module):
    """Resets itself, but forgets its frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Half(nn.Module):
    """Sets a part of its table alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table[:2] = 0


class Private(nn.MultiheadAttention):
    """`_reset_parameters` is torch.nn's name in a few classes."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("causal", torch.triu(torch.ones(3, 3), 1).bool())


class Around(nn.Module):
    """A model like Hugging Face's, which forgets the buffer of a layer that resets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MaskedLinear()

    def post_init(self) -> None:
        """Marks the class."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def with_weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))


# What is built, what the error must name, and what must be done about it.
UNSET: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bool buffer": (
        MaskedLinear,
        r"MaskedLinear \(MaskedLinear\) has mask on the meta device, and reset_parameters\(\), inherited from Linear, does not set all of "
        r"that\. Define reset_parameters\(\) in MaskedLinear: call super\(\)\.reset_parameters\(\), then set mask\. Or build",
    ),
    "parameter": (ScaledLinear, r"has gain on the meta .* inherited from Linear, .* then set gain\."),
    "int64 buffer": (Position, r"has ids on the meta .* inherited from Embedding, .* then set ids\."),
    "uint8 buffer": (Counting, r"has keep on the meta .* inherited from LayerNorm, .* then set keep\."),
    "mixin": (FromMixin, r"has bias on the meta .* inherited from Resets, .* in FromMixin: .* then set bias\."),
    "own reset": (Rotary, r"has inv_freq on .* and its reset_parameters\(\) does not set .*\. Set it there, or"),
    "a part": (Half, r"has table on the meta device, and its reset_parameters\(\) does not set all of that"),
    "private name": (Private, r"has causal on .* and _reset_parameters\(\), inherited from MultiheadAttention, .* set"),
    "in a model": (
        Around,
        r"inner \(MaskedLinear\) has mask .* nor does the _init_weights\(\) of Around around it\. D",
    ),
    "parametrization": (with_weight_norm, r"0\.parametrizations\.weight \(.*\) has original0, original1 on the meta"),
}


@pytest.mark.parametrize("case", UNSET)
def test_what_nothing_sets_is_named(case: str) -> None:
    build, message = UNSET[case]
    with torch.device("meta"):
        model = build()
    with pytest.raises(ShardingError, match=message) as info:
        materialize(model, torch.device("cpu"))
    assert len(str(info.value)) < 400


class SetsMask(MaskedLinear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "mask"):  # not yet where the constructor of Linear calls this
            self.mask = torch.tril(torch.ones_like(self.mask))


class SetsGain(ScaledLinear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "gain"):
            self.gain.data.fill_(1)


class AddsModulesOnly(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("nothing", torch.empty(0))


class SetsNan(nn.LayerNorm):
    """NaN and other strange numbers as values that a program means."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("last_loss", torch.full((3,), math.nan))
        self.register_buffer("least", torch.full((2,), torch.iinfo(torch.int64).min))
        self.register_buffer("levels", torch.arange(256, dtype=torch.uint8))
        self.register_buffer("codes", torch.arange(-128, 128, dtype=torch.int8))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "codes"):
            self.last_loss.fill_(math.nan)
            self.least.fill_(torch.iinfo(torch.int64).min)
            self.levels.copy_(torch.arange(256))
            self.codes.copy_(torch.arange(-128, 128))


ATTENTION_OF_TWO_WIDTHS = (4, 2, 0.0, True, True, True, 3, 5)  # of keys and values; biases of its own
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sets its buffer": SetsMask,
    "sets its parameter through .data": SetsGain,
    "adds modules only": AddsModulesOnly,
    "strange numbers": SetsNan,
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, averages alone": lambda: nn.BatchNorm1d(4, affine=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "Conv2d": lambda: nn.Conv2d(2, 4, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(2, 4, 3),
    "Embedding": lambda: nn.Embedding(5, 4, padding_idx=1),
    "EmbeddingBag": lambda: nn.EmbeddingBag(5, 4, padding_idx=1),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GRU": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "LSTM": lambda: nn.LSTM(3, 4, proj_size=2),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "LayerNorm without bias": lambda: nn.LayerNorm(4, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "MultiheadAttention of two widths": lambda: nn.MultiheadAttention(*ATTENTION_OF_TWO_WIDTHS),
    "PReLU": lambda: nn.PReLU(3),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_set_all_they_own_raise_no_false_alarm(case: str) -> None:
    torch.manual_seed(3)
    expected = LAYERS[case]().state_dict()
    with torch.device("meta"):
        model = LAYERS[case]()
    torch.manual_seed(3)
    materialize(model, torch.device("cpu"))
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if "attn.out_proj.weight" not in name:  # the attention draws its own weights later than those of its projection
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True, check_dtype=True)


class Graph(nn.Linear):
    """Its adjacency is sparse, and a buffer of its constructor is not there once it was reset."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("adjacency", torch.empty(4, 4))
        self.register_buffer("scratch", torch.empty(4))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scratch"):
            self.adjacency = torch.eye(4).to_sparse()
            del self.scratch


def test_what_a_reset_makes_or_deletes_needs_no_bits_of_its_own() -> None:
    with torch.device("meta"):
        model = Graph()
    materialize(model, torch.device("cpu"))
    assert model.adjacency.layout == torch.sparse_coo
    assert [name for name, _ in model.named_buffers()] == ["adjacency"]


class OfDtype(nn.Module):
    def __init__(self, dtype: torch.dtype, write: Callable[[Tensor], object], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("values", torch.zeros(shape, dtype=dtype))

    def reset_parameters(self) -> None:
        self.write(self.values)


def from_meta(dtype: torch.dtype, write: Callable[[Tensor], object], shape: tuple[int, ...] = (2, 3)) -> Any:
    with torch.device("meta"):
        made = OfDtype(dtype, write, shape)
    materialize(made, torch.device("cpu"))
    return made.values


def write_a_part(values: Tensor) -> None:
    values[0] = torch.ones((), dtype=values.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), ()], ids=str)
def test_every_dtype_shows_whether_it_was_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="has values on the meta device"):
        from_meta(dtype, lambda values: None, shape)
    for value in (0, 1):
        kept = from_meta(dtype, lambda values, to=value: values.data.copy_(torch.tensor(to).to(dtype)), shape)
        assert kept.dtype == dtype
        assert bool((kept.to(torch.complex64) == value).all())


@pytest.mark.parametrize("dtype", KNOW_PARTS, ids=str)
def test_a_part_that_was_left_out_is_found(dtype: torch.dtype) -> None:
    with pytest.raises(ShardingError, match="does not set all of that"):
        from_meta(dtype, write_a_part)
