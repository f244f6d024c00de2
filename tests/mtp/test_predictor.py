"""Losses, targets and gradients of the predictor against loops over samples and positions, in float64."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.mtp import (
    MultiTokenPredictor,
    count_drafts,
    documents_from_lengths,
    documents_from_positions,
    shifted_targets,
)
from lightning_mfsdp.ops import AlignedCollator
from tests.mtp.models import DIM, IGNORED, VOCAB, CausalLayer, Model, batch, build, same_document, samples_of

LENGTHS = (6, 1, 2, 4)


def looped(model: Model, samples: list[Tensor], learned: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The formula of the paper, sample by sample, each depth on the positions that it is defined for; labels by position of their token."""
    predictor, depth = model.predictor, model.predictor.depth
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(depth + 1)]
    counts = [0] * (depth + 1)
    for tokens, wanted in zip(samples, learned, strict=True):
        embeddings, state = model.states(tokens[None])
        for k in range(depth + 1):
            if k:
                length = len(tokens) - k  # positions whose token i + k exists
                if length < 1:
                    break
                layer = predictor.layers[0 if len(predictor.layers) == 1 else k - 1]
                both = (layer.hidden_norm(state[:, :length]), layer.embedding_norm(embeddings[:, k:]))
                state = layer.norm(layer.layer(F.linear(torch.cat(both, -1), layer.projection.weight)))
            for i in range(len(tokens) - k - 1):
                if wanted[i + k + 1] != IGNORED:
                    logits = model.head.weight @ state[0, i]
                    sums[k] = sums[k] + torch.logsumexp(logits, 0) - logits[tokens[i + k + 1]]
                    counts[k] += 1
    means = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
    return means[0], torch.stack(means[1:])


def packed(samples: list[Tensor], learned: list[Tensor], **options: int) -> dict[str, Any]:
    pairs = zip(samples, learned, strict=True)
    return AlignedCollator(8, **options)([{"input_ids": ids, "labels": labels} for ids, labels in pairs])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_losses_and_gradients_are_those_of_a_loop_over_samples_of_a_packed_batch(depth: int, shared: bool) -> None:
    model = build(depth=depth, shared=shared).double()
    reference = copy.deepcopy(model)
    samples = samples_of(LENGTHS)
    learned = [ids.clone() for ids in samples]
    learned[0][:3] = IGNORED
    one = packed(samples, learned)
    assert one["input_ids"].shape == (1, 16)
    by_positions = documents_from_positions(one["position_ids"])
    by_lengths = documents_from_lengths(one["cu_seqlens"], 16)
    assert torch.equal(by_positions - 1, by_lengths)
    for documents in (by_positions, by_lengths):
        main, ahead = model(one["input_ids"], one["labels"], documents, same_document(documents))
        expected_main, expected = looped(reference, samples, learned)
        torch.testing.assert_close(main, expected_main)
        torch.testing.assert_close(ahead, expected)
    assert ahead.dtype is torch.float64
    (main + model.predictor.weighted(ahead)).backward()
    weight = 0.3 / depth
    (expected_main + sum(weight * loss for loss in expected)).backward()
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_in_pieces_and_samples_without_tokens_behind_it_change_no_target_and_no_loss() -> None:
    model = build(depth=3).double()
    samples, found = samples_of(LENGTHS), []
    for options in ({}, {"num_tokens": 32}, {"num_tokens": 32, "max_length": 7}):
        one = packed(samples, samples, **options)
        by_lengths = documents_from_lengths(one["cu_seqlens"], one["input_ids"].numel())
        assert torch.equal(documents_from_positions(one["position_ids"]) - 1, by_lengths)
        targets = shifted_targets(one["labels"], 3, by_lengths)
        found.append(
            [targets[..., :16], *model(one["input_ids"], one["labels"], by_lengths, same_document(by_lengths))]
        )
        assert (targets[..., 16:] == IGNORED).all()
    assert one["cu_seqlens"].tolist() == [0, 6, 7, 9, 13, 20, 27, 32, 32, 32]
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


