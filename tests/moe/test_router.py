"""TopKRouter: choices that do not depend on chance, and balancing that evens the load."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.moe import TopKRouter
from tests.helpers.distributed import run_distributed


def router(**options) -> TopKRouter:
    torch.manual_seed(3)
    return TopKRouter(**{"hidden_size": 8, "num_experts": 6, "top_k": 2, "init_std": 0.5, **options})


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_probabilities_are_the_best_scores_normalized_and_scaled(scores) -> None:
    made = router(scores=scores, scale=2.5)
    hidden = tokens()
    logits = hidden @ made.weight.t()
    expected = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    best, index = expected.topk(2)
    routes = made(hidden)
    torch.testing.assert_close(routes.expert_index, index)
    torch.testing.assert_close(routes.probabilities, 2.5 * best / best.sum(-1, keepdim=True))
    made.normalize = False
    torch.testing.assert_close(made(hidden).probabilities, 2.5 * best)


def test_of_equal_scores_the_lower_number_wins() -> None:
    made = router(num_experts=64, top_k=5)
    with torch.no_grad():
        made.weight.zero_()
    assert made(tokens()).expert_index.eq(torch.arange(5)).all()


def test_scores_that_are_all_zero_give_finite_losses_and_gradients() -> None:
    made = router(scores="sigmoid", z_loss_weight=0.1)
    with torch.no_grad():
        made.weight.fill_(-100)
    routes = made(torch.ones(3, 8))
    assert not routes.probabilities.any()
    (routes.loss + routes.probabilities.sum()).backward()
    assert routes.loss.isfinite()
    assert made.weight.grad.isfinite().all()


def test_no_tokens_have_no_routes_and_no_loss() -> None:
    made = router(z_loss_weight=0.1)
    routes = made(torch.zeros(0, 8))
    assert routes.expert_index.shape == routes.probabilities.shape == (0, 2)
    assert routes.loss == 0
    routes.loss.backward()
    assert not made.weight.grad.any()
    assert not made.statistics().share.any()


def test_tokens_of_another_shape_are_refused() -> None:
    for wrong in (torch.randn(3, 4, 8), torch.randn(3, 9)):
        with pytest.raises(ValueError, match=r"TopKRouter: hidden: expected tokens of shape \[T, 8\], got \(3, "):
            router()(wrong)


def test_the_auxiliary_loss_is_least_where_load_is_even_and_its_gradient_evens_it() -> None:
    made = router(auxiliary_weight=1.0)
    with torch.no_grad():
        made.weight[0] = 0.5  # one expert is everybody's favorite
    hidden = tokens() + 0.5
    first = made(hidden)
    counts = torch.bincount(first.expert_index.flatten(), minlength=6) / 80
    scores = (hidden @ made.weight.t()).softmax(-1)
    torch.testing.assert_close(first.loss, 6 * (counts * scores.mean(0)).sum())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        made(hidden).loss.backward()
        optimizer.step()
    made.balance()
    assert made(hidden).loss < 1.1 < 1.2 < first.loss
    assert made(hidden).loss >= 0.99
    assert made.statistics().most < 2


def test_the_bias_changes_choices_not_probabilities_and_evens_the_load() -> None:
    made = router(balancing="bias", scores="sigmoid", bias_step=0.02, normalize=False)
    hidden = tokens() + 1
    before = made(hidden)
    most = made.statistics().most
    assert not before.loss.requires_grad or before.loss == 0
    for _ in range(80):
        made.balance()
        routes = made(hidden)
    assert made.statistics().most < most - 0.5
    torch.testing.assert_close(
        routes.probabilities, (hidden @ made.weight.t()).sigmoid().gather(1, routes.expert_index)
    )
    assert "bias" in made.state_dict()
    made.eval()
    made.balance()
    made(hidden)
    assert not made.load.any(), "evaluation is not counted"


def test_the_z_loss_is_the_mean_square_of_the_log_of_summed_exponentials() -> None:
    made = router(balancing=None, z_loss_weight=0.1)
    logits = tokens() @ made.weight.t()
    torch.testing.assert_close(made(tokens()).loss, 0.1 * logits.exp().sum(-1).log().square().mean())
    assert router(balancing=None)(tokens()).loss == 0


def test_statistics_describe_the_load() -> None:
    made = router(num_experts=4, top_k=1, hidden_size=4)
    with torch.no_grad():
        made.weight.copy_(torch.eye(4))
    made(torch.eye(4)[[0, 0, 0, 1, 1, 1, 1, 2]])
    found = made.statistics()
    torch.testing.assert_close(found.share, torch.tensor([3.0, 4, 1, 0]) / 8)
    assert (found.most, found.least, found.unused) == (2, 0, 1)


def test_counts_and_biases_are_exact_in_a_module_of_16_bits() -> None:
    given = [tokens(400).bfloat16() for _ in range(3)]

    def balanced(made: TopKRouter) -> TopKRouter:
        for one in given:
            made(one)
            made.balance()
        return made

    torch.set_default_dtype(torch.bfloat16)
    try:
        built = balanced(router(balancing="bias"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert built.weight.dtype is torch.bfloat16
    wanted = router(balancing="bias")
    with torch.no_grad():
        wanted.weight.copy_(built.weight)
    converted = router(balancing="bias")
    with torch.no_grad():
        converted.weight.copy_(built.weight)
    converted = balanced(converted.bfloat16())
    for one in given:
        wanted(one)
        assert wanted.load.sum() == 800, "more than 16 bits count to"
        wanted.balance()
    assert converted.bias.dtype is built.bias.dtype is torch.float32
    assert torch.equal(converted.bias, wanted.bias)
    assert torch.equal(built.bias, wanted.bias)
    assert torch.equal(converted.bfloat16().bias, wanted.bias)


def biases(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = router(balancing="bias")
    made(tokens().chunk(world)[rank])
    made.balance()
    whole = router(balancing="bias")
    whole(tokens())
    return made.bias, (whole.load.float().mean() - whole.load).sign() * 1e-3


def test_all_ranks_move_their_biases_by_the_load_of_all() -> None:
    for bias, expected in run_distributed(biases, 2):
        torch.testing.assert_close(bias, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 7}, "top_k: expected 1 to num_experts=6, got 7"),
        ({"top_k": 1.5}, "top_k: expected a positive whole number, got 1.5"),
        ({"hidden_size": 0}, "hidden_size: expected a positive whole number, got 0"),
        ({"bias_step": -1.0}, "bias_step: expected a number of at least 0, got -1.0"),
        ({"z_loss_weight": float("nan")}, "z_loss_weight: expected a number of at least 0, got nan"),
        ({"scores": "tanh"}, 'scores: expected "softmax" or "sigmoid", got \'tanh\''),
        ({"balancing": "hope"}, 'balancing: expected "auxiliary", "bias" or None, got \'hope\''),
    ],
)
def test_options_are_checked(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router(**options)
