"""RowStash on the CPU: gradients of training with pages equal those without, whatever the order, the counts and the accidents."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.stash import StashConfig
from lightning_mfsdp.moe.stash.pages import Counter
from tests.helpers.distributed import run_distributed
from tests.moe.page_cases import available
from tests.moe.toy_experts import batch, build

SMALL = {"page_rows": 4, "device_factor": 1.0}


def assert_equal(found, wanted):
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def pages_in_use(stash):
    """Pages of all pools that are not free."""
    return sum(
        pool.size.pages + pool.size.host_pages - sum(map(len, available(pool))) for pool in stash._pools.values()
    )


def recorded(model, **options):
    """A stash that has allocated its pages after one step."""
    stash = model.stash_with(StashConfig(**{**SMALL, **options}))
    model.loss(batch(0)).backward()
    model.zero_grad()
    assert stash.is_recording
    assert stash.end_step()
    assert not stash.is_recording
    assert stash.statistics(wait=True).overflowed == 0, "there were no pages to find"
    return stash


def finish(stash):
    """The end of a step in which no rank overflowed."""
    assert not stash.overflowed()
    return stash.end_step()


@pytest.mark.parametrize("overflow", ["keep", "skip", "rerun"])
@pytest.mark.parametrize("host_factor", [0.0, 1.0])
def test_gradients_equal_those_without_a_stash_and_all_pages_come_back(overflow, host_factor):
    """Several microbatches whose number changes, in two orders, with validation in between; most layers go through pages."""
    model, plain = build(), build()
    factor = {} if host_factor == 0 else {"device_factor": 0.4, "host_factor": 4.0}
    stash = recorded(model, overflow=overflow, **{"device_factor": 9.0, **factor})
    spilled = 0
    # The last layer of a forward stays where it is, once it is known which that is: 4 layers, then 8, then 12 in a row.
    steps = [(1, 1, 3), (3, 1, 9), (2, 2, 8), (6, 3, 12 + 11), (1, 1, 4)]
    for step, (microbatches, together, layers) in enumerate(steps):
        for first in range(0, microbatches, together):
            for one in (model, plain):
                # forward forward backward backward where several are together
                losses = [one.loss(batch(10 * step + first + index)) for index in range(together)]
                with torch.no_grad():
                    one.loss(batch(99))
                for loss in losses:
                    loss.backward()
        assert_equal(model.gradients(), plain.gradients())
        assert pages_in_use(stash) == 0
        assert not finish(stash)
        statistics = stash.statistics(wait=True)
        assert statistics.saves == 2 * layers
        assert 0 < statistics.live_rows < statistics.capacity_rows == 2 * layers * 24
        assert (statistics.overflowed, statistics.over_capacity) == (0, 0)
        spilled += statistics.spilled
        assert statistics.moved_bytes == statistics.live_rows * (8 + 16) * 4 // 2
    assert (spilled > 0) == (host_factor > 0)


def test_the_order_of_the_first_layers_last_is_only_slower():
    """Backward in an order nobody foresees: the loss of a microbatch before the one that was computed last."""
    model, plain = build(), build()
    recorded(model, overflow="skip", device_factor=9.0)
    for one in (model, plain):
        losses = [one.loss(batch(index)) for index in range(4)]
        for index in (2, 0, 3, 1):
            losses[index].backward()
    assert_equal(model.gradients(), plain.gradients())


def test_what_is_reloaded_is_zero_behind_the_live_rows():
    model = build(layers=2)
    stash = recorded(model, overflow="skip", device_factor=9.0)
    save = partial(stash.save, "mine")
    tensors = [torch.full((24, width), float("nan")) for width in (8, 16)]
    for tensor in tensors:
        tensor[:5] = 7.0
    rows = save(tensors, torch.tensor([5]))
    save(tensors, torch.tensor(2))  # the first lets go of its originals
    for tensor, original in zip(stash.load(rows), tensors, strict=True):
        assert tensor.data_ptr() != original.data_ptr()
        assert torch.equal(tensor[:5], original[:5])
        assert not tensor[5:].any()


@pytest.mark.parametrize("live", [0, 24, 30, -3])
def test_no_tokens_all_tokens_and_more_than_there_is_room_for(live):
    model = build(layers=2)
    stash = recorded(model, overflow="skip", device_factor=9.0)
    save = partial(stash.save, "mine")
    tensors = [torch.randn(24, 8), torch.randn(24, 16)]
    rows = save(tensors, torch.tensor(live))
    empty = save([torch.empty(0, 8)], torch.tensor(0))
    kept = min(max(live, 0), 24)
    for tensor, original in zip(stash.load(rows), tensors, strict=True):
        assert torch.equal(tensor[:kept], original[:kept])
        assert not tensor[kept:].any()
    assert stash.load(empty)[0].shape == (0, 8)
    finish(stash)
    assert stash.statistics(wait=True).over_capacity == (2 if live != kept else 0)


def test_fp8_rows_and_three_dims_keep_shape_and_dtype():
    model = build(layers=2)
    stash = recorded(model, overflow="skip", device_factor=9.0)
    save = partial(stash.save, "mine")
    quantized = torch.randn(24, 2, 8).to(torch.float8_e4m3fn)
    shapes = [quantized, torch.randn(24, 2, dtype=torch.float64), torch.randn(24)]
    stash.load(save(shapes, torch.tensor(0)))
    stash.overflowed()
    stash.end_step()  # pages for kinds that the recorded step did not have
    rows = save(shapes, torch.tensor(9))
    save(shapes, torch.tensor(0))
    for tensor, original in zip(stash.load(rows), shapes, strict=True):
        assert (tensor.shape, tensor.dtype) == (original.shape, original.dtype)


def test_only_what_is_needed_is_held():
    """After a forward the originals of two layers are alive, of the others only pages."""
    model = build(layers=8, slack=4)
    stash = recorded(model, overflow="keep", device_factor=1.5)
    loss = model.loss(batch(0))
    originals = [held for held in stash._outstanding.values() if not held.needs_fetch]
    assert len(originals) == 2
    loss.backward()
    stash.end_step()
    statistics = stash.statistics(wait=True)
    assert statistics.ordinary_bytes == 8 * 4 * 24 * (8 + 16) * 4
    assert statistics.page_bytes <= 1.5 * statistics.ordinary_bytes / 4 + 2 * 4 * 16 * 4 * 8
    assert statistics.kept_bytes == 2 * 4 * 24 * (8 + 16) * 4
    assert statistics.saved_bytes == statistics.ordinary_bytes - statistics.kept_bytes - statistics.page_bytes > 0


LAYER = 24 * (8 + 16) * 4  # bytes of one toy layer's save


@pytest.mark.parametrize(("overflow", "layers"), [("keep", 2), ("skip", 1), ("rerun", 1)])
def test_what_stays_beside_the_pages_is_counted_before_there_are_pages_as_after(overflow, layers):
    model = build(layers=5)
    stash = recorded(model, overflow=overflow, device_factor=9.0)
    assert stash.statistics(wait=True).kept_bytes == layers * LAYER
    for _ in range(2):
        model.loss(batch(1)).backward()
        loss = model.loss(batch(2))  # its backward comes in the next step
        finish(stash)
        assert stash.statistics(wait=True).kept_bytes == layers * LAYER
        loss.backward()
        finish(stash)
        assert stash.statistics(wait=True).kept_bytes == LAYER, "the end of a step leaves the last where it is"


def test_what_found_no_pages_and_stays_is_counted_until_it_is_loaded():
    model = build(layers=5)
    stash = recorded(model, overflow="keep")
    for kind, pool in stash._pools.items():
        stash._allocate({**{other: one.size for other, one in stash._pools.items()}, kind: type(pool.size)(1)})
        break
    with pytest.warns(UserWarning, match="found no pages and stay where they are"):
        losses = [model.loss(batch(index)) for index in range(2)]
    for loss in losses:
        loss.backward()
    stash.end_step()
    statistics = stash.statistics(wait=True)
    assert statistics.overflowed >= 8
    assert statistics.kept_bytes == statistics.ordinary_bytes == 10 * LAYER, "one page of one kind is enough for nobody"
    assert statistics.saved_bytes == -statistics.page_bytes < 0


def test_the_last_layer_of_a_forward_stays_where_it_is_and_needs_no_pages():
    model, plain = build(layers=5), build(layers=5)
    stash = recorded(model, overflow="skip")
    assert [pool.counters[Counter.SAVES] for pool in stash._pools.values()] == [0, 0]
    loss = model.loss(batch(0))
    assert [pool.counters[Counter.SAVES] for pool in stash._pools.values()] == [4, 4]
    assert [pool.counters[Counter.TAIL] - pool.counters[Counter.HEAD] for pool in stash._pools.values()] == [0, 0], (
        "pages are just enough for the others"
    )
    loss.backward()
    plain.loss(batch(0)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert pages_in_use(stash) == 0


def test_a_last_layer_that_another_one_follows_goes_into_pages_too():
    """The forward is longer than the one before it: by a second microbatch, then by layers that were left out."""
    model, plain = build(layers=5), build(layers=5)
    stash = recorded(model, overflow="skip", device_factor=3.0)
    losses = [model.loss(batch(index)) for index in range(2)]
    assert [pool.counters[Counter.SAVES] for pool in stash._pools.values()] == [10, 10]
    for index, loss in reversed([*enumerate(losses)]):
        loss.backward()
        plain.loss(batch(index)).backward()
        assert_equal(model.gradients(), plain.gradients())
    assert not finish(stash)
    model.loss(batch(2)).backward()
    kept = model.loss(batch(3))  # its backward comes in the next step
    assert not finish(stash)
    originals = [held for held in stash._outstanding.values() if not held.needs_fetch]
    assert len(originals) == 1, "over the end of a step all but the last are in pages"
    kept.backward()
    for index in (2, 3):
        plain.loss(batch(index)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert pages_in_use(stash) == 0


def test_rows_are_fetched_one_layer_ahead():
    model = build(layers=5)
    stash = recorded(model, overflow="skip", device_factor=9.0)
    stash.start_trace()
    model.loss(batch(0)).backward()
    events = [(one.layer, one.event) for one in stash.stop_trace() if one.kind.width == 8]
    assert events[:4] == [(f"experts.{layer}", "save") for layer in range(4)]
    # The last layer's rows are still where they were. The layer before is fetched while the last one's backward runs, and so on.
    assert events[4:7] == [("experts.4", "load"), ("experts.3", "fetch"), ("experts.3", "load")]
    assert [layer for layer, event in events if event == "fetch"] == [f"experts.{layer}" for layer in (3, 2, 1, 0)]


# -- too few pages -----------------------------------------------------------------------------------------------------


def test_keep_loses_nothing_warns_once_and_grows():
    model, plain = build(layers=6), build(layers=6)
    stash = recorded(model, overflow="keep", device_factor=0.3)
    before = stash._pools
    with pytest.warns(UserWarning, match=r"rows of experts\.\d found no pages and stay where they are") as caught:
        model.loss(batch(1)).backward()
    assert len(caught) == 1
    plain.loss(batch(1)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert pages_in_use(stash) == 0
    sizes = {kind: pool.size.pages for kind, pool in before.items()}
    assert stash.end_step(), "pages moved"
    assert all(pool.size.pages > sizes[kind] for kind, pool in stash._pools.items())
    model.loss(batch(1)).backward()
    assert not stash.end_step()
    assert stash.statistics(wait=True).overflowed == 0
    for limit in (1, 2):  # no second warning, which would be an error here
        stash._allocate({kind: type(pool.size)(limit) for kind, pool in stash._pools.items()})
        model.loss(batch(2)).backward()
        assert stash.end_step()
    assert stash.growths == 3


@pytest.mark.parametrize("overflow", ["skip", "rerun"])
def test_a_step_with_wrong_gradients_is_told_and_can_be_done_again(overflow):
    model, plain = build(layers=6), build(layers=6)
    stash = recorded(model, overflow=overflow, device_factor=0.3)
    model.loss(batch(1)).backward()
    assert stash.overflowed()
    wrong = model.gradients()
    assert all(gradient.isfinite().all() for gradient in wrong), "zeros were loaded, not what lay there"
    with stash.paused():
        model.loss(batch(1)).backward()
    plain.loss(batch(1)).backward()
    assert_equal(model.gradients(), wanted := plain.gradients())
    assert any(not torch.equal(one, other) for one, other in zip(wrong, wanted, strict=True))
    assert stash.end_step()
    model.loss(batch(1)).backward()
    assert_equal(model.gradients(), wanted)
    assert not finish(stash)


def crowd(model, is_crowded):
    """All tokens go to experts, or few."""
    for experts in model.experts:
        experts.threshold.fill_(-9.0 if is_crowded else 1.0)


def sparse_then(overflow, **options):
    """A model and its stash, whose pages are enough for few tokens."""
    model = build(layers=5)
    crowd(model, False)
    return model, recorded(model, overflow=overflow, **options)


@pytest.mark.parametrize("overflow", ["skip", "rerun"])
def test_what_overflows_after_the_question_is_part_of_the_next_steps(overflow):
    """A forward for the next step, computed between the question and the end of the step."""
    model, stash = sparse_then(overflow)
    losses = []
    for is_crowded, told, moves in ((True, False, False), (False, True, True), (False, False, False)):
        loss = losses.pop() if losses else model.loss(batch(0))
        stash.submit_overflow()
        loss.backward()
        crowd(model, is_crowded)
        losses.append(model.loss(batch(1)))
        assert stash.overflowed() == told
        gradients = model.gradients()
        assert stash.end_step() == moves
        assert (stash.statistics(wait=True).overflowed > 0) == is_crowded, "each counts in the step that saved it"
    plain = build(layers=5)
    crowd(plain, False)
    plain.loss(batch(1)).backward()
    assert_equal(gradients, plain.gradients())  # saved in the step that was left out, and after its question
    crowd(model, True)
    losses.pop().backward()
    model.loss(batch(1)).backward()
    assert not finish(stash), "pages were made for what was wanted in the step before the question"
    assert stash.statistics(wait=True).overflowed == 0


def test_pages_that_were_replaced_leave_their_question_to_the_new_ones():
    """One forward overflows before the question and one after it, for the next step."""
    model, stash = sparse_then("skip")
    crowd(model, True)
    loss = model.loss(batch(0))
    stash.submit_overflow()
    loss.backward()
    kept = model.loss(batch(1))
    assert stash.overflowed()
    assert stash.end_step()
    kept.backward()
    assert stash.overflowed()
    stash.end_step()
    assert not finish(stash)


def test_giving_up_a_step_gives_up_what_was_to_be_asked():
    model, stash = sparse_then("skip")
    assert not stash.overflowed()
    crowd(model, True)
    model.loss(batch(1))
    stash.end_step()
    stash.abort()
    assert not finish(stash)


@pytest.mark.parametrize("overflow", ["skip", "rerun"])
def test_a_backward_that_the_question_does_not_tell_of_is_refused_until_it_is_asked_again(overflow):
    """Two microbatches; asked before the first backward alone, nobody knows what the second one read."""
    model, stash = sparse_then(overflow)
    loss = model.loss(batch(0))
    stash.submit_overflow()
    loss.backward()
    crowd(model, True)
    model.loss(batch(1)).backward()
    for ask in (stash.overflowed, stash.end_step):
        with pytest.raises(
            EngineStateError, match=r"rows of experts\.0 were saved after submit_overflow\(\) and read in"
        ):
            ask()
    stash.submit_overflow()
    assert stash.overflowed()
    assert stash.end_step()


def test_fused_optimizers_pass_over_a_step_without_asking_the_host():
    model = build(layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    stash = recorded(model, overflow="skip", device_factor=0.3)
    changed = []
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.loss(batch(1)).backward()
        optimizer.found_inf = stash.overflow_on_device()
        optimizer.step()
        optimizer.zero_grad()
        told = stash.overflowed()
        changed.append([not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)])
        assert told != all(changed[-1])
        stash.end_step()
    assert changed == [[False] * 24, [True] * 24], "passed over, and taken with more pages"


def test_nobody_steps_without_having_asked():
    model = build()
    stash = recorded(model, overflow="skip")
    model.loss(batch(0)).backward()
    with pytest.raises(EngineStateError, match=r"overflowed\(\) was not called"):
        stash.end_step()


def train_with_one_full_rank(rank, world, overflow, device):
    """Rank 1 has far more live rows than were recorded, in the third step only."""
    model = build(layers=5).to(device)
    stash = model.stash_with(StashConfig(page_rows=4, overflow=overflow))
    told, moved, sizes, growths = [], [], [], []
    for step in range(4):
        for experts in model.experts:
            experts.threshold.fill_(-9.0 if (rank, step) == (1, 2) else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "keep" warns
            loss = model.loss(batch(step).to(device))
            stash.submit_overflow()
            loss.backward()
        told.append(stash.overflowed())
        moved.append(stash.end_step())
        sizes.append({kind.width: pool.size.pages for kind, pool in stash._pools.items()})
        growths.append(stash.growths)
    return told, moved, sizes, growths


def one_rank_overflows(rank, world, device="cpu"):
    modes = ("skip", "rerun", "keep")
    return {overflow: train_with_one_full_rank(rank, world, overflow, device) for overflow in modes}


def one_rank_saves(rank, world):
    """Nobody does while recording, then rank 1 alone."""
    model = build(layers=2)
    stash = model.stash_with(StashConfig(page_rows=4, overflow="skip"))
    told, moved = [stash.overflowed()], [stash.end_step()]
    for _ in range(2):
        if rank == 1:
            model.loss(batch(0)).backward()
        told.append(stash.overflowed())
        moved.append(stash.end_step())
    return told, moved, {kind.width: pool.size.pages for kind, pool in stash._pools.items()}


def one_rank_overflows_after_the_question(rank, world):
    """Forwards for the next step; the third of rank 1 is crowded."""
    model = build(layers=5)
    stash = model.stash_with(StashConfig(page_rows=4, overflow="skip"))
    told, moved, loss = [], [], None
    for step in range(5):
        stash.submit_overflow()
        if loss is not None:
            loss.backward()
        crowd(model, (rank, step) == (1, 2))
        loss = model.loss(batch(step))
        told.append(stash.overflowed())
        moved.append(stash.end_step())
    return told, moved, {kind.width: pool.size.pages for kind, pool in stash._pools.items()}


def test_one_rank_overflows_after_the_question_and_all_ranks_hear_of_it_in_the_next_step():
    first, second = run_distributed(one_rank_overflows_after_the_question, 2)
    assert first == second
    assert first[:2] == ([False, False, False, True, False], [True, False, False, True, False])


def test_one_rank_overflows_and_all_ranks_act_alike():
    assert_ranks_acted_alike(run_distributed(one_rank_overflows, 2))
    first, second = run_distributed(one_rank_saves, 2)
    assert first == second
    assert first[:2] == ([False, True, False], [True, True, False])
    assert all(pages > 0 for pages in first[2].values())


def assert_ranks_acted_alike(ranks):
    for overflow in ("skip", "rerun"):
        assert ranks[0][overflow] == ranks[1][overflow]
        told, moved, sizes, growths = ranks[0][overflow]
        assert told == [False, False, True, False]
        assert moved == [True, False, True, False]
        assert growths == [0, 0, 1, 1]
        assert sizes[2][8] > sizes[1][8]
    # "keep" is nobody else's business: no gradient is wrong, and the other rank keeps its pages.
    assert [rank["keep"][1] for rank in ranks] == [[True, False, False, False], [True, False, True, False]]
    assert ranks[0]["keep"][0] == [False] * 4
    assert ranks[0]["keep"][2][0] == ranks[1]["keep"][2][0], "recorded sizes are everybody's"


def test_average_and_maximum_of_recorded_steps():
    sizes = {}
    for sizing in ("average", "maximum"):
        model = build(layers=3)
        stash = model.stash_with(StashConfig(page_rows=1, device_factor=1.0, recorded_steps=2, sizing=sizing))
        rows = []
        for threshold in (1.0, -0.5):
            for experts in model.experts:
                experts.threshold.fill_(threshold)
            model.loss(batch(0)).backward()
            stash.end_step()
            rows.append(stash.statistics(wait=True).live_rows // 2)
        sizes[sizing] = {pool.size.pages for pool in stash._pools.values()}
    assert sizes == {"average": {-(-sum(rows) // 2)}, "maximum": {max(rows)}}


# -- accidents ---------------------------------------------------------------------------------------------------------


class StopError(Exception):
    """Raised in the middle."""


def test_an_exception_in_the_middle_of_a_backward_or_forward():
    model, plain = build(), build()
    stash = recorded(model, overflow="skip", device_factor=2.0)
    loss = model.loss(batch(1))

    def stop(_):
        raise StopError

    handle = model.dense[2].weight.register_hook(stop)
    with pytest.raises(StopError):
        loss.backward()
    assert pages_in_use(stash) > 0
    stash.abort()
    handle.remove()
    model.zero_grad()
    assert pages_in_use(stash) == 0
    handle = model.dense[3].register_forward_pre_hook(stop_forward)
    with pytest.raises(StopError):
        model.loss(batch(1))
    stash.abort()
    handle.remove()
    for _ in range(2):
        model.loss(batch(1)).backward()
        plain.loss(batch(1)).backward()
        assert_equal(model.gradients(), plain.gradients())
        assert pages_in_use(stash) == 0
        assert not finish(stash)


def stop_forward(module, arguments):
    raise StopError


def test_a_given_up_step_cannot_be_loaded_any_more():
    model = build()
    stash = recorded(model)
    loss = model.loss(batch(1))
    stash.abort()
    with pytest.raises(EngineStateError, match=r"rows of experts\.3 belong to a step that was abandoned"):
        loss.backward()


def test_a_forward_without_a_backward_gives_its_pages_back_at_the_end_of_the_step():
    model, plain = build(), build()
    stash = recorded(model, device_factor=4.5)
    model.loss(batch(1))  # forgotten
    kept = model.loss(batch(2))  # not forgotten
    model.loss(batch(3)).backward()
    model.gradients()
    in_use = pages_in_use(stash)
    stash.end_step()
    assert 0 < pages_in_use(stash) < in_use
    kept.backward()
    plain.loss(batch(2)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert pages_in_use(stash) == 0


@pytest.mark.parametrize("overflow", ["keep", "skip", "rerun"])
def test_a_last_layer_whose_backward_comes_in_the_next_step_needs_no_pages(overflow):
    """Nobody would hear that it found none: the question was asked before the end of the step."""
    model, plain = build(), build()
    stash = recorded(model, overflow=overflow)
    kept = model.loss(batch(0))
    assert not finish(stash)
    assert stash.statistics(wait=True).overflowed == 0
    kept.backward()
    plain.loss(batch(0)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert not finish(stash)
    assert pages_in_use(stash) == 0


@pytest.mark.parametrize("overflow", ["skip", "rerun"])
def test_what_was_saved_in_a_step_with_too_few_pages_is_not_loaded_in_a_later_one(overflow):
    model, plain = build(layers=6), build(layers=6)
    stash = recorded(model, overflow=overflow, device_factor=0.3)
    kept = model.loss(batch(1))
    assert stash.overflowed()
    assert stash.end_step()
    with pytest.raises(EngineStateError, match=r"rows of experts\.5 belong to a step in which rows found no pages"):
        kept.backward()
    assert pages_in_use(stash) == 0
    model.zero_grad()
    for one in (model, plain):
        one.loss(batch(1)).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert not finish(stash)


def test_a_copy_of_a_model_is_no_part_of_its_stash():
    model, plain = build(), build()
    stash = recorded(model, overflow="skip")
    twin = copy.deepcopy(model)
    for one in (twin, plain):
        one.loss(batch(1)).backward()
    assert_equal(twin.gradients(), plain.gradients())
    assert not finish(stash)
    assert stash.statistics(wait=True).saves == 0


def test_a_second_backward_is_refused():
    model = build()
    recorded(model)
    loss = model.loss(batch(1))
    loss.backward(retain_graph=True)
    with pytest.raises(EngineStateError, match=r"rows of experts\.3 were loaded before"):
        loss.backward()


def test_checkpoints_that_recompute_under_autograd_are_allowed_and_others_refused():
    model, plain = build(), build()
    stash = recorded(model, overflow="skip", device_factor=3.0)
    for one in (model, plain):
        checkpoint(one, batch(1).requires_grad_(), use_reentrant=True).square().mean().backward()
    assert_equal(model.gradients(), plain.gradients())
    assert pages_in_use(stash) == 0
    finish(stash)
    assert stash.statistics(wait=True).saves == 0, "recomputed rows are loaded at once, so they stay"
    with pytest.raises(EngineStateError, match=r"experts\.0 is recomputed in backward by an activation checkpoint"):
        checkpoint(model, batch(1).requires_grad_(), use_reentrant=False).square().mean().backward()
    stash.abort()
    model.zero_grad()
    plain.zero_grad()
    for one in (model, plain):
        one.loss(batch(1)).backward()
    assert_equal(model.gradients(), plain.gradients())


def test_writing_to_what_was_saved_is_noticed():
    model = build()
    stash = recorded(model, overflow="skip")
    save, tensor = partial(stash.save, "mine"), torch.ones(24, 8)
    save([tensor], torch.tensor(3))
    tensor.add_(1)
    with pytest.raises(EngineStateError, match="was written to in place after it was saved"):
        save([torch.ones(24, 8)], torch.tensor(3))


def test_what_does_not_fit_the_seam_is_refused():
    stash = recorded(build())
    save = partial(stash.save, "layers.0.experts")
    with pytest.raises(EngineStateError, match=r"layers\.0\.experts gave live_rows as torch\.int32 of shape \[\]"):
        save([torch.ones(3, 2)], torch.tensor(1, dtype=torch.int32))
    with pytest.raises(EngineStateError, match="expected the same number of rows in all, on cpu"):
        save([torch.ones(3, 2), torch.ones(4, 2)], torch.tensor(1))


def test_the_trace_follows_the_pages():
    model = build(layers=3)
    stash = recorded(model, overflow="skip", device_factor=2.0)
    stash.start_trace()
    model.loss(batch(1)).backward()
    trace = [one for one in stash.stop_trace() if one.kind.width == 8]
    used = [one.used for one in trace]
    pool = stash._pools[trace[0].kind]
    assert used[:3] == sorted(used[:3])
    assert max(used) == pool.counters[Counter.MOST_USED] <= trace[0].pages
    assert used[-1] == 0
    assert stash.stop_trace() == []


def test_two_saves_for_one_load_are_refused():
    saver, call = recorded(build()).saver("layers.0.experts"), SimpleNamespace()
    saver.save(call, [torch.ones(3, 2)], torch.tensor(1))
    with pytest.raises(EngineStateError, match=r"layers\.0\.experts saves twice in one call of its autograd function"):
        saver.save(call, [torch.ones(3, 2)], torch.tensor(1))
