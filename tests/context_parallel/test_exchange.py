"""All-to-alls between parts of sequences and parts of heads: values, gradients, and what is copied and sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp.base.compat import DispatchMode
from lightning_mfsdp.context_parallel import exchange
from lightning_mfsdp.context_parallel.exchange import to_heads, to_sequence
from tests.helpers.distributed import run_distributed
from tests.helpers.pairwise import in_world

WORLDS = (2, 4)
ORDERS = ((1, 2), (2, 1), (0, 2), (3, 1), (-1, -2))
BATCHES = ((), (2,), (3, 1, 2))
# Heads, D and dtype of each tensor.
SHAPES: dict[str, list[tuple[int, int, torch.dtype]]] = {
    "one": [(8, 16, torch.float64)],
    "unequal": [(8, 16, torch.bfloat16), (4, 16, torch.bfloat16), (4, 3, torch.bfloat16)],
    "mixed": [(4, 5, torch.float32), (8, 2, torch.float64), (4, 1, torch.float32), (4, 8, torch.float16)],
}
STRIDES = ("contiguous", "tokens first", "reversed", "sliced", "expanded")
TOKENS = 8  # of whole sequences


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def placed(batch: tuple[int, ...], width: int, heads: int, sequence: int) -> list[int]:
    """Sizes of a tensor without its heads and tokens, which are -1."""
    rank = len(batch) + 3
    others = iter((*batch, width))
    return [-1 if dim in (heads % rank, sequence % rank) else next(others) for dim in range(rank)]


def laid_out(tensor: Tensor, strides: str, sequence: int) -> Tensor:
    """The same values, in memory of another order."""
    if strides == "tokens first":
        return tensor.movedim(sequence, 0).contiguous().movedim(0, sequence)
    if strides == "reversed":
        dims = list(range(tensor.ndim))[::-1]
        return tensor.permute(dims).contiguous().permute(dims)
    if strides == "sliced":
        return torch.cat((tensor, tensor), dim=-1)[..., 1:][..., tensor.shape[-1] - 1 : -1 + 2 * tensor.shape[-1]]
    return tensor.contiguous()


def wholes(shapes: str, batch: tuple[int, ...], heads: int, sequence: int) -> list[tuple[Tensor, Tensor]]:
    """Whole sequences of all heads and gradients of them, the same ones on every rank."""
    draw = torch.Generator().manual_seed(4)
    found = []
    for number, width, dtype in SHAPES[shapes]:
        sizes = placed(batch, width, heads, sequence)
        sizes[heads], sizes[sequence] = number, TOKENS
        one, other = (torch.randn(sizes, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
        found.append((one, other))
    return found


def rows(world: int) -> list[tuple[Any, ...]]:
    def possible(order: tuple[int, int], batch: tuple[int, ...], *row: Any) -> bool:
        rank = len(batch) + 3
        return len({dim % rank for dim in order}) == 2 and max(order) < rank

    return in_world(world, WORLDS, ORDERS, BATCHES, SHAPES, STRIDES, STRIDES, possible=possible)


def as_one_rank_has_them(rank: int, world: int) -> int:
    for (heads, sequence), batch, shapes, strides, of_gradients in rows(world):
        both = wholes(shapes, batch, heads, sequence)
        for function, had, gets in ((to_heads, sequence, heads), (to_sequence, heads, sequence)):
            own = [laid_out(whole.chunk(world, had)[rank], strides, sequence).requires_grad_() for whole, _ in both]
            results = function(own, group(), heads=heads, sequence=sequence)
            equal(results, tuple(whole.chunk(world, gets)[rank] for whole, _ in both))
            gradients = [whole.chunk(world, gets)[rank] for _, whole in both]
            if of_gradients == "expanded":
                torch.autograd.backward([result.sum() for result in results])
                equal([one.grad for one in own], [torch.ones_like(one) for one in own])
            else:
                torch.autograd.backward(results, [laid_out(one, of_gradients, sequence) for one in gradients])
                equal([one.grad for one in own], [whole.chunk(world, had)[rank] for _, whole in both])
    return len(rows(world))


@pytest.mark.parametrize("world", WORLDS)
def test_values_and_gradients_are_those_of_whole_sequences(world: int) -> None:
    assert run_distributed(as_one_rank_has_them, world) == [len(rows(world))] * world


def second_derivatives(rank: int, world: int) -> bool:
    both = [(whole.double(), other.double()) for whole, other in wholes("unequal", (2,), 1, 2)]
    for function, had, gets in ((to_heads, 2, 1), (to_sequence, 1, 2)):
        own = [whole.chunk(world, had)[rank].requires_grad_() for whole, _ in both]
        results = function(own, group())
        weights = [other.chunk(world, gets)[rank] for _, other in both]
        total = sum((result**3 * weight).sum() for result, weight in zip(results, weights, strict=True))
        firsts = torch.autograd.grad(total, own, create_graph=True)
        seconds = torch.autograd.grad(sum(first.sum() for first in firsts), own)
        for second, (whole, other) in zip(seconds, both, strict=True):
            torch.testing.assert_close(second, (6 * whole * other).chunk(world, had)[rank])
    return True


def test_they_can_be_differentiated_twice() -> None:
    assert all(run_distributed(second_derivatives, 2))


@contextmanager
def exchanges() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What all-to-alls received and sent."""
    found: list[tuple[Tensor, Tensor]] = []
    collective = dist.all_to_all_single

    def seen(received: Tensor, sent: Tensor, **options: Any) -> Any:
        assert received.is_contiguous()
        assert sent.is_contiguous()
        found.append((received, sent))
        return collective(received, sent, **options)

    with patch.object(exchange.dist, "all_to_all_single", seen):
        yield found


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def one_of_each_dtype(rank: int, world: int) -> bool:
    for shapes, number in (("one", 1), ("unequal", 1), ("mixed", 3)):
        own = [whole.chunk(world, 2)[rank].requires_grad_() for whole, _ in wholes(shapes, (2,), 1, 2)]
        with exchanges() as found:
            results = to_heads(own, group())
        assert len(found) == number
        for received, _ in found:
            mine = [result for result in results if result.dtype == received.dtype]
            width = sum(result.shape[1] * result.shape[3] for result in mine)
            assert received.shape == (world, TOKENS // world, 2, width)
            assert {memory(result) for result in mine} == {memory(received)}  # nothing was copied
            for result in mine:
                assert result.stride() == (width, result.shape[3], 2 * width, 1)
        with exchanges() as found:
            back = to_sequence(results, group())
            torch.autograd.backward(back, [torch.ones_like(one) for one in back])
        assert len(found) == 3 * number
        for one in back:
            assert one.transpose(1, 2).is_contiguous()
    # Of other sizes than H and D, they have a buffer each.
    own = [torch.full((batch, 4, 2, 3), float(rank)) for batch in (1, 2, 1)]
    with exchanges() as found:
        results = to_heads(own, group())
    assert len(found) == 2
    assert [result.shape for result in results] == [(batch, 4 // world, 2 * world, 3) for batch in (1, 2, 1)]
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_tensors_of_one_dtype_are_sent_together_and_not_copied_when_received(world: int) -> None:
    assert all(run_distributed(one_of_each_dtype, world))


def sent_from_where_it_is(rank: int, world: int) -> bool:
    for batch in (1, 2):
        for dtype in (torch.float32, torch.bfloat16):
            own = [torch.randn(batch, 4, 8, 8, dtype=dtype).requires_grad_() for _ in range(3)]
            output = F.scaled_dot_product_attention(*to_heads(own, group()), is_causal=True)
            with exchanges() as found:
                (result,) = to_sequence((output,), group())
            ((_, sent),) = found
            assert memory(sent) == memory(output)
            assert result.transpose(1, 2).is_contiguous()  # as the model reshapes it
            with exchanges() as found:
                result.sum().backward()
            assert len(found) == 2
    # As models of transformers return it.
    output = torch.randn(1, 8, 2, 3)
    with exchanges() as found:
        (result,) = to_sequence((output,), group(), heads=2, sequence=1)
    assert memory(found[0][1]) == memory(output)
    assert result.is_contiguous()
    return True


def test_the_output_of_attention_is_sent_without_a_copy() -> None:
    assert all(run_distributed(sent_from_where_it_is, 2))


def changed(rank: int, world: int) -> bool:
    both = wholes("unequal", (2,), 1, 2)
    for function, had, gets in ((to_heads, 2, 1), (to_sequence, 1, 2)):
        own = [whole.chunk(world, had)[rank].requires_grad_() for whole, _ in both]
        first, second, third = function(own, group())
        kept = second * second  # saves it for its backward
        first.mul_(4)
        third.zero_()
        equal(first, 4 * both[0][0].chunk(world, gets)[rank])
        equal(second, both[1][0].chunk(world, gets)[rank])
        torch.autograd.backward([first.sum(), kept.sum(), third.sum()])
        equal([one.grad for one in own], [torch.full_like(own[0], 4), 2 * own[1], torch.zeros_like(own[2])])
    return True


def test_results_may_be_changed_in_place() -> None:
    assert all(run_distributed(changed, 2))


def negated(rank: int, world: int) -> bool:
    """Memory of a lazily negated tensor has other values than it."""
    whole = torch.randn(2, 4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    (result,) = to_sequence((whole.chunk(2, 1)[rank].contiguous().conj(),), group(), heads=1, sequence=0)
    equal(result, whole.conj().chunk(2, 0)[rank])
    lazy = whole.conj().imag.chunk(2, 1)[rank]
    assert lazy.is_neg()
    (result,) = to_sequence((lazy,), group(), heads=1, sequence=0)
    equal(result, -whole.imag.chunk(2, 0)[rank])
    return True


def test_lazily_conjugated_tensors_are_sent_as_they_are_seen() -> None:
    assert all(run_distributed(negated, 2))


DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 2, 8])
def test_copies_in_wide_elements_have_the_same_values(dtype: torch.dtype, width: int, offset: int) -> None:
    draw = torch.Generator().manual_seed(1)
    memory = torch.randn(1000, generator=draw, dtype=torch.float64).mul(100).to(dtype)
    for strides in ((4 * width, width, 1), (width, 5 * width, 1), (0, 4 * width, 1), (40, 0, 1), (0, 0, 0), (1, 3, 9)):
        piece = memory.as_strided((3, 4, width), strides, offset)
        for start, places in ((0, (4 * width, width, 1)), (offset, (width, 3 * width, 1)), (8, (8 * width, width, 1))):
            space = torch.zeros(1000, dtype=dtype)
            place = space.as_strided((3, 4, width), places, start)
            exchange._copy(place, piece)
            equal(place, piece)
            place.zero_()
            assert not space.any()  # nothing beside it was written


def test_a_copy_moves_the_widest_elements_that_both_sides_permit() -> None:
    class Copies(DispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.dtypes: list[torch.dtype] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.copy_.default:
                self.dtypes.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    memory = torch.zeros(2, 64, dtype=torch.bfloat16)
    with Copies() as seen:
        for place, piece in ((0, 0), (0, 4), (2, 0), (0, 1), (3, 3)):
            exchange._copy(memory[:, place : place + 16], torch.ones_like(memory)[:, piece : piece + 16])
    assert seen.dtypes == [torch.complex128, torch.int64, torch.int32, torch.bfloat16, torch.bfloat16]


def test_elements_are_as_wide_as_sizes_strides_and_offsets_permit() -> None:
    memory = torch.zeros(1024, dtype=torch.bfloat16)

    def width(*strides: int, last: int = 16, offset: int = 0) -> int:
        return exchange._width(memory.as_strided((2, 2, last), strides, offset))

    assert width(64, 16, 1) == 16
    assert width(64, 0, 1) == 16
    assert width(64, 20, 1) == 8
    assert width(66, 16, 1) == 4
    assert width(64, 16, 1, offset=4) == 8
    assert width(64, 16, 1, last=6) == 4
    assert width(65, 16, 1) == width(64, 16, 1, offset=3) == width(64, 16, 1, last=5) == 2
    assert width(64, 16, 0) == width(64, 1, 2) == 1
    # Memory that begins at an odd place.
    assert exchange._width(torch.frombuffer(bytearray(130), dtype=torch.bfloat16, offset=2).view(4, 16)) < 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [4, 2])
def test_attention_takes_columns_of_a_buffer_as_it_takes_contiguous_tensors(dtype: torch.dtype, shared: int) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = [(4, 8), (shared, 8), (shared, 8)]
    buffer = torch.randn(16, 2, sum(heads * width for heads, width in sizes), generator=draw).to(dtype)
    columns = [
        part.unflatten(-1, size).permute(1, 2, 0, 3)
        for part, size in zip(buffer.split([heads * width for heads, width in sizes], -1), sizes, strict=True)
    ]
    found = []
    for tensors in (columns, [column.contiguous() for column in columns]):
        own = [tensor.detach().requires_grad_() for tensor in tensors]
        output = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=shared < 4)
        output.backward(torch.ones_like(output) / 3)
        found.append([output.detach(), *(tensor.grad for tensor in own)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
