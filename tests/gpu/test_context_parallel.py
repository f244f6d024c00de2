"""Attention of parts of sequences with NCCL and flash kernels: close to float64 on whole sequences, and no mask of S x S."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_mfsdp.context_parallel import context_attention
from lightning_mfsdp.context_parallel.sharing import METHODS, Cut
from tests.context_parallel.sequences import divided
from tests.helpers.distributed import needs_gpus, run_distributed

pytestmark = [pytest.mark.gpus2, needs_gpus(2)]

LENGTH, HEADS, SHARED, WIDTH = 1024, 8, 2, 64


def by_flash_kernels(rank: int, world: int) -> bool:
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = [HEADS, SHARED, SHARED, HEADS]
    whole = [torch.randn(2, n, LENGTH, WIDTH, generator=draw, device="cuda", dtype=torch.bfloat16) for n in shapes]
    for is_causal in (True, False):
        exact = [tensor.double().requires_grad_() for tensor in whole[:3]]
        want = F.scaled_dot_product_attention(*exact, is_causal=is_causal, enable_gqa=True)
        want.backward(whole[3].double())
        for method in METHODS:
            cut = Cut(length=LENGTH, is_real=torch.arange(LENGTH, device="cuda").expand(2, LENGTH) < LENGTH)
            with divided(method, cut) as parallel:
                parts = [parallel.part_of(tensor, 2).detach().requires_grad_() for tensor in whole[:3]]
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error where a mask tensor would need another one
                    if not is_causal:
                        parallel.cut = Cut(length=LENGTH)  # padding needs a mask there
                    output = context_attention(*parts, is_causal=is_causal, enable_gqa=True)
                output.backward(parallel.part_of(whole[3], 2))
                for mine, all_of_it in zip(
                    [output, *(part.grad for part in parts)], [want, *(t.grad for t in exact)], strict=True
                ):
                    part = parallel.part_of(all_of_it, 2)
                    assert (mine.double() - part).norm() < 0.02 * part.norm(), (method, is_causal)
    return True


def test_flash_kernels_compute_causal_attention_with_shared_heads() -> None:
    assert all(run_distributed(by_flash_kernels, 2, backend="nccl"))


def exact_with_masks(rank: int, world: int) -> bool:
    draw = torch.Generator("cuda").manual_seed(2)
    whole = [torch.randn(2, n, 64, 16, generator=draw, device="cuda", dtype=torch.float64) for n in (8, 2, 2, 8)]
    document = torch.arange(64, device="cuda").expand(2, 64) // 24
    is_real = torch.arange(64, device="cuda").expand(2, 64) >= 3
    place = torch.arange(64, device="cuda")
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < 9) & (document[:, :, None] == document[:, None]) & is_real[:, None]
    real = is_real[:, None, :, None].double()
    exact = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    want = F.scaled_dot_product_attention(*exact, attn_mask=mask[:, None], enable_gqa=True) * real
    want.backward(whole[3])
    for method in METHODS:
        with divided(method, Cut(length=64, is_real=is_real, document=document)) as parallel:
            parts = [parallel.part_of(tensor, 2).detach().requires_grad_() for tensor in whole[:3]]
            output = context_attention(*parts, is_causal=True, window=9, enable_gqa=True) * parallel.part_of(real, 2)
            output.backward(parallel.part_of(whole[3], 2))
            for mine, all_of_it in zip(
                [output, *(part.grad for part in parts)], [want, *(t.grad for t in exact)], strict=True
            ):
                torch.testing.assert_close(mine, parallel.part_of(all_of_it, 2), rtol=0, atol=1e-12)
    return True


def test_windows_padding_and_documents_equal_those_of_one_rank() -> None:
    assert all(run_distributed(exact_with_masks, 2, backend="nccl"))
