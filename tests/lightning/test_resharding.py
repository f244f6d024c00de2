"""A sharded checkpoint of any number of ranks, strategy and compute dtype loads into any other, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, sharded_parameters, unshard
from tests.checkpoint.internals import ParameterIndex, Ranks, lightning_io, locate
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT

MAX_WORLD = 4
EVERY = 1 if NIGHT else 10  # the next layout begins one checkpoint later
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def layouts(world: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        name: {"sharding": name} for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    }
    found["bf16 compute"] = {"policy": BF16}
    found["bf16 compute of optim"] = {"policy": BF16, "sharding": "optim"}
    found["parts"] = {"sharding": {"narrow": "optim", "table": "no_shard", "*": "optim_grads_params"}}
    if world == MAX_WORLD:
        found["hsdp"] = {"mesh": (2, 2)}
        found["context"] = {"mesh": (2, 2), "names": ("data", "context")}
        found["hfsdp"] = {"mesh": (2, 2), "outer_sharding": "optim"}
        found["hfsdp of optim_grads"] = {"mesh": (2, 2), "outer_sharding": "optim", "sharding": "optim_grads"}
    return found


SAVED = {
    1: ["optim_grads_params", "no_shard"],
    2: ["optim", "bf16 compute"],
    3: ["optim_grads_params", "optim_grads"],
    4: ["optim_grads_params", "context", "hfsdp", "bf16 compute of optim"],
}


class Model(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, no dimension, a frozen weight, a tied one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.wide = nn.Linear(10, 7)
        self.narrow = nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.zeros(5, 3), requires_grad=False)
        self.alias = self.wide
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(self.table(x))).sum() * self.scale + self.frozen.sum()


def pattern(name: str, shape: torch.Size) -> Tensor:
    """Numbers that tell a parameter or state by its name, and every element of it; not all of them bfloat16 values."""
    start = sum(map(ord, name))
    return (torch.arange(start, start + shape.numel(), dtype=torch.float32) / 7).reshape(shape)


def rows_of(name: str, view: Any) -> Tensor:
    whole = pattern(name, view.shape)
    return whole[view.rows.start : view.rows.stop] if whole.dim() else whole.expand(len(view.rows), *whole.shape)


def made(layout: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = dict(layout)
    shape, names = options.pop("mesh", None), options.pop("names", ("outer", "shard"))
    if shape is not None:
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = fully_shard(Model(), **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trained, lr=0.1))
    model(torch.arange(13)).backward()
    optimizer.step()
    return model, optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any, Tensor]]:
    """Name, view and rows of all weights and moments."""
    found: list[tuple[str, Any, Tensor]] = []
    for view in sharded_parameters(model):
        found.append((view.name, view, view.main))
        for key, value in optimizer.state.get(view.local, {}).items():
            if key != "step":
                found.append((f"{view.name}.{key}", view, value.to_local() if isinstance(value, DTensor) else value))
    return found


def save(path: str, layout: dict[str, Any]) -> None:
    model, optimizer = made(layout)
    with torch.no_grad():
        for name, view, rows in states(model, optimizer):
            rows.copy_(rows_of(name, view).reshape(rows.shape))
        # Every rank has its own, and that of rank 0 is saved.
        model.count.fill_(5 + dist.get_rank())  # type: ignore[operator, union-attr]
    index = ParameterIndex(model)
    parts = {"state_dict": model.state_dict(), "optimizer_states": [lightning_io.optimizer_state(index, optimizer)]}
    content = lightning_io.ShardedContent.of(index, {**parts, "global_step": 1}, Ranks())
    lightning_io.save(locate(path), content, ranks=Ranks())


def differences(path: str, layout: dict[str, Any]) -> list[str]:
    model, optimizer = made(layout)
    lightning_io.load(locate(path), model, [optimizer], strict=True, weights_only=True)
    checked = states(model, optimizer)
    wrong = [name for name, view, rows in checked if not torch.equal(rows, rows_of(name, view).reshape(rows.shape))]
    if not model.count.eq(5).all():  # type: ignore[operator, union-attr]
        wrong.append("count")
    moments = sum("exp_avg" in name for name, _, _ in checked)
    trained = sum(
        view.requires_grad for view in sharded_parameters(model)
    )  # ranks without rows have moments of no rows
    if moments != 2 * trained:
        wrong.append(f"{moments} moments of {trained} parameters")
    dtype = layout["policy"].compute_dtype if "policy" in layout else torch.float32
    with unshard(model):  # what is computed with is refreshed
        for name, parameter in model.named_parameters():
            if not torch.equal(parameter.detach().to(dtype), pattern(name, parameter.shape).to(dtype)):
                wrong.append(f"full {name}")
    return wrong


def matrix(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """Every number of ranks saves, then every number of ranks loads everything; groups of the first n processes come and go."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/phases", MAX_WORLD)
    found: dict[str, list[str]] = {}
    phases = [(n, True) for n in SAVED] + [(n, False) for n in SAVED]
    for number, (size, saves) in enumerate([*phases, (MAX_WORLD, None)]):
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=size)
        if rank < size and saves:
            for name in SAVED[size]:
                save(f"{folder}/{size} {name}.ckpt", layouts(size)[name])
        elif rank < size and saves is not None:
            for shift, (name, layout) in enumerate(layouts(size).items()):
                for path in sorted(Path(folder).glob("*.ckpt"))[shift % EVERY :: EVERY]:
                    found[f"{path.stem} -> {size} {name}"] = differences(str(path), layout)
        if saves is None:
            return found  # in a group of all, as the helper expects
        if rank < size:
            dist.barrier()
            dist.destroy_process_group()
        if store.add(f"done-{number}", 1) == MAX_WORLD:
            store.set(f"all-{number}", "done")
        store.wait([f"all-{number}"])
    raise AssertionError("the last phase returns")


def test_every_checkpoint_loads_into_every_layout_to_the_bit(tmp_path: Path) -> None:
    results = run_distributed(matrix, MAX_WORLD, str(tmp_path))
    cases = results[0]
    assert len(cases) == sum(map(len, SAVED.values())) // EVERY * sum(len(layouts(size)) for size in SAVED)
    pairs = {(case[0], case.partition("-> ")[2][0]) for case in cases}
    assert len(pairs) == MAX_WORLD**2, "any number of ranks to any other"
    for rank, found in enumerate(results):
        wrong = {case: names for case, names in found.items() if names}
        assert not wrong, f"rank {rank}: {wrong}"
