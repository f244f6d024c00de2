"""Attention of parts of sequences equals one process's attention on whole ones: outputs and gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp import ShardingError
from lightning_mfsdp.context_parallel import context_attention, context_positions, exchange
from lightning_mfsdp.context_parallel.exchange import gather_sequence, to_heads, to_sequence
from lightning_mfsdp.context_parallel.sharing import METHODS, ContextParallel, Cut
from tests.context_parallel.sequences import KINDS, LENGTH, allowed, cut_of, divided, on_one_rank, real, tensors
from tests.helpers.distributed import run_distributed
from tests.helpers.pairwise import in_world

EXACT = {"rtol": 0.0, "atol": 1e-12}
WORLDS = (2, 4)


def own_parts(parallel: ContextParallel, values: list[Tensor]) -> list[Tensor]:
    return [parallel.part_of(tensor, 2).detach().requires_grad_() for tensor in values]


def attended(
    parallel: ContextParallel, values: list[Tensor], weight: Tensor, **options: Any
) -> tuple[Tensor, list[Any]]:
    """Output and gradients of this rank's parts."""
    query, key, value = own_parts(parallel, values[:3])
    output = context_attention(query, key, value, enable_gqa=True, **options) * parallel.part_of(weight, 2)
    output.backward(parallel.part_of(values[3], 2))
    return output.detach(), [tensor.grad for tensor in (query, key, value)]


