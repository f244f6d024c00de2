"""Experts whose backward reads rows in their pages: gradients to the bit as with ordinary saves, and nothing is copied back."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe import GroupedExperts, OrdinarySaver
from lightning_mfsdp.moe.activations import ACTIVATIONS
from lightning_mfsdp.moe.saving import LendingSaver, PagedRows, lent, save_to_lend
from lightning_mfsdp.moe.stash import RowStash, StashConfig, reference
from lightning_mfsdp.moe.stash.pages import PoolSize, Tier
from lightning_mfsdp.moe.stash.stash import LayerSaver
from tests.helpers.pairwise import pairwise
from tests.moe.page_cases import in_pages
from tests.moe.test_stash import assert_equal, finish, pages_in_use

DIM, TOKENS, LAYERS = 8, 24, 4
FEW = 5  # rows on average, fewer than tokens
NAN = float("nan")

pytestmark = pytest.mark.usefixtures("_poisoned")


@pytest.fixture
def _poisoned():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layers(nn.Module):
    """Experts with a dense layer before each. Tokens whose first feature is below a threshold choose nobody.

    With `few` rows on average the experts have fewer rows than tokens, and save their input beside the projection.
    """

    def __init__(self, *, layers: int = LAYERS, few: bool = False, activation: str = "swiglu", dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        sizes = {
            "num_experts": 3,
            "hidden_size": DIM,
            "intermediate_size": 6,
            "init_std": 0.5,
            "capacity_factor": 3.0,
            "over_capacity": "drop",
        }
        self.few, self.threshold = few, 0.0
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM, dtype=dtype) for _ in range(layers))
        self.experts = nn.ModuleList(GroupedExperts(**sizes, activation=activation, dtype=dtype) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        for dense, experts in zip(self.dense, self.experts, strict=True):
            tokens = dense(tokens)
            scores, index = tokens[:, :3].softmax(-1).topk(1 if self.few else 2)
            index = torch.where(tokens[:, :1] > self.threshold, index, -1)
            tokens = tokens + experts.compute(tokens, index, scores, average_rows=FEW if self.few else None)
        return tokens

    def loss(self, index: int, live: float = 0.0) -> Tensor:
        """Of a batch; more rows are live the lower `live` is."""
        self.threshold = live
        generator = torch.Generator().manual_seed(100 + index)
        return self(torch.randn(TOKENS, DIM, generator=generator).to(self.dense[0].weight.dtype)).square().mean()

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad.clone() for parameter in self.parameters()]
        self.zero_grad()
        return found


class Spy(LayerSaver):
    """Notes what is lent."""

    def __init__(self, stash, layer, notes) -> None:
        super().__init__(stash, layer)
        self.notes = notes

    @contextmanager
    def lend(self, ctx, kept):
        with super().lend(ctx, kept) as tensors:
            self.notes.lent.append([type(one) for one in tensors])
            yield tensors


def stash_of(model, **options):
    stash = RowStash(StashConfig(**options), torch.device("cpu"))
    for index, experts in enumerate(model.experts):
        experts.saver = stash.saver(f"experts.{index}")
    return stash


def stashed(model, **options):
    """A stash with pages, whose free ones hold NaN, and notes of what is copied back and lent from now on."""
    config = {"page_rows": 4, "device_factor": 9.0, "overflow": "skip", **options}
    stash, notes = stash_of(model, **config), SimpleNamespace(lent=[], copied=0)
    model.loss(0).backward()
    model.zero_grad()
    stash.overflowed()
    assert stash.end_step()

    def copy_out(*given):
        notes.copied += 1
        reference.copy_out(*given)

    stash._ops = SimpleNamespace(**{**vars(reference), "copy_out": copy_out})
    for index, experts in enumerate(model.experts):
        experts.saver = Spy(stash, f"experts.{index}", notes)
    poison(stash)
    return stash, notes


def poison(stash) -> None:
    assert pages_in_use(stash) == 0
    for pool in stash._pools.values():
        pool.rows.fill_(-1)
        pool.host_rows.fill_(-1)


def in_pages_count(notes) -> int:
    return sum(kinds == [PagedRows] for kinds in notes.lent)


@pytest.mark.parametrize(
    ("few", "overflow", "activation", "dtype"),
    [
        (few, overflow, *computed)
        for few, overflow, computed in pairwise(
            (False, True),
            ("keep", "skip", "rerun"),
            (("swiglu", torch.float32), ("gelu", torch.bfloat16), ("swiglu", torch.float64)),
        )
    ],
)
def test_gradients_equal_those_of_ordinary_saves_whatever_the_order(few, overflow, activation, dtype):
    model, plain = (Layers(few=few, activation=activation, dtype=dtype) for _ in range(2))
    stash, notes = stashed(model, overflow=overflow)
    for step, (microbatches, together) in enumerate([(1, 1), (3, 1), (2, 2), (6, 3), (1, 1)]):
        for first in range(0, microbatches, together):
            for one in (model, plain):
                # forward forward backward backward where several are together
                losses = [one.loss(10 * step + first + part, 0.4 * part - 0.3) for part in range(together)]
                for loss in losses:
                    loss.backward()
        assert_equal(model.gradients(), plain.gradients())
        poison(stash)
        assert not finish(stash)
        assert stash.statistics(wait=True).live_rows > 0
    if few:
        assert in_pages_count(notes) == 0, "products read the input, whole"
        assert notes.copied > 0
    else:
        assert in_pages_count(notes) >= (1 + 3 + 2 + 6 + 1) * 2
        assert notes.copied == 0


@pytest.mark.parametrize("live", [9.0, 0.0, -99.0])
def test_no_live_rows_some_and_all(live):
    model, plain = Layers(), Layers()
    stash, notes = stashed(model, page_rows=5)
    for one in (model, plain):
        one.loss(1, live).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert in_pages_count(notes) == LAYERS - 1
    assert pages_in_use(stash) == 0


def test_rows_of_frozen_first_weights_are_lent_also_where_they_are_few():
    model, plain = Layers(few=True), Layers(few=True)
    for one in (model, plain):
        for experts in one.experts:
            experts.weight_in.requires_grad_(False)
    _, notes = stashed(model)
    for one in (model, plain):
        one.loss(1).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
    assert (in_pages_count(notes), notes.copied) == (LAYERS - 1, 0)


def test_pages_go_back_as_each_layer_has_read_them_and_nothing_is_fetched():
    model = Layers()
    stash, notes = stashed(model)
    loss = model.loss(1)
    stash.start_trace()
    loss.backward()
    trace = stash.stop_trace()
    assert [(one.layer, one.event) for one in trace] == [(f"experts.{layer}", "load") for layer in (3, 2, 1, 0)]
    assert notes.lent == [[Tensor], [PagedRows], [PagedRows], [PagedRows]], "the last layer is where it was"
    used = [one.used for one in trace]
    assert used == sorted(set(used), reverse=True)
    assert used[-1] == 0


def events_of_backward(model, plain, stash):
    """Which layer's rows were loaded or fetched, in order. The gradients are those of ordinary saves."""
    loss = model.loss(1)
    stash.start_trace()
    loss.backward()
    plain.loss(1).backward()
    assert_equal(model.gradients(), plain.gradients())
    return [(one.layer, one.event) for one in stash.stop_trace()]


