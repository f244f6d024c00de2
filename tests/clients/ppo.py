"""Proximal policy optimization: several epochs over minibatches of one rollout, all in one manual training_step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from tests.clients.base import Client, State, changed, mlp

STATES, ACTIONS, ROLLOUT, EPOCHS, MINIBATCHES = 4, 3, 24, 2, 2
MAX_NORM, CLIP = 0.1, 0.02


class PPO(Client):
    """Gradients are clipped by torch's own function; ratios and values are clipped in the loss."""

    splits_batches = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.automatic_optimization = False
        self.actor = mlp(STATES, 16, 16, ACTIONS)
        self.critic = nn.Sequential(nn.Linear(STATES, 16), nn.Tanh(), nn.Linear(16, 1))
        self.norms: list[Tensor] = []
        self.clipped_ratios: list[Tensor] = []
        self.clipped_values: list[Tensor] = []

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        """Observations, actions that were taken, and their advantages."""
        obs = torch.randn(ROLLOUT, STATES, generator=generator)
        actions = torch.randint(0, ACTIONS, (ROLLOUT,), generator=generator)
        return obs, actions, torch.randn(ROLLOUT, generator=generator)

    def evaluate(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = Categorical(logits=self.actor(obs))
        return policy.log_prob(actions), policy.entropy(), self.critic(obs).squeeze(-1)

    def ppo_loss(self, rows: Tensor, rollout: list[Tensor]) -> Tensor:
        obs, actions, advantages, old_logprobs, old_values = (column[rows] for column in rollout)
        returns = advantages + old_values
        logprobs, entropy, values = self.evaluate(obs, actions)
        ratio = (logprobs - old_logprobs).exp()
        self.clipped_ratios.append(((ratio - 1).abs() > CLIP).sum())
        pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        moved = values - old_values
        self.clipped_values.append((moved.abs() > CLIP).sum())
        v_clipped = old_values + moved.clamp(-CLIP, CLIP)
        v_loss = 0.5 * torch.max((values - returns) ** 2, (v_clipped - returns) ** 2).mean()
        return pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            logprobs, _, values = self.evaluate(batch[0], batch[1])
        rollout = [*batch, logprobs, values]
        order = torch.arange(ROLLOUT)
        for epoch in range(EPOCHS):
            for rows in order.roll(7 * epoch).chunk(MINIBATCHES):
                optimizer.zero_grad()
                for microbatch in rows.chunk(self.accumulate):
                    self.manual_backward(self.saw(self.ppo_loss(microbatch, rollout)) / self.accumulate)
                self.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM))
                optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-4)

    def check(self, before: State, after: State) -> None:
        assert all(changed(before, after)), "not everything learned"
        assert min(float(norm) for norm in self.norms) > MAX_NORM, "some gradients needed no clipping"
        assert sum(int(count) for count in self.clipped_ratios) > 0, "no ratio was clipped"
        assert sum(int(count) for count in self.clipped_values) > 0, "no value was clipped"
