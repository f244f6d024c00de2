"""What Transformer Engine's functions are asked for, with stand-ins for its tensors: it needs a GPU, its contract does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mfsdp.engine import MixedPrecisionPolicy
from lightning_mfsdp.te import codec as te_codec
from lightning_mfsdp.te import library as library_door
from lightning_mfsdp.te import weight_codecs
from tests.engine.internals import Fragment, WeightCodec

SHAPE = (4, 6)


class QuantizedTensor(nn.Parameter):
    """Stands in for the library's: inner tensors are attributes."""


class Float8Tensor(QuantizedTensor):
    pass


class Float8BlockwiseQTensor(QuantizedTensor):
    pass


class MXFP8Tensor(QuantizedTensor):
    pass


class NVFP4Tensor(QuantizedTensor):
    pass


class Float8Quantizer:
    def __init__(self) -> None:
        self.amax, self.usage = torch.ones(1), {}

    def set_usage(self, **usage: bool) -> None:
        self.usage |= usage


class Float8CurrentScalingQuantizer:
    def create_tensor_from_data(self, data: torch.Tensor, dtype: torch.dtype) -> Any:
        return SimpleNamespace(data=data, dtype=dtype, quantizer=self)


class GroupedTensor(nn.Parameter):
    """No quantized tensor by its class, whatever is inside."""


_KINDS = (QuantizedTensor, Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor, GroupedTensor)
for kind in (*_KINDS, Float8Quantizer, Float8CurrentScalingQuantizer):
    kind.__module__ = "transformer_engine.pytorch.tensor"


def weight_of(kind: type[QuantizedTensor], *, kept: bool = True) -> Any:
    made: Any = kind(torch.zeros(SHAPE))
    made._quantizer, made._is_2D_scaled = Float8Quantizer(), True
    made._transpose = made._columnwise_data = made._columnwise_scale_inv = torch.zeros(SHAPE[::-1])
    made._transpose_invalid = False
    made._scale_inv, made.dequantize = torch.ones(1), lambda: torch.arange(24.0).view(SHAPE)
    made.get_high_precision_init_val = lambda: torch.arange(24.0) if kept else None
    made.clear_high_precision_init_val = lambda: setattr(made, "get_high_precision_init_val", lambda: None)
    return made


class Library:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.quantized: list[tuple[Any, ...]] = []
        self.processed: list[Any] = []

    def quantize_master_weights(self, *arguments: Any, **options: Any) -> None:
        self.quantized.append((*arguments, options))

    def post_all_gather_processing(self, weights: list[Any]) -> None:
        self.processed += weights
        for weight in weights:
            weight._transpose, weight._transpose_invalid = torch.zeros(SHAPE[::-1]), False

    def is_mxfp8_available(self, *, return_reason: bool) -> tuple[bool, str]:
        return False, "Device compute capability 10.0 or higher required for MXFP8 execution."


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(te_codec, "load", lambda name: made)
    return made


def codec_of(weight: Any, **options: bool) -> Any:
    found = MixedPrecisionPolicy(weight_codecs=weight_codecs(**options)).codec_for(weight)
    assert isinstance(found, WeightCodec)
    return found


def test_every_kind_has_its_codec_and_ordinary_parameters_have_none() -> None:
    policy = MixedPrecisionPolicy(weight_codecs=weight_codecs())
    kinds = (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor)
    assert len({id(policy.codec_for(weight_of(kind))) for kind in kinds}) == 4
    assert policy.codec_for(nn.Parameter(torch.zeros(2, 2))) is None
    assert [codec_of(weight_of(kind)).planes for kind in kinds] == [1, 1, 2, 1]