def test_rows_are_fetched_ahead_for_a_layer_that_loads_among_layers_that_lend():
    model, plain = Layers(), Layers()
    stash, notes = stashed(model)
    kept = stash.saver("of my own")

    class Mine(OrdinarySaver):
        def save(self, ctx, tensors, live_rows):
            return kept.save(ctx, tensors, live_rows)

        def load(self, ctx, saved):
            return kept.load(ctx, saved)

    model.experts[1].saver = Mine()
    events = events_of_backward(model, plain, stash)
    assert events[1:4] == [("experts.2", "load"), ("of my own", "fetch"), ("of my own", "load")]
    assert (in_pages_count(notes), notes.copied) == (2, 1)


def test_with_pages_on_the_host_rows_are_fetched_one_layer_ahead():
    model, plain = Layers(), Layers()
    stash, notes = stashed(model, device_factor=0.4, host_factor=4.0)
    events = events_of_backward(model, plain, stash)
    assert events[:3] == [("experts.3", "load"), ("experts.2", "fetch"), ("experts.2", "load")]
    assert not finish(stash)
    assert stash.statistics(wait=True).spilled > 0
    assert (in_pages_count(notes), notes.copied) == (0, LAYERS - 1)


def test_saves_outlive_pages_of_another_size_and_on_another_tier():
    model, plain = Layers(), Layers()
    stash, notes = stashed(model, overflow="keep")
    for host_pages in (40, 0):
        kept = [one.loss(1) for one in (model, plain)]
        assert not finish(stash)
        stash._allocate({kind: PoolSize(2 if host_pages else 90, host_pages) for kind in stash._pools})
        for one, earlier in zip((model, plain), kept, strict=True):
            loss = one.loss(2)
            earlier.backward()
            loss.backward()
        assert_equal(model.gradients(), plain.gradients())
        assert pages_in_use(stash) == 0
        finish(stash)
    assert in_pages_count(notes) > 0
    assert notes.copied > 0


