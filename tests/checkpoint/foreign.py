"""Checkpoints as other programs write them, on two CPU processes, and what they must become."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _get_full_state_dict_context
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard
from torch.distributed.fsdp.api import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from tests.checkpoint.internals import DcpShard
from tests.engine.internals import Piece
from tests.lightning.models import Classifier, loader, make_trainer, seeded

STEPS = 2


class Trained(Classifier):
    """Sharded by FSDP2 where ModelParallelStrategy trains it; with a parameter of fewer rows than ranks, a frozen one, and a buffer."""

    def __init__(self, *, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.tiny = nn.Parameter(torch.full((1, 12), 0.5))
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.tiny.mean()

    def configure_model(self) -> None:
        if self._device_mesh is not None and "data_parallel" in (self.device_mesh.mesh_dim_names or ()):
            shard_with_fsdp2(self, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [trained] if self.groups == 1 else [trained[:3], trained[3:]]
        return torch.optim.AdamW([{"params": group} for group in groups], lr=self.lr, weight_decay=0.1)


def shard_with_fsdp2(model: Classifier, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def step(model: Any, module: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> None:
    for batch in loader(4, STEPS * 4 * world_size, rank, world_size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and optimizer state by name, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "weights": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def write_foreign(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All of them; returns the whole states, by the name of the checkpoint's kind."""
    warnings.simplefilter("ignore")  # other programs' own
    return {
        "lightning": write_with_lightning(folder, rank, world_size),
        "fsdp1": write_fsdp1(Path(folder), rank, world_size),
        "fsdp2": write_fsdp2(Path(folder), rank, world_size),
    }


def write_with_lightning(folder: str, rank: int, world_size: int) -> dict[str, Any]:
    model = seeded(Trained)
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    trainer = make_trainer(folder, world_size, strategy=strategy, max_epochs=-1, max_steps=STEPS)
    trainer.fit(model, loader(4, STEPS * 4 * world_size, rank, world_size))
    trainer.save_checkpoint(f"{folder}/model_parallel.ckpt")
    strategy._save_distributed_checkpoint = False
    trainer.save_checkpoint(f"{folder}/model_parallel_file.ckpt")
    return whole(model, trainer.optimizers[0])


def write_fsdp1(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """What Lightning's FSDPStrategy writes; that itself needs CUDA, FSDP1 does not. One with shards as DTensors, one as of old."""
    found: dict[str, Any] = {}
    meta = torch.load(folder / "model_parallel.ckpt/meta.pt", weights_only=True)
    for name, mesh in (("fsdp1", None), ("fsdp1_mesh", init_device_mesh("cpu", (world_size,)))):
        module = seeded(Trained)
        model = wrapped_by_fsdp1(module, mesh)
        optimizer = module.configure_optimizers()
        step(model, module, optimizer, rank, world_size)
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        ):
            states = {
                "model": model.state_dict(),
                "optimizer_0": FullyShardedDataParallel.optim_state_dict(model, optimizer),
            }
        dcp_save(states, checkpoint_id=folder / f"{name}.ckpt")
        if rank == 0:
            torch.save(meta, folder / f"{name}.ckpt/meta.pt")
        found = pieces_of_fsdp1(model, optimizer)
    return found


def wrapped_by_fsdp1(module: nn.Module, mesh: Any = None) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=True,
        auto_wrap_policy=lambda module, recurse, **_: recurse or type(module).__name__ == "Block",
    )


