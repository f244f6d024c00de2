"""Linear layers in FP8 on GPUs: the cast's kernel against its reference, to the bit, and products against exact ones of the same casts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from lightning_mfsdp.float8 import Float8Linear
from lightning_mfsdp.float8.casts import cast, largest_magnitude
from tests.helpers.distributed import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

SHAPES = ((16, 16), (128, 64), (129, 48), (1, 32), (300, 1040))
SPECIAL = (0.0, -0.0, 1e-38, -3e-39, 1.0, -448.0, 2.0**-100)


def matrix_of(shape, dtype, *, special=()):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)
    if matrix.numel() > len(special):
        matrix.view(-1)[: len(special)] = torch.tensor(special, dtype=dtype)
    return matrix


def both_casts(matrix, eight, as_is, transposed):
    """By the kernel, into memory that was poisoned, and by the reference."""
    on_gpu = matrix.cuda()
    poison = torch.full((4 * matrix.numel() + 4096,), 0x55, dtype=torch.uint8, device="cuda")
    del poison
    ours = cast(on_gpu, largest_magnitude(on_gpu), eight, as_is, transposed)
    reference = cast(matrix, largest_magnitude(matrix), eight, as_is, transposed)
    return ours, reference


def assert_same_bits(ours, reference):
    for one, other in zip(ours[:2], reference[:2], strict=True):
        assert one.shape == other.shape
        bits, expected = one.cpu().view(torch.uint8), other.view(torch.uint8)
        if other.dtype is torch.float8_e5m2:  # it has several NaN
            bits = torch.where(one.cpu().float().isnan(), 0x7F, bits)
            expected = torch.where(other.float().isnan(), 0x7F, expected)
        assert torch.equal(bits & 0x7F, expected & 0x7F), "magnitudes"
        signed = ~other.float().isnan()
        assert torch.equal(bits[signed], expected[signed])
    assert torch.equal(ours[2].cpu(), reference[2]) or (ours[2].isnan() and reference[2].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eight", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_kernel_casts_to_the_bits_of_its_reference(dtype, eight):
    for shape, (as_is, transposed), special in product(
        SHAPES, ((True, True), (True, False), (False, True)), ((), SPECIAL)
    ):
        assert_same_bits(*both_casts(matrix_of(shape, dtype, special=special), eight, as_is, transposed))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_the_cast_nan(bad):
    for eight in (torch.float8_e4m3fn, torch.float8_e5m2):
        matrix = matrix_of((40, 32), torch.bfloat16)
        matrix[3, 5] = bad
        ours, reference = both_casts(matrix, eight, True, True)
        assert ours[0][3, 5].float().isnan()
        assert reference[0][3, 5].float().isnan()
        assert ours[1][5, 3].float().isnan()


def test_a_matrix_whose_numbers_lie_in_another_order_is_cast_as_its_copy():
    matrix = torch.randn(96, 80, device="cuda").t()
    ours = cast(matrix, largest_magnitude(matrix), torch.float8_e4m3fn, True, True)
    copy = matrix.contiguous()
    other = cast(copy, largest_magnitude(copy), torch.float8_e4m3fn, True, True)
    assert all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(ours[:2], other[:2], strict=True)
    )


# torch 2.11 makes an object of the class while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# What torch 2.11's inductor imports.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [16, 24, 7, 128])
def test_a_layer_computes_what_its_casts_multiply_to(tokens, compiled):
    """Outputs and gradients on a GPU, where sums are of fast products, beside those of the same casts on the CPU."""
    torch.manual_seed(tokens)
    plain = Float8Linear(48, 80)
    layer = Float8Linear(48, 80, device="cuda")
    layer.load_state_dict(plain.state_dict())
    forward = torch.compile(layer, fullgraph=True) if compiled else layer
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, tokens, 48).to(dtype)
        results = []
        for module, called, device in ((plain, plain, "cpu"), (layer, forward, "cuda")):
            module.to(dtype)
            given = x.to(device, copy=True).requires_grad_()
            output = called(given)
            assert output.dtype is dtype
            output.float().square().mean().backward()
            gradients = [given.grad, module.weight.grad, module.bias.grad]
            results.append([each.detach().float().cpu() for each in (output, *gradients)])
            module.zero_grad()
        for name, one, other in zip(("output", "x", "weight", "bias"), *results, strict=True):
            # Fast sums keep 14 bits; an output that differs in its last bit may be cast otherwise in backward.
            assert (one - other).norm() <= 0.02 * one.norm(), name


def test_layers_compute_nearly_what_bfloat16_does():
    torch.manual_seed(0)
    eight, sixteen = (nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sixteen.load_state_dict(eight.state_dict())
    eight.__class__ = Float8Linear
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    one, other = eight(x), sixteen(x)
    assert 0.001 < float((one - other).norm().detach() / other.norm().detach()) < 0.05
    one.float().square().mean().backward()
    other.float().square().mean().backward()
    assert 0.001 < float((eight.weight.grad - sixteen.weight.grad).norm() / sixteen.weight.grad.norm()) < 0.1
