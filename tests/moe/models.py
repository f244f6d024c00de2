"""A small model with experts between dense layers, its batches, and the ways to shard it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp import fully_shard
from lightning_mfsdp.moe import GroupedExperts, TopKRouter, expert_parallel

VOCAB = 17
ROWS, LENGTH = 8, 5


class Block(nn.Module):
    def __init__(self, dim: int, experts: int, **options) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = TopKRouter(hidden_size=dim, num_experts=experts, top_k=2, balancing=None, init_std=0.5)
        sizes = {"num_experts": experts, "hidden_size": dim, "intermediate_size": 12, "init_std": 0.3}
        self.experts = GroupedExperts(**{**sizes, **options})

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        routes = self.router(tokens)
        return x + self.experts(tokens, routes.expert_index, routes.probabilities).view_as(x)


class Mixture(nn.Module):
    def __init__(self, dim: int = 8, experts: int = 8, layers: int = 2, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, experts, **options) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0, **options) -> Mixture:
    torch.manual_seed(seed)
    return Mixture(**options)


def batch(step: int, rank: int = 0, world: int = 1, rows: int = ROWS) -> Tensor:
    """This rank's share of a step's ids, `[rows / world, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator).chunk(world)[rank]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def meshes(world: int, ep: int, device: str = "cpu") -> tuple[DeviceMesh, DeviceMesh]:
    """(of dense layers, of experts)."""
    return (
        init_device_mesh(device, (world,), mesh_dim_names=("shard",)),
        init_device_mesh(device, (world // ep, ep), mesh_dim_names=("shard", "expert")),
    )


def sharded(model: Mixture, world: int, ep: int, device: str = "cpu", *, dispatcher: str = "all_gather", **options):
    """The model with its experts on `ep` ranks each, and everything sharded."""
    dense, expert = meshes(world, ep, device)
    for block in model.blocks:
        expert_parallel(block.experts, expert, dispatcher=dispatcher)
        fully_shard(block.experts, expert, **options)
        fully_shard(block, dense, **options)
    return fully_shard(model, dense, **options)
