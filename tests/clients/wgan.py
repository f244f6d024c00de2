"""Wasserstein GANs: the critic's weights are clamped by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.clients.base import DIM, Block, Client, State, changed, mlp, part

LATENT, FEATURES, CLIP_VALUE = 5, 6, 0.05


def samples(generator: torch.Generator) -> list[Tensor]:
    """Real samples and noise."""
    return [torch.randn(8, FEATURES, generator=generator) * 0.5 + 1, torch.randn(8, LATENT, generator=generator)]


def check_clamped(before: State, after: State, prefix: str) -> None:
    assert max(float(value.abs().max()) for value in part(before, prefix).values()) > CLIP_VALUE
    bitten = 0
    for name, value in part(after, prefix).items():
        bound = torch.tensor(CLIP_VALUE, dtype=value.dtype)
        assert value.abs().max() <= bound, f"{name} is not clamped"
        bitten += int((value.abs() == bound).sum())
    assert bitten > 0, "the clamp never bit"


class WGAN(Client):
    """Manual optimization: the critic learns in every batch and is clamped after its step, the generator in every second."""

    unused = True
    writes = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.automatic_optimization = False
        self.generator = mlp(LATENT, 16, FEATURES)
        self.critic = mlp(FEATURES, 16, 16, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return samples(generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, z = batch
        opt_g, opt_c = self.optimizers()
        step = self.is_last_microbatch(batch_idx)

        for p in self.critic.parameters():
            p.requires_grad = True
        loss_c = -self.critic(real).mean() + self.critic(self.generator(z).detach()).mean()
        self.manual_backward(self.saw(loss_c) / self.accumulate)
        if step:
            opt_c.step()
            opt_c.zero_grad()
            for p in self.critic.parameters():
                p.data.clamp_(-CLIP_VALUE, CLIP_VALUE)

        for p in self.critic.parameters():
            p.requires_grad = False
        loss_g = -self.critic(self.generator(z)).mean()
        self.manual_backward(self.saw(loss_g) / self.accumulate)
        if step:
            opt_g.step()
            opt_g.zero_grad()

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.RMSprop(self.generator.parameters(), lr=1e-3, eps=1e-3)
        opt_c = torch.optim.RMSprop(self.critic.parameters(), lr=5e-3, eps=1e-3)
        return opt_g, opt_c

    def check(self, before: State, after: State) -> None:
        check_clamped(before, after, "critic.")
        assert all(changed(before, after, "generator.")), "the generator did not learn"


class ClampedCritic(Client):
    """Automatic optimization: a critic that estimates a distance of two samples, clamped before each forward."""

    recomputes = True
    writes = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.stem = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return samples(generator)[0], torch.randn(8, FEATURES, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def clamp_weights(self) -> None:
        for p in self.parameters():
            p.data.clamp_(-CLIP_VALUE, CLIP_VALUE)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clamp_weights()
        one, other = batch
        return self.saw(self(other).mean() - self(one).mean())

    def on_train_end(self) -> None:
        self.clamp_weights()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def check(self, before: State, after: State) -> None:
        check_clamped(before, after, "")