def test_rows_without_documents_are_one_sample_each_and_shorter_ones_than_the_depth_have_nothing_to_predict() -> None:
    model = build(depth=3).double()
    ids, labels = batch(0, rows=3, length=5)
    rows = [torch.cat((row, labels[index, -1:])) for index, row in enumerate(ids)]
    learned = [torch.cat((row[:1], labels[index])) for index, row in enumerate(ids)]
    main, ahead = model(ids, labels)
    # The last token of a row is a target and never an input of the model, but of a loop over whole rows it is.
    expected_main, expected = looped(model, rows, learned)
    torch.testing.assert_close(main, expected_main)
    torch.testing.assert_close(ahead, expected)
    for length in (1, 2, 3):
        main, ahead = model(ids[:, :length], labels[:, :length])
        assert torch.equal(ahead[length - 1 :], torch.zeros(4 - length, dtype=torch.float64))
        assert bool((ahead[: length - 1] > 0).all())
        model.predictor.weighted(ahead).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.predictor.parameters())


def test_gradients_to_hidden_states_and_to_embeddings_are_right_in_every_direction() -> None:
    torch.manual_seed(0)
    model = Model(dim=4, depth=2, recompute=True).double()
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    labels = torch.tensor([[3, 1, IGNORED, 4, IGNORED]])
    inputs = [torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def losses(hidden: Tensor, embeddings: Tensor) -> Tensor:
        states = model.predictor(hidden, embeddings, same_document(documents), documents=documents)
        return model.predictor.losses(states, labels, model.head, documents)

    assert torch.autograd.gradcheck(losses, inputs)
    found = torch.autograd.grad(losses(*inputs)[0], inputs)
    # Depth 1 has one target: position 0 of the first sample predicts what is after position 1, from the embedding there.
    for gradient, place in zip(found, (0, 1), strict=True):
        assert gradient.abs().sum(-1).nonzero().tolist() == [[0, place]]


def test_a_depth_of_weight_zero_leaves_the_main_loss_alone() -> None:
    model = build(loss_weight=0.0)
    reference = copy.deepcopy(model)
    model.loss(*batch(0)).backward()
    (main, _), loss = reference(*batch(0)), model.loss(*batch(0))
    main.backward()
    assert torch.equal(loss, main)
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(found) if name.startswith("predictor") else wanted.grad
        torch.testing.assert_close(found.grad, expected, rtol=0, atol=0)


def test_weights_are_shared_out_over_depths_or_given_one_by_one() -> None:
    losses = torch.tensor([1.0, 10.0, 100.0])
    for given, expected in ((0.3, 11.1), ((1.0, 0.5, 0.0), 6.0)):
        predictor = MultiTokenPredictor(DIM, CausalLayer, depth=3, loss_weight=given)
        assert float(predictor.weighted(losses)) == pytest.approx(expected)
        changed = MultiTokenPredictor(DIM, CausalLayer, depth=3)
        changed.loss_weights = given
        assert changed.loss_weights == predictor.loss_weights == copy.deepcopy(changed).loss_weights


@pytest.mark.parametrize("given", [(0.1,), -0.1, float("nan"), (0.1, "0.2"), "12", None, torch.ones(2)])
def test_weights_that_do_not_fit_are_refused_when_assigned_and_the_old_ones_stay(given: Any) -> None:
    predictor = MultiTokenPredictor(DIM, CausalLayer, depth=2, loss_weight=(0.5, 0.25))
    with pytest.raises(ValueError, match=r"loss_weight=.*: expected a number that is not negative, or 2 of them, one"):
        predictor.loss_weights = given
    assert predictor.loss_weights == (0.5, 0.25)


def test_nothing_of_one_sample_enters_the_states_of_another() -> None:
    """To the bit, even with a layer that looks at every position but its own sample's alone by the mask."""
    model = build(depth=3)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    hidden, embeddings = torch.randn(2, 1, 8, DIM).unbind()
    others = documents != 1
    found = []
    for filler in (0.0, 7.0):
        inputs = (tensor.masked_fill(others[..., None], filler) for tensor in (hidden, embeddings))
        states = model.predictor(*inputs, same_document(documents), documents=documents)
        found.append(states[:, ~others])
    assert torch.equal(*found)


def test_targets_are_those_of_a_loop_over_positions() -> None:
    one = packed(samples_of(LENGTHS), samples_of(LENGTHS))
    ids, ends, depth = one["input_ids"][0], one["cu_seqlens"].tolist(), 4
    expected = torch.full((depth, 1, 16), IGNORED)
    for begin, end in pairwise(ends[:-1]):  # after the last one is padding
        for k in range(1, depth + 1):
            for i in range(begin, end):
                if i + k + 1 < end:
                    expected[k - 1, 0, i] = ids[i + k + 1]
    documents = documents_from_positions(one["position_ids"])
    assert torch.equal(shifted_targets(one["labels"], depth, documents), expected)
    padded = AlignedCollator(None, packed=False)(samples_of(LENGTHS))
    rows = shifted_targets(padded["labels"], depth, documents_from_positions(padded["position_ids"]))
    counts = [[max(0, length - k - 1) for length in LENGTHS] for k in range(1, depth + 1)]
    assert (rows != IGNORED).sum(-1).tolist() == counts


def reentrant(*args: Any) -> Any:
    return checkpoint(*args, use_reentrant=True)


def counted_calls(model: Model) -> list[int]:
    """Calls of the predictor's layers so far, kept up to date."""
    calls = [0] * len(model.predictor.layers)

    def count(index: int, *_: Any) -> None:
        calls[index] += 1

    for index, layer in enumerate(model.predictor.layers):
        layer.layer.register_forward_pre_hook(partial(count, index))
    return calls


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("recompute", [True, reentrant, partial(checkpoint, use_reentrant=False)])
def test_layers_that_are_computed_again_change_no_bit_and_draw_the_same_dropout(recompute: Any, shared: bool) -> None:
    found = []
    each = 2 if shared else 1  # calls of a layer in one forward
    for again in (False, recompute):
        model = build(depth=2, shared=shared, dropout=0.3, recompute=again)
        calls = counted_calls(model)
        torch.manual_seed(4)
        loss = model.loss(*batch(0))
        loss.backward()
        assert calls == [each * (2 if again else 1)] * len(calls)
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        with torch.no_grad():
            model(*batch(0))
        assert calls == [each * (3 if again else 2)] * len(calls)
    # Reentrant backwards add gradients to one tensor in another order.
    tolerance = 1e-5 if recompute is reentrant else 0.0
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 10)


