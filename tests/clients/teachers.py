"""Self-supervised learning: a teacher is the running mean of the student's weights, written by the program."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.clients.base import DIM, Block, Client, State, changed, mlp, part

FEATURES, PROTOTYPES = 6, 10


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ProjectionHead(nn.Module):
    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        self.layers = mlp(DIM, 16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def deactivate_requires_grad(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad = False


def views(generator: torch.Generator) -> list[Tensor]:
    """Two noisy views of the same samples."""
    x = torch.randn(8, FEATURES, generator=generator)
    return [x + 0.1 * torch.randn(8, FEATURES, generator=generator) for _ in range(2)]


def check_followed(before: State, after: State, teacher: str, student: str) -> None:
    """Each of the teacher's weights moved, and less than the student's."""
    assert part(after, teacher), teacher
    assert all(changed(before, after, teacher)), f"not all of {teacher} moved"
    for name, first in part(before, teacher).items():
        moved = (part(after, teacher)[name] - first).norm()
        assert moved < 0.5 * (part(after, student)[name] - part(before, student)[name]).norm(), f"{name} does not lag"


class WeightUpdate(Callback):
    """As BYOL's callbacks do it after each batch: a new tensor is assigned."""

    def __init__(self, tau: float) -> None:
        self.tau = tau

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.is_last_microbatch(batch_idx):
            return
        online, target = pl_module.online_network, pl_module.target_network
        for online_p, target_p in zip(online.parameters(), target.parameters(), strict=True):
            target_p.data = self.tau * target_p.data + (1.0 - self.tau) * online_p.data


class BYOL(Client):
    """A callback moves the target network between steps; heads belong to the root."""

    recomputes = True
    writes = True
    followers = ("target_network.",)
    tau = 0.99

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.online_network = nn.Sequential(Backbone(), ProjectionHead())
        self.target_network = nn.Sequential(Backbone(), ProjectionHead())
        self.target_network.load_state_dict(self.online_network.state_dict())
        deactivate_requires_grad(self.target_network)
        self.predictor = mlp(8, 16, 8)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return views(generator)

    def configure_callbacks(self) -> list[Callback]:
        return [WeightUpdate(self.tau)]

    def similarity(self, view: Tensor, other: Tensor) -> Tensor:
        prediction = self.predictor(self.online_network(view))
        with torch.no_grad():
            target = self.target_network(other)
        return -F.cosine_similarity(prediction, target.detach(), dim=-1).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.saw(self.similarity(batch[0], batch[1]) + self.similarity(batch[1], batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.online_network.parameters(), *self.predictor.parameters()]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def check(self, before: State, after: State) -> None:
        check_followed(before, after, "target_network.", "online_network.")


class DINO(Client):
    """The teacher moves in place inside training_step, and is in units as a whole; its outputs are centered.

    In the first epoch the gradients of the student's last layer are dropped after each backward.
    """

    recomputes = True
    units = ("Block", "ProjectionHead")
    writes = True
    followers = ("teacher_backbone.", "teacher_head.")
    clip = 0.5
    momentum = 0.996

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.student_backbone, self.student_head = Backbone(), ProjectionHead(PROTOTYPES)
        self.teacher_backbone, self.teacher_head = Backbone(), ProjectionHead(PROTOTYPES)
        self.teacher_backbone.load_state_dict(self.student_backbone.state_dict())
        self.teacher_head.load_state_dict(self.student_head.state_dict())
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return views(generator)

    @torch.no_grad()
    def update_teacher(self) -> None:
        pairs = (self.student_backbone, self.teacher_backbone), (self.student_head, self.teacher_head)
        for student, teacher in pairs:
            for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                param_k.data.mul_(self.momentum).add_(param_q.detach().data, alpha=1 - self.momentum)

    @torch.no_grad()
    def update_center(self, teacher_output: Tensor) -> None:
        batch_center = teacher_output.float().mean(0, keepdim=True)
        dist.all_reduce(batch_center)
        self.center = self.center * 0.9 + batch_center / dist.get_world_size() * 0.1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.update_teacher()
        with torch.no_grad():
            teacher_out = [self.teacher_head(self.teacher_backbone(view)) for view in batch]
        student_out = [self.student_head(self.student_backbone(view)) for view in batch]
        targets = [F.softmax((out - self.center) / 0.5, dim=-1) for out in teacher_out]
        first = -(targets[0] * F.log_softmax(student_out[1], dim=-1)).sum(-1).mean()
        second = -(targets[1] * F.log_softmax(student_out[0], dim=-1)).sum(-1).mean()
        self.update_center(torch.cat(teacher_out))
        return self.saw((first + second) / 2)

    def on_after_backward(self) -> None:
        if self.current_epoch < 1:
            for parameter in self.student_head.layers[-1].parameters():
                parameter.grad = None

    def on_train_epoch_end(self) -> None:
        self.notes[f"center after epoch {self.current_epoch}"] = self.center.clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.student_backbone.parameters(), *self.student_head.parameters()]
        return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4, weight_decay=0.05)

    def check(self, before: State, after: State) -> None:
        for half in ("backbone.", "head."):
            check_followed(before, after, f"teacher_{half}", f"student_{half}")


class MoCo(Client):
    """The key encoder follows inside training_step, before its forward, by assignment of new data. Negatives are the batch's."""

    recomputes = True
    units = ("Block",)
    writes = True
    followers = ("encoder_k.",)
    m = 0.999

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.encoder_q = nn.Sequential(Backbone(), nn.Linear(DIM, 8))
        self.encoder_k = nn.Sequential(Backbone(), nn.Linear(DIM, 8))
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return views(generator)

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        q = F.normalize(self.encoder_q(batch[0]), dim=1)
        with torch.no_grad():
            if batch_idx % self.trainer.accumulate_grad_batches == 0:
                self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(batch[1]), dim=1)
        logits = q @ k.T / 0.5
        return self.saw(F.cross_entropy(logits, torch.arange(len(q), device=q.device)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder_q.parameters(), lr=0.05, momentum=0.9)

    def check(self, before: State, after: State) -> None:
        check_followed(before, after, "encoder_k.", "encoder_q.")