# -- too few pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["skip", "rerun"])
def test_a_step_in_which_rows_found_no_pages_has_finite_gradients_and_is_told(overflow):
    model, plain = Layers(layers=6), Layers(layers=6)
    stash, notes = stashed(model, device_factor=0.3, overflow=overflow)
    model.loss(1).backward()
    assert (in_pages_count(notes), notes.copied) == (5, 0)
    assert stash.overflowed()
    wrong = model.gradients()
    assert all(gradient.isfinite().all() for gradient in wrong), "zeros were read, not what lay there"
    with stash.paused():
        model.loss(1).backward()
    plain.loss(1).backward()
    assert_equal(model.gradients(), wanted := plain.gradients())
    assert any(not torch.equal(one, other) for one, other in zip(wrong, wanted, strict=True))
    assert stash.end_step()
    poison(stash)
    model.loss(1).backward()
    assert_equal(model.gradients(), wanted)
    assert not finish(stash)


def test_keep_lends_originals_where_there_are_too_few_pages():
    model, plain = Layers(layers=6), Layers(layers=6)
    stash, notes = stashed(model, device_factor=0.3, overflow="keep")
    with pytest.warns(UserWarning, match="found no pages and stay where they are"):
        model.loss(1).backward()
    plain.loss(1).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert [Tensor] in notes.lent[2:]
    assert notes.copied == 0
    assert stash.end_step()
    assert pages_in_use(stash) == 0


# -- accidents ---------------------------------------------------------------------------------------------------------


def test_a_second_backward_is_refused():
    model = Layers()
    stash, _ = stashed(model)
    loss = model.loss(1)
    loss.backward(retain_graph=True)
    assert pages_in_use(stash) == 0
    with pytest.raises(EngineStateError, match=r"rows of experts\.3 were loaded before"):
        loss.backward()


def fail_on(rows) -> None:
    assert isinstance(rows, PagedRows)
    raise TypeError("a reader of pages")


def test_pages_go_back_also_where_their_reader_raises():
    stash, _ = stashed(Layers())
    saver, calls = stash.saver("mine"), [SimpleNamespace() for _ in range(2)]
    for call in calls:
        saver.save_to_lend(call, [torch.ones(TOKENS * 2 + 1, 12)], torch.tensor(9))
    in_use = pages_in_use(stash)
    with pytest.raises(TypeError, match="a reader of pages"), saver.lend(calls[0], ()) as (rows,):
        fail_on(rows)
    assert pages_in_use(stash) == in_use - 3
    with pytest.raises(EngineStateError, match="rows of mine were loaded before"), saver.lend(calls[0], ()):
        pass


def test_what_was_saved_to_lend_can_be_loaded_and_forgotten():
    stash, notes = stashed(Layers())
    saver, calls, tensor = stash.saver("mine"), [SimpleNamespace() for _ in range(3)], torch.randn(49, 12)
    for call in calls:
        saver.save_to_lend(call, [tensor], torch.tensor(9))
    (found,) = saver.load(calls[0], ())
    assert torch.equal(found[:9], tensor[:9])
    assert not found[9:].any()
    assert notes.copied == 1
    in_use = pages_in_use(stash)
    calls.pop(1)
    finish(stash)
    assert pages_in_use(stash) < in_use
    stash.abort()
    with pytest.raises(EngineStateError, match="belong to a step that was abandoned"), saver.lend(calls[1], ()):
        pass


