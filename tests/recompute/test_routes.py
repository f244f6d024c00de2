"""Routers inside of what is computed again: tokens go the same ways, and load is counted once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.moe import GroupedExperts, TopKRouter
from lightning_mfsdp.recompute import Recompute, apply_recompute
from tests.recompute.counting import Counting
from tests.recompute.models import DIM, batch, equal, loss_of, steps


class Ranked(Counting):
    """How often scores were ranked. Experts sort as well, their list of rows."""

    def __init__(self) -> None:
        super().__init__(torch.ops.aten.sort.stable)

    def counts(self, args: Any) -> bool:
        return args[0].dim() == 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = TopKRouter(hidden_size=DIM, num_experts=4, top_k=2, init_std=0.5, z_loss_weight=0.1)
        self.experts = GroupedExperts(num_experts=4, hidden_size=DIM, intermediate_size=12, init_std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        routes = self.router(hidden)
        return x + self.experts(hidden, routes.expert_index, routes.probabilities) + routes.loss


def mixture(config: Recompute) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), *(Expert() for _ in range(3)), nn.Linear(DIM, 2))
    apply_recompute(model, config)
    return model


def test_routes_are_kept_and_load_is_counted_once() -> None:
    for config in (Recompute(), Recompute(num_layers=3), Recompute(method="selective", save_ops=["matmul"])):
        plain, model = mixture(Recompute(method="none")), mixture(config)
        assert equal(steps(model, rank=1), steps(plain, rank=1)), config
        for one, other in zip(model[1:4], plain[1:4], strict=True):
            assert torch.equal(one.router.load, other.router.load), config
            assert one.router.load.any()
            assert one.router.choice_keeper is None


def test_tokens_go_the_same_ways_where_scores_come_out_otherwise() -> None:
    """A router whose weight moves between forward and backward stands for kernels that round in another way."""
    model = mixture(Recompute())
    seen: list[Tensor] = []
    model[1].experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    loss = loss_of(model, batch(0, rows=64))
    with torch.no_grad():
        model[1].router.weight.data = -model[1].router.weight.data
    with Counting(torch.ops.aten.softmax.int, torch.ops.aten._softmax.default) as scored, Ranked() as ranked:
        loss.backward()
    assert ranked.count == 0, "nothing is ranked again"
    assert scored.count > 0, "scores are, for their gradients"
    first, again = seen
    assert torch.equal(first, again)
    with torch.no_grad():
        assert not torch.equal(model[1].router(model[1].norm(model[0](batch(0, rows=64)))).expert_index, first)