def test_what_cannot_be_sharded_says_why(library: Library) -> None:
    for kind in (Float8Tensor, Float8BlockwiseQTensor):
        assert codec_of(weight_of(kind)).why_not(weight_of(kind)) == ""
        assert "preserve_high_precision_init_val=True" in codec_of(weight_of(kind)).why_not(weight_of(kind, kept=False))
    rows = weight_of(Float8BlockwiseQTensor)
    rows._is_2D_scaled = False
    assert "w_block_scaling_dim=2" in codec_of(rows).why_not(rows)
    microscaled = weight_of(MXFP8Tensor)
    assert codec_of(microscaled).why_not(microscaled) == (
        "Device compute capability 10.0 or higher required for MXFP8 execution; use Float8BlockScaling or Float8CurrentScaling "
        '(recipe="block" or "current") here'
    )
    other = weight_of(NVFP4Tensor)
    assert "no way to gather NVFP4Tensor" in codec_of(other).why_not(other)
    grouped = GroupedTensor(torch.zeros(2, *SHAPE))
    assert "single_grouped_weight=False" in codec_of(grouped).why_not(grouped)


def rounded(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (value * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
def test_rounding_is_told_from_values_that_were_written_later(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # From far below the smallest number of the format to beyond the largest, zeros among them.
    kept = torch.randn(64, 128) * 10 ** torch.linspace(-9, 3, 64)[:, None]
    kept[3] = 0
    weight = weight_of(Float8BlockwiseQTensor if kind == "block" else Float8Tensor)
    if kind == "current":
        weight._quantizer = Float8CurrentScalingQuantizer()

    def scale_of(value: torch.Tensor) -> torch.Tensor:
        if kind == "delayed":
            return torch.tensor(0.7)
        if kind == "current":
            return 448 / value.abs().amax().clamp(min=1e-12)
        blocks = value.view(4, 16, 128).abs().amax((1, 2)).repeat_interleave(16)[:, None]
        return (448 / blocks.clamp(min=1e-12)).log2().floor().exp2()

    weight.get_high_precision_init_val = lambda: kept.view(-1)
    written = {
        "nothing": kept,
        "zeros": kept * 0,
        "2 % less": kept * 0.98,
        "one": kept.index_fill(0, torch.tensor(9), 0.5),
    }
    for what, value in written.items():
        scale = scale_of(value)
        now = rounded(value.to(torch.bfloat16).float(), scale).to(dtype)
        weight._scale_inv, weight.dequantize = (1 / scale).reshape(-1)[:1], lambda now=now: now
        assert ("init_method" in codec_of(weight).why_not(weight)) is (what != "nothing"), what


def test_the_initial_value_is_taken_once_and_its_transpose_goes() -> None:
    weight = weight_of(Float8Tensor)
    codec = codec_of(weight)
    assert torch.equal(codec.initial_value(weight), torch.arange(24.0).view(SHAPE))
    assert weight.get_high_precision_init_val() is None
    assert weight._quantizer.usage == {"columnwise": False}
    assert weight._quantizer.amax.item() == 0, "delayed scaling saw this rank's own numbers"
    assert (weight._transpose, weight._transpose_invalid) == (None, True)
    kept = weight_of(Float8BlockwiseQTensor)
    codec_of(kept, keep_transpose_cache=True).initial_value(kept)
    assert kept._quantizer.usage == {}, "layers may make transposes in forward"
    assert kept._columnwise_data is kept._columnwise_scale_inv is None


def fragment(weight: Any, numel: int, start: int, planes: int = 1) -> Fragment:
    outputs = tuple(torch.zeros(numel, dtype=torch.uint8) for _ in range(planes))
    return Fragment(parameter=weight, main=torch.ones(numel), start=start, outputs=outputs)


def test_fragments_are_cast_in_one_call_and_ranks_without_rows_take_part(library: Library) -> None:
    group: Any = object()
    weights = [weight_of(Float8Tensor), weight_of(Float8Tensor)]
    items = [fragment(weights[0], 12, 6), fragment(weights[1], 0, 24)]
    codec_of(weights[0]).quantize(items, group)
    ((asked, masters, starts, passed_group, shards, options),) = library.quantized
    assert asked[0] is weights[0] and asked[1] is weights[1]  # noqa: PT018
    assert masters[0] is items[0].main
    assert (masters[1], starts, shards[1], passed_group) == (None, [6, None], None, group)
    assert shards[0] is items[0].outputs[0]
    assert options == {"manual_post_all_gather_processing": True}
    assert all(weight._transpose_invalid for weight in weights), "what was derived from older bytes counts no more"


def test_fragments_under_current_scaling_keep_their_rows(library: Library) -> None:
    """All of a weight, rows from its middle, one row, none; matrices, and weights of more dims, whose rows hold several of the last."""
    expected = []
    items = []
    for shape, first, rows in (((4, 6), 0, 4), ((4, 6), 1, 2), ((4, 6), 3, 1), ((4, 6), 4, 0), ((4, 2, 3), 1, 2)):
        weight: Any = Float8Tensor(torch.zeros(shape))
        weight._quantizer = Float8CurrentScalingQuantizer()
        row = weight[0].numel()
        main, output = torch.arange(rows * row, dtype=torch.float32), torch.zeros(rows * row, dtype=torch.uint8)
        items.append(Fragment(parameter=weight, main=main, start=first * row, outputs=(output,)))
        expected.append((main.view(-1, shape[-1]), first * row) if rows else (None, None))
    codec_of(items[0].parameter).quantize(items, object())  # type: ignore[arg-type]
    ((_, masters, starts, _, shards, _),) = library.quantized
    for item, (main, start), given, given_start, shard in zip(items, expected, masters, starts, shards, strict=True):
        assert given_start == start
        if main is None:
            assert given is shard is None
            continue
        assert torch.equal(given, main)
        assert given.data_ptr() == item.main.data_ptr()
        assert (shard.data.shape, shard.data.data_ptr()) == (main.shape, item.outputs[0].data_ptr())
        assert (shard.dtype, shard.quantizer) == (torch.float32, item.parameter._quantizer)  # type: ignore[attr-defined]


def test_microscaled_weights_have_bytes_for_forward_and_for_backward(library: Library) -> None:
    weight = weight_of(MXFP8Tensor)
    codec, item = codec_of(weight), fragment(weight, 12, 0, planes=2)
    codec.initial_value(weight)
    assert weight._quantizer.usage["columnwise"], "both are used"
    codec.quantize([item], object())
    assert library.quantized[0][4] == [item.outputs]
    planes = [torch.zeros(SHAPE, dtype=torch.uint8) for _ in range(2)]
    codec.bind(weight, planes)
    assert weight._rowwise_data is planes[0]
    assert weight._columnwise_data is planes[1]
    codec.after_gather([weight])
    codec.before_release([weight])
    assert weight._columnwise_data is planes[1]
    assert library.processed == []


@pytest.mark.parametrize("keep", [False, True])
def test_transposes_go_with_the_bytes_unless_they_are_kept(library: Library, keep: bool) -> None:
    weight = weight_of(Float8Tensor)
    codec = codec_of(weight, keep_transpose_cache=keep)
    codec.initial_value(weight)
    data = torch.zeros(SHAPE, dtype=torch.uint8)
    codec.bind(weight, [data])
    assert weight._data is data
    made = []
    for _ in range(2):
        codec.after_gather([weight])
        made.append(weight._transpose)
        codec.before_release([weight])
    assert len(library.processed) == keep, "once, and not again before the weights change"
    assert (weight._transpose is not None) is keep
    codec.quantize([fragment(weight, 24, 0)], object())
    codec.after_gather([weight])
    assert len(library.processed) == 2 * keep


def test_kinds_of_weights_can_be_told_apart_without_the_library() -> None:
    assert not library_door.is_a(SimpleNamespace(), "Float8Tensor")


def test_codecs_with_the_same_options_are_equal_so_that_policies_of_two_runs_are() -> None:
    assert weight_codecs() == weight_codecs()
    assert hash(weight_codecs()) == hash(weight_codecs())
    assert weight_codecs() != weight_codecs(keep_transpose_cache=True)
    assert len(set(weight_codecs())) == 5