@pytest.mark.parametrize("shape", [(24, 2, 8), (24,), (0, 8)], ids=str)
def test_what_is_lent_keeps_shape_and_dtype(shape):
    stash, _ = stashed(Layers())
    saver, calls, tensor = stash.saver("mine"), [SimpleNamespace() for _ in range(3)], torch.randn(shape).bfloat16()
    saver.save_to_lend(calls[0], [tensor], torch.tensor(9))
    with saver.lend(calls[0], ()):
        pass
    stash.overflowed()
    stash.end_step()  # pages for a kind that the recorded step did not have
    for call in calls[1:]:
        saver.save_to_lend(call, [tensor], torch.tensor(9))
    with saver.lend(calls[1], ()) as (found,):
        assert isinstance(found, PagedRows)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        whole = found.whole()
    assert torch.equal(whole[:9], tensor[:9])
    assert not whole[9:].any()


# -- savers and rows ---------------------------------------------------------------------------------------------------


def test_a_saver_that_only_saves_and_loads_serves_layers_that_would_borrow():
    class Loads:
        def __init__(self) -> None:
            self.calls = []

        def save(self, ctx, tensors, live_rows):
            self.calls.append("save")
            return tensors

        def load(self, ctx, kept):
            self.calls.append("load")
            return kept

    model, plain = Layers(), Layers()
    for experts in model.experts:
        experts.saver = saver = Loads()
    for one in (model, plain):
        one.loss(1).backward()
    assert_equal(model.gradients(), plain.gradients())
    assert saver.calls == ["save", "load"]
    assert not isinstance(saver, LendingSaver)
    assert isinstance(LayerSaver(None, ""), LendingSaver)


class LendsPagesOfItsOwn:
    """A page for each row."""

    def save(self, ctx, tensors, live_rows):
        return tensors

    def load(self, ctx, kept):
        return kept

    def save_to_lend(self, ctx, tensors, live_rows):
        ctx.live_rows = live_rows
        return tensors

    @contextmanager
    def lend(self, ctx, kept):
        rows = len(kept[0])
        header, table = torch.tensor([Tier.DEVICE, int(ctx.live_rows), rows, 0]), torch.arange(rows)
        yield [PagedRows(pages=one, header=header, table=table, page_rows=1, rows=rows) for one in kept]


@pytest.mark.parametrize("few", [False, True])
def test_a_saver_of_ones_own_lends_what_was_saved_to_be_lent_and_loads_the_rest(few):
    found = []
    for saver in (OrdinarySaver(), LendsPagesOfItsOwn()):
        model = Layers(few=few)
        for layer in model.experts:
            layer.saver = saver
        model.loss(1).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert isinstance(saver, LendingSaver)
    assert_equal(*found)


def test_any_saver_can_be_asked_to_lend():
    tensors, live = [torch.ones(3, 2)], torch.tensor(1)
    for saver in (OrdinarySaver(), stash_of(Layers()).saver("mine")):
        call = SimpleNamespace()
        kept = save_to_lend(saver, call, tensors, live)
        with lent(saver, call, kept) as (found,):
            assert torch.equal(found, tensors[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("live", [0, 1, 8, 11, 23])
def test_paged_rows_are_the_tensor_with_zeros_after_its_live_rows(dtype, shape, live):
    rows = (torch.randn(23, *shape) * 9).to(dtype)
    for page_rows in (1, 4, 64):
        paged = in_pages(rows, live, page_rows)
        assert (paged.shape, paged.dtype, paged.device) == (rows.shape, rows.dtype, rows.device)
        whole, wanted = (one.view(torch.uint8).view(23, -1) for one in (paged.whole(), rows))
        assert torch.equal(whole[:live], wanted[:live])
        assert not whole[live:].any()
        assert not in_pages(rows, live, page_rows, tier=Tier.NOWHERE).whole().view(torch.uint8).any()


def test_paged_rows_without_any_page_are_zero():
    empty = torch.zeros(4, dtype=torch.int64)
    for rows in (0, 5):
        paged = PagedRows(pages=torch.empty(0, 3), header=empty + 2, table=empty, page_rows=4, rows=rows)
        assert torch.equal(paged.whole(), torch.zeros(rows, 3))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_activation_computes_from_pages_what_it_computes_from_the_tensor(activation):
    kind, generator = ACTIVATIONS[activation], torch.Generator().manual_seed(0)
    projected, grad = (torch.randn(23, width, generator=generator) for width in (5 * kind.width, 5))
    probabilities, live = torch.rand(23, generator=generator), torch.tensor(11)
    wanted = kind.backward(projected, probabilities, grad, live)
    for found, one in zip(kind.backward(in_pages(projected, 11, 4), probabilities, grad, live), wanted, strict=True):
        assert torch.equal(found[:11], one[:11])