def write_fsdp1_file(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What FSDPStrategy(state_dict_type="full") writes. One rank: on several, PyTorch 2.13 crashes on a CPU where it gathers them."""
    warnings.simplefilter("ignore")
    assert world_size == 1
    module = seeded(Trained)
    model = wrapped_by_fsdp1(module)
    optimizer = module.configure_optimizers()
    step(model, module, optimizer, rank, world_size)
    with _get_full_state_dict_context(model, world_size=world_size):
        weights = model.state_dict()
        named = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        numbered = FullyShardedDataParallel.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model)
    meta = torch.load(Path(folder, "model_parallel.ckpt/meta.pt"), weights_only=True)
    torch.save({**meta, "state_dict": weights, "optimizer_states": [numbered]}, Path(folder, "fsdp1_file.ckpt"))
    return {"weights": {name: weights[name] for name, _ in seeded(Trained).named_parameters()}, "optimizer": named}


def pieces_of_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank holds of each parameter, flat. FSDP1's own way to whole states mixes them up on CPU."""
    names = {parameter: name.replace("_fsdp_wrapped_module.", "") for name, parameter in model.named_parameters()}
    return {
        "weights": {name: parameter.detach().flatten() for parameter, name in names.items()},
        "state": {names[parameter]: own for parameter, own in optimizer.state.items()},
    }


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole states from the pieces of all ranks."""
    shapes = {name: parameter.shape for name, parameter in seeded(Trained).named_parameters()}

    def join(name: str, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).view(shapes[name])

    weights = {name: join(name, [piece["weights"][name] for piece in pieces]) for name in shapes}
    state: dict[str, dict[str, Tensor]] = {}
    for name in shapes:
        owns = [piece["state"][name] for piece in pieces if name in piece["state"]]
        for key in owns[0] if owns else ():
            parts = [own[key] for own in owns]
            state.setdefault(name, {})[key] = join(name, parts) if parts[0].dim() else parts[0]
    return {"weights": weights, "optimizer": {"state": state}}


def write_fsdp2(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """A loop of one's own, and the nestings people save in."""
    model = seeded(Trained)
    shard_with_fsdp2(model, init_device_mesh("cpu", (world_size,)))
    optimizer = model.configure_optimizers()
    step(model, model, optimizer, rank, world_size)
    weights = get_model_state_dict(model)
    named = get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    numbered = optimizer.state_dict()
    inner = {f"inner.{name}": value for name, value in weights.items()}

    def save(name: str, state: dict[str, Any]) -> None:
        dcp_save(state, checkpoint_id=folder / name)

    save("named", {"model": weights, "optimizer": named, "step": STEPS, "ema": {"scale": weights["scale"]}})
    save("flat", {"app": {"state_dict": weights, "optim": flat}})
    save("numbered", {"state_dict": weights, "optimizer": numbered})
    save("bare", weights)
    save("inner", {"model": inner})
    two_groups = {
        **numbered,
        "param_groups": [{**numbered["param_groups"][0], "params": numbers} for numbers in split(numbered)],
    }
    save("two_groups", {"model": weights, "optimizer": two_groups})
    save("unclear", {"student": weights, "teacher": weights})
    save("megatron", as_megatron_fsdp(weights, numbered, rank, world_size))
    return whole(model, optimizer)


def split(numbered: dict[str, Any]) -> list[list[int]]:
    numbers = numbered["param_groups"][0]["params"]
    return [numbers[:3], numbers[3:]]


def as_megatron_fsdp(weights: dict[str, Any], numbered: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """As the hooks of megatron-fsdp prepare it: "module." before names, rows cut anywhere, no state without rows."""
    rows = rows_of(rank, world_size)
    everything = {number: {key: rows(value) for key, value in own.items()} for number, own in numbered["state"].items()}
    state = {number: own for number, own in everything.items() if own["exp_avg"].local.numel()}
    return {
        "model": {f"module.{name}": rows(value) for name, value in weights.items()},
        "optimizer": {"state": state, "param_groups": numbered["param_groups"]},
    }


def rows_of(rank: int, world_size: int) -> Callable[[Any], Any]:
    assert world_size == 2

    def rows(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor().cpu()
        cut = (len(full) * 2 + 2) // 3
        mine = range(cut) if rank == 0 else range(cut, len(full))
        return DcpShard.of(full[mine.start : mine.stop].clone(), Piece(shape=full.shape, rows=mine))

    return rows
