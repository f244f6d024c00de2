"""Deep Q-learning from a fixed table of transitions: the target network follows by copies inside training_step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.clients.base import Client, State, changed, mlp, part

STATES, ACTIONS = 4, 3


def transitions(rows: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The replay memory: states, actions, rewards, whether the episode ended, next states."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(rows, STATES, generator=generator)
    actions = torch.randint(0, ACTIONS, (rows,), generator=generator)
    ended = torch.rand(rows, generator=generator) < 0.2
    return states, actions, states.sum(1).tanh(), ended, states.roll(1, 0)


REPLAY = transitions()


class DQN(Client):
    """The target network is not frozen, only never given to the optimizer; every few steps it becomes the network."""

    unused = True
    writes = True
    followers = ("target_net.",)
    sync_rate, gamma = 4, 0.9

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.net = mlp(STATES, 16, 16, ACTIONS)
        self.target_net = mlp(STATES, 16, 16, ACTIONS)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        rows = torch.randint(0, len(REPLAY[0]), (8,), generator=generator)
        return [column[rows] for column in REPLAY]

    def dqn_mse_loss(self, batch: list[Tensor]) -> Tensor:
        states, actions, rewards, dones, next_states = batch
        state_action_values = self.net(states).gather(1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_state_values = self.target_net(next_states).max(1)[0]
            next_state_values[dones] = 0.0
        return F.mse_loss(state_action_values, next_state_values * self.gamma + rewards)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.saw(self.dqn_mse_loss(batch))
        if self.global_step % self.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-3, eps=1e-4)

    def check(self, before: State, after: State) -> None:
        assert all(changed(before, after, "target_net.")), "the target network did not change"
        targets, net = part(after, "target_net."), part(after, "net.")
        assert all(not torch.equal(targets[name], value) for name, value in net.items()), "it lags behind"
        largest = max(float((targets[name] - value).abs().max()) for name, value in net.items())
        assert largest < 0.01, "it became the network a few steps ago"


class SoftDQN(DQN):
    """Double Q-learning whose frozen target follows a little in every step."""

    unused = False
    tau = 0.05

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.target_net.load_state_dict(self.net.state_dict())
        for parameter in self.target_net.parameters():
            parameter.requires_grad = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        states, actions, rewards, dones, next_states = batch
        with torch.no_grad():
            best = self.net(next_states).argmax(1, keepdim=True)
            next_values = self.target_net(next_states).gather(1, best).squeeze(1)
            targets = rewards + self.gamma * next_values * (~dones)
        old_values = self.net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = self.saw(F.smooth_l1_loss(old_values, targets))
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.update_target_network()
        return loss

    def update_target_network(self) -> None:
        for target_param, q_param in zip(self.target_net.parameters(), self.net.parameters(), strict=True):
            target_param.data.copy_(self.tau * q_param.data + (1.0 - self.tau) * target_param.data)

    def check(self, before: State, after: State) -> None:
        assert all(changed(before, after, "target_net.")), "the target network did not change"
        first, targets, net = part(before, "target_net."), part(after, "target_net."), part(after, "net.")
        for name, value in net.items():
            assert (targets[name] - first[name]).norm() < 0.8 * (value - first[name]).norm(), f"{name} lags behind"