def compare(parallel: ContextParallel, got: tuple[Tensor, list[Any]], want: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(got[0], parallel.part_of(want[0], 2), **EXACT)
    for name, mine, whole in zip(("query", "key", "value"), got[1], want[1], strict=True):
        torch.testing.assert_close(mine, parallel.part_of(whole, 2), **EXACT, msg=lambda text, n=name: f"{n}: {text}")


def rows(world: int) -> list[tuple[Any, ...]]:
    return in_world(world, WORLDS, METHODS, (4, 2, 1), (True, False), (None, 3, 9, 100), KINDS)


def equal_to_one_rank(rank: int, world: int) -> int:
    for method, shared, is_causal, window, kind in rows(world):
        cut, values = cut_of(kind), tensors(4, shared)
        mask = allowed(cut, is_causal=is_causal, window=window)
        with divided(method, cut) as parallel:
            got = attended(parallel, values, real(cut), is_causal=is_causal, window=window)
            try:
                compare(parallel, got, on_one_rank(values, mask, real(cut)))
            except AssertionError as error:
                raise AssertionError(
                    f"{method}, {shared} KV heads, causal {is_causal}, window {window}, {kind}"
                ) from error
    return len(rows(world))


@pytest.mark.parametrize("world", WORLDS)
def test_outputs_and_gradients_equal_those_of_whole_sequences(world: int) -> None:
    assert run_distributed(equal_to_one_rank, world) == [len(rows(world))] * world


def undivided(rank: int, world: int) -> bool:
    query, key, value, gradient = tensors(4, 2)
    for window in (None, 3):
        mask = allowed(Cut(length=LENGTH), is_causal=True, window=window)
        want = on_one_rank([query, key, value, gradient], mask, real(Cut(length=LENGTH)))
        with divided("ulysses", None):
            output = context_attention(query, key, value, is_causal=True, window=window, enable_gqa=True)
        torch.testing.assert_close(output, want[0], **EXACT)
        again = context_attention(query, key, value, is_causal=True, window=window, enable_gqa=True)
        torch.testing.assert_close(again, want[0], **EXACT)
    return True


def test_a_batch_that_was_not_divided_is_attended_whole() -> None:
    assert all(run_distributed(undivided, 2))


def scaled(rank: int, world: int) -> bool:
    values = tensors(4, 4)
    calls: list[dict[str, Any]] = []

    def own(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append({**options, "heads": query.shape[1], "length": key.shape[2]})
        return F.scaled_dot_product_attention(query, key, value, **options)

    want = F.scaled_dot_product_attention(*values[:3], scale=0.3, is_causal=True)
    for method, heads, lengths in (
        ("ulysses", 2, [LENGTH]),
        ("gather", 4, [LENGTH // 4 * (rank + 1), LENGTH - LENGTH // 4 * rank]),
    ):
        calls.clear()
        with divided(method, Cut(length=LENGTH)) as parallel:  # type: ignore[arg-type]
            parts = own_parts(parallel, values[:3])
            output = context_attention(*parts, attention=own, is_causal=True, scale=0.3)
            torch.testing.assert_close(output.detach(), parallel.part_of(want, 2), **EXACT)
        assert [call["length"] for call in calls] == lengths
        assert {call["heads"] for call in calls} == {heads}
        assert not any(type(call["attn_mask"]) is Tensor for call in calls)  # flash kernels take none
    return True


def test_a_function_of_ones_own_gets_scale_heads_and_no_mask_tensor() -> None:
    assert all(run_distributed(scaled, 2))


def no_mask_for_padding_behind(rank: int, world: int) -> bool:
    masks: list[Any] = []

    def own(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return F.scaled_dot_product_attention(query, key, value, **options)

    for kind, needed in (("padding", False), ("padding_before", True)):
        masks.clear()
        with divided("ulysses", cut_of(kind)) as parallel:
            context_attention(*own_parts(parallel, tensors(4, 4)[:3]), attention=own, is_causal=True)
        assert (masks[0] is not None) == needed
    return True


def test_causal_attention_needs_no_mask_for_padding_at_the_end() -> None:
    assert all(run_distributed(no_mask_for_padding_behind, 2))


def low_precision(rank: int, world: int) -> bool:
    for method, dtype in (
        ("ulysses", torch.bfloat16),
        ("gather", torch.bfloat16),
        ("gather", torch.float16),
        ("ulysses", torch.float32),
    ):
        values = tensors(4, 2, dtype)
        cut = cut_of("documents")
        mask = allowed(cut, is_causal=True, window=None)
        want = on_one_rank([value.double() for value in values], mask, real(cut))
        with divided(method, cut) as parallel:  # type: ignore[arg-type]
            got = attended(parallel, values, torch.ones(1, 1, LENGTH, 1, dtype=dtype), is_causal=True)
            for mine, whole in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
                assert mine.dtype == dtype
                part = parallel.part_of(whole, 2)
                assert (mine.double() - part).norm() < 0.02 * part.norm()
    return True


def test_low_precision_is_close() -> None:
    assert all(run_distributed(low_precision, 2))


def recomputed(rank: int, world: int) -> bool:
    for method in METHODS:
        for reentrant in (True, False):
            cut, values = cut_of("both"), tensors(4, 1)
            mask = allowed(cut, is_causal=True, window=5)
            with divided(method, cut) as parallel:
                parts = own_parts(parallel, values[:3])

                def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                    return context_attention(query, key, value, is_causal=True, window=5, enable_gqa=True)

                output = checkpoint(attend, *parts, use_reentrant=reentrant) * parallel.part_of(real(cut), 2)
                output.backward(parallel.part_of(values[3], 2))
                got = output.detach(), [part.grad for part in parts]
                compare(parallel, got, on_one_rank(values, mask, real(cut)))
    return True


def test_activation_checkpointing_recomputes_the_same_attention() -> None:
    assert all(run_distributed(recomputed, 2))


def compiled(rank: int, world: int) -> bool:
    values = tensors(4, 2)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        places = context_positions(query.shape[2])[:, None]
        return context_attention(query * places, key, value, is_causal=True, window=3, enable_gqa=True) + 1

    want = attend(*values[:3])
    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)(*values[:3])
    torch.testing.assert_close(whole, want, **EXACT)
    made = torch.compile(attend, backend="aot_eager")
    with divided("ulysses", Cut(length=LENGTH)) as parallel:
        parts = own_parts(parallel, values[:3])
        graphs = set()
        for _ in range(3):
            parallel.cut = Cut(length=LENGTH)
            torch.testing.assert_close(made(*parts), parallel.part_of(want, 2), **EXACT)
            graphs.add(counters["stats"]["unique_graphs"])
        assert len(graphs) == 1  # a step's cut is no reason to compile it
    return True


def test_compiled_code_calls_it_between_its_graphs() -> None:
    assert all(run_distributed(compiled, 2, apart=True))


def permuted(rank: int, world: int) -> bool:
    """Gradients arrive with other strides than outputs have."""
    draw = torch.Generator().manual_seed(2)
    whole = torch.randn(2, 8, LENGTH, 3, generator=draw, dtype=torch.float64)
    weight = torch.randn(
        LENGTH, 3, 8, 2, generator=draw, dtype=torch.float64
    )  # seen as [2, 8, 16, 3]: every dim is permuted
    gradient = weight.permute(3, 2, 0, 1)
    for method in METHODS:
        with divided(method, Cut(length=LENGTH)) as parallel:
            part = parallel.part_of(whole, 2).requires_grad_()
            assert not gradient.is_contiguous()
            if method == "gather":
                (joined,) = gather_sequence((part,), parallel)
                torch.testing.assert_close(joined, whole, rtol=0, atol=0)
                assert joined.is_contiguous()
                (joined * gradient * (rank + 1)).sum().backward()
                joined_gradient = gradient * sum(range(1, world + 1))
            else:
                heads = whole.chunk(world, 1)[rank], gradient.chunk(world, 1)[rank]
                (joined,) = to_heads((part,), parallel.group)
                torch.testing.assert_close(joined, heads[0], rtol=0, atol=0)
                joined.backward(heads[1])
                joined_gradient = gradient
            torch.testing.assert_close(part.grad, parallel.part_of(joined_gradient, 2), rtol=0, atol=1e-14)
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_with_any_strides_arrive_in_order(world: int) -> None:
    assert all(run_distributed(permuted, world))


def there_and_back(rank: int, world: int) -> bool:
    part = torch.arange(2 * 4 * 3 * 2, dtype=torch.float64).view(2, 4, 3, 2) + 1000 * rank
    other = part[..., :1].float().transpose(1, 2).contiguous().transpose(1, 2)  # another dtype, and not contiguous
    with divided("ulysses", Cut(length=3 * world)) as parallel:
        back = to_sequence(to_heads((part, other), parallel.group), parallel.group)
        torch.testing.assert_close(back, (part, other), rtol=0, atol=0)
        (moved,) = to_sequence(
            to_heads((part.transpose(1, 2),), parallel.group, heads=2, sequence=1), parallel.group, heads=2, sequence=1
        )
        torch.testing.assert_close(moved, part.transpose(1, 2), rtol=0, atol=0)
    return True


def test_heads_and_parts_are_exchanged_and_come_back() -> None:
    assert all(run_distributed(there_and_back, 2))


def positions(rank: int, world: int) -> dict[str, list[int]]:
    result = {"whole": context_positions(3).tolist()}
    for method in METHODS:
        with divided(method, Cut(length=8)):
            result[method] = context_positions(4).tolist()
    return result


def test_positions_are_those_in_whole_sequences() -> None:
    first, second = run_distributed(positions, 2)
    assert first == {"whole": [0, 1, 2], "ulysses": [0, 1, 2, 3], "gather": [0, 1, 6, 7]}
    assert second == {"whole": [0, 1, 2], "ulysses": [4, 5, 6, 7], "gather": [2, 3, 4, 5]}


def refusals(rank: int, world: int) -> dict[str, str]:
    told = {}

    def refused(name: str, function: Any, *values: Any, **options: Any) -> None:
        with pytest.raises(ShardingError) as error:
            function(*values, **options)
        told[name] = str(error.value)

    with divided("ulysses", Cut(length=LENGTH)) as parallel:
        query, key, value = own_parts(parallel, tensors(3, 3)[:3])
        refused("heads", context_attention, query, key, value)
        query, key, value = own_parts(parallel, tensors(4, 2)[:3])
        refused("shared", context_attention, query, key, value)
        refused("length", context_attention, query[:, :, :3], key[:, :, :3], value[:, :, :3])
        refused("positions", context_positions, 3)
        refused("window", context_attention, query, key, value, window=0)
    return told


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    told = run_distributed(refusals, 2)[1]
    assert "3 query heads cannot be divided over 2 context ranks. Use context_method='gather'" in told["heads"]
    assert "pass enable_gqa=True" in told["shared"]
    assert (
        "context_attention: got sequences of 3 tokens, but this step's batch has 16 tokens divided over 2"
        in told["length"]
    )
    assert "context_positions: got sequences of 3 tokens" in told["positions"]
    assert "window=0 counts the query's own token: expected at least 1" in told["window"]


def dropped(rank: int, world: int) -> list[Tensor]:
    results = []
    for method in METHODS:
        torch.manual_seed(rank)
        with divided(method, Cut(length=LENGTH)) as parallel:
            parts = own_parts(parallel, tensors(4, 2)[:3])
            results.append(context_attention(*parts, is_causal=True, enable_gqa=True, dropout_p=0.5).detach())
    return results


def test_attention_dropout_draws_on_each_rank() -> None:
    for method, number in (("ulysses", 0), ("gather", 1)):
        outputs = [own[number] for own in run_distributed(dropped, 2)]
        assert all(output.isfinite().all() for output in outputs), method
        exact = F.scaled_dot_product_attention(*tensors(4, 2)[:3], is_causal=True, enable_gqa=True)
        assert not torch.allclose(outputs[0], exact[:, :, : LENGTH // 2]), method


def under_autocast(rank: int, world: int) -> list[torch.dtype]:
    """Dtypes of float32 queries, keys and values as they are exchanged, and of the outputs."""
    found: list[torch.dtype] = []

    def seen(collective: Any) -> Any:
        def called(output: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
            found.extend((output.dtype, source.dtype))
            return collective(output, source, *args, **options)

        return called

    values = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for method in METHODS:
        with divided(method, Cut(length=8)) as parallel, torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(*values, is_causal=True)
            with (
                patch.object(exchange.dist, "all_to_all_single", seen(exchange.dist.all_to_all_single)),
                patch.object(exchange, "all_gather_flat", seen(exchange.all_gather_flat)),
            ):
                output = context_attention(*(parallel.part_of(one, 2) for one in values), is_causal=True)
        torch.testing.assert_close(output, parallel.part_of(expected, 2), rtol=2e-2, atol=2e-2)
        found.append(output.dtype)
    return found


def test_autocast_converts_before_tensors_are_exchanged() -> None:
    for found in run_distributed(under_autocast, 2):
        assert len(found) > 4
        assert set(found) == {torch.bfloat16}
