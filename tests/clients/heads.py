"""Many tasks, one trunk: a batch belongs to one task and uses that task's head alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.clients.base import DIM, Block, Client, State, changed

FEATURES = 6
TASKS = {"regression": 1, "digits": 4, "colors": 3, "later": 2}  # no batch has the last one


class MultiTask(Client):
    """Weight decay moves whatever has a gradient, so that heads without one show it."""

    unused = True
    recomputes = True

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.stem = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Linear(DIM, outputs) for name, outputs in TASKS.items()})
        self.used: list[int] = []

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        """The task is drawn, so ranks have the same one in some steps and different ones in others."""
        return torch.randint(0, 3, (), generator=generator), torch.randn(8, FEATURES, generator=generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        task, x = list(TASKS)[int(batch[0])], batch[1]
        self.used.append(int(batch[0]))
        features = self.stem(x)
        for block in self.blocks:
            features = block(features)
        output = self.heads[task](features)
        if task == "regression":
            return self.saw(F.mse_loss(output.squeeze(-1), x.sum(-1)))
        return self.saw(F.cross_entropy(output, (x.sum(-1).abs() * 3).long() % TASKS[task]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        without = {name for name, parameter in self.heads.named_parameters() if parameter.grad is None}
        self.notes.setdefault("without gradient", []).append(sorted(without))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)

    def check(self, before: State, after: State) -> None:
        assert not any(changed(before, after, "heads.later.")), "the head that nobody uses was moved"
        for name in list(TASKS)[:-1]:
            assert all(changed(before, after, f"heads.{name}.")), f"{name} did not learn"
        never = {"later.weight", "later.bias"}
        unused = self.notes["without gradient"]
        assert all(never <= set(names) for names in unused), "a head without a batch has a gradient"
        if self.accumulate == 1:
            assert any(len(names) > 2 for names in unused), "in some steps no rank uses some other head"
