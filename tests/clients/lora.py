"""Low-rank adapters by hand: the base is frozen, and few small weights are trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.clients.base import DIM, Block, Client, State

FEATURES = 6


class LoRALinear(nn.Module):
    """A frozen linear layer beside a product of two small factors, one of which begins at zero."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.2)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class LoRA(Client):
    """Adapters in every block; everything else is frozen, the root's stem and head too."""

    recomputes = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.stem = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 1)
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(8, FEATURES, generator=generator)
        return x, x.sum(-1, keepdim=True).tanh()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.saw(F.mse_loss(self.head(x), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=2e-3, eps=1e-4, weight_decay=0.1)

    def check(self, before: State, after: State) -> None:
        assert sum("lora_" in name for name in after) == 8
        for name, value in after.items():
            assert torch.equal(value, before[name]) == ("lora_" not in name), name