def test_a_recomputed_layer_keeps_its_inputs_only() -> None:
    kept = []
    for recompute in (False, True):
        model, sizes = build(recompute=recompute), []
        hidden, embeddings = torch.randn(2, 4, 64, DIM, requires_grad=True).unbind()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model.predictor.layers[0](hidden, embeddings)
        kept.append(sum(sizes))
    assert kept[1] <= hidden.numel() + embeddings.numel() < kept[0] / 3


def test_a_layer_says_that_it_is_computed_again_and_is_to_its_end_so_that_ranks_meet_in_its_collectives() -> None:
    ends = []
    model = build(recompute=True)
    made = [build(recompute=again).predictor.layers[0] for again in (False, True)]
    assert [layer.recomputes_itself for layer in made] == [False, True]
    model.predictor.layers[0].norm.register_forward_hook(lambda *_: ends.append(1))
    model.loss(*batch(0)).backward()
    assert len(ends) == 2


def test_a_layer_that_is_computed_again_compiles_without_a_graph_break() -> None:
    found = []
    for compiled in (False, True):
        layer = build(recompute=True).predictor.layers[0]
        inputs = [
            tensor.requires_grad_() for tensor in torch.randn(2, 2, 7, DIM, generator=torch.Generator().manual_seed(1))
        ]
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        y = call(*inputs)
        y.square().sum().backward()
        found.append([y, *(tensor.grad for tensor in inputs), *(parameter.grad for parameter in layer.parameters())])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_names_are_the_layers_own_and_each_module_can_be_drawn_again() -> None:
    names = {name.split(".")[0] for name in build(depth=2).state_dict()}
    assert names == {"embedding", "blocks", "norm", "head", "predictor"}
    predictor = MultiTokenPredictor(DIM, CausalLayer, depth=2)
    parts = ("embedding_norm", "hidden_norm", "layer", "norm", "projection")
    assert {tuple(name.split(".")[:3]) for name in predictor.state_dict()} == {
        ("layers", str(index), part) for index in range(2) for part in parts
    }
    shared = MultiTokenPredictor(DIM, CausalLayer, depth=2, shared=True)
    assert {name.split(".")[1] for name in shared.state_dict()} == {"0"}
    own = [module for module in predictor.modules() if next(module.parameters(recurse=False), None) is not None]
    assert all(callable(getattr(module, "reset_parameters", None)) for module in own)


