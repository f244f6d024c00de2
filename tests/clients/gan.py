"""A GAN by hand: two optimizers take turns, each freezing the other's parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.clients.base import DIM, Block, Client, State, changed, mlp

LATENT, FEATURES = 5, 6


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GAN(Client):
    """`toggle_optimizer` and `untoggle_optimizer` around each turn."""

    unused = True
    recomputes = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.automatic_optimization = False
        self.generator = mlp(LATENT, 16, FEATURES)
        self.discriminator = Discriminator()
        self.turns: list[tuple[bool, bool]] = []

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(8, FEATURES, generator=generator) * 0.5 + 1, torch.randn(8, LATENT, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, y_hat: Tensor, real: bool) -> Tensor:
        return F.binary_cross_entropy_with_logits(y_hat, torch.full_like(y_hat, float(real)))

    def note_turn(self) -> None:
        """Whether the generator's and the discriminator's parameters are frozen, as their optimizers have them."""
        held = [optimizer.param_groups[0]["params"] for optimizer in self.optimizers()]
        generator, discriminator = (not any(p.requires_grad for p in parameters) for parameters in held)
        self.turns.append((generator, discriminator))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        imgs, z = batch
        optimizer_g, optimizer_d = self.optimizers()
        step = self.is_last_microbatch(batch_idx)

        self.toggle_optimizer(optimizer_g)
        self.note_turn()
        g_loss = self.saw(self.adversarial_loss(self.discriminator(self(z)), True))
        self.manual_backward(g_loss / self.accumulate)
        if step:
            optimizer_g.step()
            optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        self.note_turn()
        real_loss = self.adversarial_loss(self.discriminator(imgs), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = self.saw((real_loss + fake_loss) / 2)
        self.manual_backward(d_loss / self.accumulate)
        if step:
            optimizer_d.step()
            optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-4)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-4)
        return [opt_g, opt_d], []

    def check(self, before: State, after: State) -> None:
        assert self.turns, "there was no turn"
        assert set(self.turns[::2]) == {(False, True)}, "the discriminator is frozen in the generator's turn"
        assert set(self.turns[1::2]) == {(True, False)}, "the generator is frozen in the discriminator's turn"
        assert all(changed(before, after)), "not everything learned"


class R1GAN(GAN):
    """StyleGAN's penalty in every fourth batch: the squared gradient of the discriminator at real samples, differentiated once more."""

    penalty_weight, penalty_every = 1.0, 4

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.penalties: list[Tensor] = []

    def r1_penalty(self, real: Tensor) -> Tensor:
        real = real.detach().requires_grad_()
        (grad_real,) = torch.autograd.grad(outputs=self.discriminator(real).sum(), inputs=real, create_graph=True)
        return grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, z = batch
        optimizer_g, optimizer_d = self.optimizers()
        step = self.is_last_microbatch(batch_idx)

        self.toggle_optimizer(optimizer_d)
        self.note_turn()
        d_loss = F.softplus(self.discriminator(self(z).detach())).mean() + F.softplus(-self.discriminator(real)).mean()
        self.manual_backward(self.saw(d_loss) / self.accumulate)
        if batch_idx % self.penalty_every == 0:
            penalty = self.r1_penalty(real)
            self.penalties.append(penalty.detach())
            r1_loss = self.penalty_weight / 2 * penalty * self.penalty_every
            self.manual_backward(self.saw(r1_loss) / self.accumulate)
        if step:
            optimizer_d.step()
            optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        self.note_turn()
        g_loss = F.softplus(-self.discriminator(self(z))).mean()
        self.manual_backward(self.saw(g_loss) / self.accumulate)
        if step:
            optimizer_g.step()
            optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

    def check(self, before: State, after: State) -> None:
        self.turns = [turn for pair in zip(self.turns[1::2], self.turns[::2], strict=True) for turn in pair]
        super().check(before, after)
        assert min(float(penalty) for penalty in self.penalties) > 0, "there was no penalty"