def test_drafts_are_counted_as_a_loop_counts_them() -> None:
    one = packed(samples_of(LENGTHS), samples_of(LENGTHS))
    labels, documents = one["labels"], documents_from_positions(one["position_ids"])
    depth, generator = 3, torch.Generator().manual_seed(2)
    drafts = torch.randint(VOCAB, (depth, 1, 16), generator=generator)
    greedy = torch.randint(VOCAB, (1, 16), generator=generator)
    targets = shifted_targets(labels, depth, documents)
    drafts[:, 0, 0] = targets[:, 0, 0]  # correct
    drafts[0, 0, 7] = greedy[0, 8]  # accepted
    expected = {"counted": [0] * depth, "accepted": [0] * depth, "correct": [0] * depth}
    for k in range(depth):
        for i in range(16):
            if targets[k, 0, i] != IGNORED:
                expected["counted"][k] += 1
                expected["accepted"][k] += int(drafts[k, 0, i] == greedy[0, i + k + 1])
                expected["correct"][k] += int(drafts[k, 0, i] == targets[k, 0, i])
    found = count_drafts(drafts, greedy, labels, documents)
    assert {name: getattr(found, name).tolist() for name in expected} == expected
    assert expected["accepted"][0] >= 1
    assert min(expected["correct"]) >= 1
    assert found.accuracy.tolist() == pytest.approx(
        [a / b for a, b in zip(expected["correct"], expected["counted"], strict=True)]
    )
    nothing = count_drafts(drafts, greedy, torch.full_like(labels, IGNORED))
    assert nothing.acceptance.tolist() == [0.0] * depth


def test_a_predictor_that_says_what_the_model_says_is_accepted_always() -> None:
    """Depth k at position i against the model at i + k."""
    greedy = torch.arange(12).view(2, 6)
    drafts = torch.stack([greedy.roll(-k, dims=1) for k in (1, 2)])
    found = count_drafts(drafts, greedy, torch.zeros(2, 6, dtype=torch.int64))
    assert found.counted.tolist() == found.accepted.tolist() == [10, 8]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


X = torch.zeros(2, 5, DIM)
LABELS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: MultiTokenPredictor(DIM, CausalLayer, depth=0), "depth=0: expected at least one token"),
        (lambda _: MultiTokenPredictor(DIM, CausalLayer, loss_weight=float("inf")), "loss_weight=inf: expected a num"),
        (lambda _: MultiTokenPredictor(DIM, CausalLayer, loss_weight=-1), "loss_weight=-1: expected a number that"),
        (lambda _: MultiTokenPredictor(DIM, CausalLayer, depth=2, loss_weight=[1]), "or 2 of them, one for each"),
        (lambda p: p(X, X[:, :4]), r"one shape \[B, S, H\], got \(2, 5, 8\) and \(2, 4, 8\)"),
        (lambda p: p(X, X, documents=LABELS[:, :4]), r"integers of shape \(2, 5\), got torch.int64 of shape \(2, 4\)"),
        (lambda p: p(X, X, documents=LABELS.float()), "got torch.float32 of shape"),
        (lambda _: MultiTokenPredictor(DIM, Pair)(X, X), r"Pair returned tuple; expected one tensor .* \(2, 5, 8\)"),
        (lambda p: p.losses(X[None], LABELS[:, :4], F.cross_entropy), r"of 1 depths .* \(1, 2, 5, 8\) and \(2, 4\)"),
        (lambda p: p.weighted(torch.ones(2)), r"weighted: expected the losses of 1 depths \[D\], got shape \(2,\)"),
        (lambda _: shifted_targets(LABELS[0], 1), r"expected labels \[B, S\], got \(5,\)"),
        (lambda _: count_drafts(LABELS, LABELS, LABELS), r"expected drafts \[D, B, S\]"),
        (lambda _: documents_from_lengths(torch.tensor([0, 3]), 5), r"cu_seqlens=\[0, 3\]: .* the number of tokens, 5"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(MultiTokenPredictor(DIM, CausalLayer))


def test_recompute_is_a_switch_or_a_function() -> None:
    with pytest.raises(TypeError, match="recompute='yes': expected True, False or a function"):
        MultiTokenPredictor(DIM, CausalLayer, recompute="yes")
