"""Programs that do something of their own when a checkpoint is loaded, each with what it came to, for test_load_hooks.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchmetrics import SumMetric

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.nights import NIGHT
from tests.lightning.models import DIM, Classifier, loader, make_trainer, seeded

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Side:
    """A strategy that a program runs under, on one rank.

    Attributes:
        name: "ddp", "mp" for ModelParallelStrategy, or "<sharding> <kind of checkpoint>".
        rank: This process.
        world_size: Number of processes.
        folder: For this program under this strategy; the ranks share it.
    """

    name: str
    rank: int
    world_size: int
    folder: Path

    def trainer(self, **options: Any) -> Trainer:
        """A quiet one."""
        strategy: Any = "ddp_find_unused_parameters_true"
        if self.name == "mp":
            strategy = ModelParallelStrategy(data_parallel_size=self.world_size, tensor_parallel_size=1)
        elif self.name != "ddp":
            sharding, kind = self.name.split()
            strategy = MFSDPStrategy(sharding=sharding, units=["Block"], state_dict_type=kind)  # type: ignore[arg-type]
        settings: dict[str, Any] = {"strategy": strategy, "max_epochs": -1, "max_steps": STEPS, "limit_val_batches": 1}
        return make_trainer(self.folder, self.world_size, **{**settings, **options})

    def fit(self, model: LightningModule, *, path: Path | None = None, **options: Any) -> Trainer:
        """From a checkpoint, or from the beginning."""
        trainer = self.trainer(**options)
        trainer.fit(model, loader(2, 8 * self.world_size, self.rank, self.world_size), ckpt_path=path)
        return trainer

    def saved(self, model: LightningModule) -> Path:
        """The checkpoint of a model after training."""
        path = self.folder / "saved.ckpt"
        self.fit(model).save_checkpoint(path)
        return path

    def trained(self, kind: type[LightningModule], **options: str) -> Path:
        """The same of a model of this kind, which programs that only read it share."""
        path = self.folder.parents[1] / f"{' '.join((self.name, kind.__name__, *options.values()))}.ckpt"
        if not path.exists():  # on no rank: all train, and then save
            self.fit(seeded(kind, **options)).save_checkpoint(path)
        return path

    def validated(self, model: LightningModule, path: Path) -> dict[str, Tensor]:
        """The state of a model that was read for a validation."""
        data = loader(2, 8 * self.world_size, self.rank, self.world_size)
        self.trainer().validate(model, data, ckpt_path=path, verbose=False)
        return whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a state dict, in memory of its own. Collective."""
    found: dict[str, Any] = dict(model.state_dict())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
        if isinstance(value, Tensor)
    }


def full(value: Tensor) -> Tensor:
    """A tensor that may be sharded, on all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Base(Classifier):
    """Also for ModelParallelStrategy."""

    def configure_model(self) -> None:
        trainer = self._trainer  # none under load_from_checkpoint
        if trainer is None or isinstance(self.scale, DTensor):
            return
        if isinstance(trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)


def fresh(kind: type[LightningModule], **options: Any) -> Any:
    """With other weights than those that were trained."""
    made = seeded(kind, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1.0)
    return made


# -- load_state_dict and its hooks -------------------------------------------------------------------------------------


class Teacher(Base):
    """Takes the student's head when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(DIM, 5).requires_grad_(False)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(state_dict, *args, **options)
        with torch.no_grad():
            self.teacher.weight.copy_(self.head.weight)
            self.teacher.bias.copy_(state_dict["head.bias"])
        return found


def teacher(side: Side) -> dict[str, Any]:
    return side.validated(fresh(Teacher), side.saved(seeded(Teacher)))


class Mixing(Base):
    """Keeps its own head, and half of its own scale."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        state = {name: value for name, value in state_dict.items() if not name.startswith("head")}
        with torch.no_grad():
            state["scale"] = state["scale"] * 0.5 + self.state_dict()["scale"] * 0.5
        return super().load_state_dict(state, strict=False)


def mixing(side: Side) -> dict[str, Any]:
    return side.validated(fresh(Mixing), side.trained(Base))


class Counting(Base):
    """Hooks after loading, of modules that are units, inside of units, and the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        for name in ("", "blocks.0", "blocks.1.linear", "head"):
            self.get_submodule(name).register_load_state_dict_post_hook(functools.partial(self.count, name))

    def count(self, name: str, module: nn.Module, keys: Any) -> None:
        self.calls.append(f"{name}: {module is self.get_submodule(name)}, {keys.missing_keys}, {keys.unexpected_keys}")


def counting(side: Side) -> dict[str, Any]:
    path = side.trained(Base)
    model = fresh(Counting)
    state = side.validated(model, path)
    validated, model.calls = model.calls, []
    side.fit(model, path=path)
    return {**state, "calls": validated, "when fitting": model.calls}


class Scaled(nn.Module):
    """Its weight was transposed in the first version, as a buffer says."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(DIM * DIM).view(DIM, DIM) / 50)
        self.register_buffer("version", torch.tensor(version))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if state_dict[prefix + "version"] < 2:
            old = state_dict[prefix + "weight"]
            new = full(old).t().contiguous()
            if isinstance(old, DTensor):
                new = distribute_tensor(new, old.device_mesh, old.placements)
            state_dict[prefix + "weight"], state_dict[prefix + "version"] = new, torch.tensor(2)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Converted(Base):
    """With a module of that kind."""

    def __init__(self, version: int = 2) -> None:
        super().__init__()
        self.scaled = Scaled(version)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.scaled(self.inputs(x)))


def conversion(side: Side) -> dict[str, Any]:
    old, new = seeded(Converted, version=1), fresh(Converted)
    state = side.validated(new, side.saved(old))
    again = side.validated(fresh(Converted), side.saved(new))
    return {**state, "transposed": torch.equal(state["scaled.weight"], whole(old)["scaled.weight"].t()), "kept": again}


class Halved(nn.Module):
    """Since its second version the weight is half as large, as PyTorch's own versions of modules say; the first had another shape, too."""

    _version = 2

    def __init__(self, version: int = 2) -> None:
        super().__init__()
        self._version = version
        shape = (DIM, DIM // 2) if version == 2 else (DIM // 2, DIM)
        self.weight = nn.Parameter(torch.arange(DIM * DIM // 2).view(shape) / 50)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x @ (self.weight if self._version == 2 else self.weight.t()), (0, DIM // 2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2 and self._version == 2:
            state_dict[prefix + "weight"] = full(state_dict[prefix + "weight"]).t() / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Versioned(Converted):
    """With a module of that kind."""

    def __init__(self, version: int = 2) -> None:
        super().__init__()
        self.scaled = Halved(version)  # type: ignore[assignment]


def versions(side: Side) -> dict[str, Any]:
    new = fresh(Versioned)
    state = side.validated(new, side.saved(seeded(Versioned, version=1)))
    again = side.validated(fresh(Versioned), side.saved(new))
    return {**state, "kept": again}


class Renamed(Base):
    """What is `head` now was `classifier`."""

    def __init__(self, name: str = "head") -> None:
        super().__init__()
        if name != "head":
            self.add_module(name, self.head)
            del self.head
        else:
            self.register_load_state_dict_pre_hook(self.rename)
            self.blocks[0].register_load_state_dict_pre_hook(self.seen)
            self.prefixes: list[str] = []
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.get_submodule(self.name)(x * self.scale + self.shift)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith("classifier.")]:
            state[name.replace("classifier.", "head.")] = state.pop(name)

    def seen(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.prefixes.append(f"{prefix}: {sorted(state)}")


def renamed_by_hooks(side: Side) -> dict[str, Any]:
    model = fresh(Renamed)
    state = side.validated(model, side.trained(Renamed, name="classifier"))
    return {**state, "prefixes": model.prefixes}


class Extra(nn.Module):
    """State of its own kind: a tensor or something else."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class WithState(Base):
    """A metric that is saved, statistics, and extra states."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.metric = SumMetric()
        self.metric.persistent(True)
        self.norm = nn.BatchNorm1d(3)
        self.number = Extra({"a": [start, 1], "b": "text"})
        self.tensor = Extra(torch.full((2, 3), start))
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.metric.update(batch_idx + 1.0)
        return super().training_step(batch, batch_idx)


def other_state(side: Side) -> dict[str, Any]:
    model = fresh(WithState)
    state = side.validated(model, side.saved(seeded(WithState, start=3.0)))
    sums = model.metric.sum_value if hasattr(model.metric, "sum_value") else model.metric.value
    return {**state, "metric": float(sums), "number": model.number.value, "tensor": full(model.tensor.value)}


# -- on_load_checkpoint ------------------------------------------------------------------------------------------------


class Loading(Base):
    """Calls a function with the checkpoint."""

    def __init__(self, change: Callable[[Any, dict[str, Any]], None], strict: bool = True) -> None:
        super().__init__()
        self.change = change
        self.strict_loading = strict

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.change(self, checkpoint)


def adam(trainer: Trainer) -> dict[str, Any]:
    """How far an optimizer is."""
    optimizer: Any = trainer.optimizers[0]
    steps = [float(full(state["step"])) for state in optimizer.state.values()]
    return {"steps": sorted(steps), "rates": [group["lr"] for group in optimizer.param_groups]}


def resumed(side: Side, change: Callable[[Any, dict[str, Any]], None], *, strict: bool = True) -> dict[str, Any]:
    """Train on with what a change leaves of a checkpoint."""
    model = fresh(Loading, change=change, strict=strict)
    trainer = side.fit(model, path=side.trained(Base), max_steps=2 * STEPS)
    return {**whole(model), **adam(trainer), "global step": trainer.global_step}


def empty_optimizer(side: Side) -> dict[str, Any]:
    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []

    return resumed(side, change)


def other_rate(side: Side) -> dict[str, Any]:
    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group["lr"] = 0.001

    return resumed(side, change)


def zero_averages(side: Side) -> dict[str, Any]:
    """Write into states and replace them."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"][0]["state"].values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"] = state["exp_avg_sq"] * 4

    return resumed(side, change)


def drop_head(side: Side) -> dict[str, Any]:
    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("head")]:
            del state[name]

    model = fresh(Loading, change=change, strict=False)
    return {**resumed(side, change, strict=False), "read": side.validated(model, side.trained(Base))}


def rename(side: Side) -> dict[str, Any]:
    """All names at once, in a new dictionary."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        names = {"classifier": "head", "blocks.0": "blocks.1", "blocks.1": "blocks.0"}
        renamed = {}
        for name, value in checkpoint["state_dict"].items():
            start = next((start for start in names if name.startswith(start)), "")
            renamed[names.get(start, "") + name.removeprefix(start)] = value
        checkpoint["state_dict"] = renamed

    path = side.trained(Renamed, name="classifier")
    return side.validated(fresh(Loading, change=change), path)


def compute(side: Side) -> dict[str, Any]:
    """Read, replace, write in place, move one entry under two names, keep own values, and copy an entry by hand."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["scale"] = state["scale"] * 2 + 1
        state["inputs.weight"].mul_(3)
        state["blocks.0.linear.bias"][2:5] = 7.0
        state["blocks.1.linear.weight"] = state["blocks.0.linear.weight"]
        state["head.weight"] = model.state_dict()["head.weight"]
        model.norms = {name: float(value.norm()) for name, value in state.items() if "norm" in name}
        model.shapes = {
            name: (tuple(value.shape), value.dtype, value.numel()) for name, value in checkpoint["state_dict"].items()
        }
        with torch.no_grad():
            model.head.bias.copy_(state.pop("head.bias"))

    model = fresh(Loading, change=change, strict=False)
    state = side.validated(model, side.trained(Base))
    return {**state, "norms": model.norms, "shapes": model.shapes}


class Queued(Base):
    """With a queue whose length is saved."""

    def __init__(self, length: int = 4, resizes: str = "") -> None:
        super().__init__()
        self.register_buffer("queue", torch.arange(float(length * 3)).view(length, 3))
        self.resizes = resizes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]["queue"]
        if self.resizes == "empty":
            self.queue = torch.empty(saved.shape)
        elif self.resizes == "itself":
            self.queue = saved
        elif self.resizes == "in place":
            self.queue.resize_(saved.shape)
        elif self.resizes == "own":
            checkpoint["state_dict"]["queue"] = self.queue

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self.resizes == "hook":
            self.queue = torch.zeros_like(state_dict[prefix + "queue"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def queues(side: Side) -> dict[str, Any]:
    path = side.saved(seeded(Queued, length=7))
    found: dict[str, Any] = {}
    for number, resizes in enumerate(("empty", "itself", "in place", "own", "hook")):
        if NIGHT or number % 2 == 0:  # a fit reads as a validation does
            model = fresh(Queued, resizes=resizes)
            found[resizes] = side.validated(model, path)
            found[f"{resizes} type"] = type(model.queue).__name__
        if NIGHT or number % 2:
            found[f"{resizes} fits"] = whole_after(side, fresh(Queued, resizes=resizes), path)
    return found


def whole_after(side: Side, model: LightningModule, path: Path) -> dict[str, Tensor]:
    """After more training."""
    side.fit(model, path=path, max_steps=2 * STEPS)
    return whole(model)


def snippet(side: Side) -> dict[str, Any]:
    """What many programs do with what does not fit."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        state, own = checkpoint["state_dict"], model.state_dict()
        for name in state:
            if name in own and state[name].shape != own[name].shape:
                state[name] = own[name]
        checkpoint["optimizer_states"] = []

    class Wider(Loading):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.head = nn.Linear(DIM, 9)

    model = fresh(Wider, change=change)
    trainer = side.fit(model, path=side.trained(Base), max_steps=2 * STEPS)
    return {**whole(model), **adam(trainer)}


class Watching(Callback):
    """Sees what was loaded when its hook is called, and changes what comes after it."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]["head.weight"]
        self.seen["callback"] = torch.equal(full(pl_module.state_dict()["head.weight"]), saved), pl_module.order
        if trainer.optimizers:  # DDP has none before its setup
            self.seen["steps"] = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group["lr"] = 0.002


def order(side: Side) -> dict[str, Any]:
    """The module's hook, then weights, then the callbacks' hooks, then optimizers."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]["head.weight"]
        model.order = ["module", torch.equal(full(model.state_dict()["head.weight"]), saved)]

    path, callback = side.trained(Base), Watching()
    model = fresh(Loading, change=change)
    trainer = side.fit(model, path=path, max_steps=2 * STEPS, callbacks=[callback])
    callback.seen.pop("steps", None)
    return {**whole(model), **adam(trainer), **callback.seen}


def rename_and_resume(side: Side) -> dict[str, Any]:
    """With the optimizer, whose state goes by name in a directory."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        new = {name: name.replace("classifier.", "head.") for name in checkpoint["state_dict"]}
        checkpoint["state_dict"] = {new[name]: value for name, value in checkpoint["state_dict"].items()}
        for optimizer in checkpoint["optimizer_states"]:
            optimizer["state"] = {new.get(name, name): value for name, value in optimizer["state"].items()}
            for group in optimizer["param_groups"]:
                group["params"] = [new.get(name, name) for name in group["params"]]

    path = side.trained(Renamed, name="classifier")
    model = fresh(Loading, change=change)
    return {**adam(side.fit(model, path=path, max_steps=2 * STEPS)), **whole(model)}


class Written(nn.Module):
    """Its weight was `w` in former versions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.arange(DIM * DIM).view(DIM, DIM) / 50))
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if module.name == "weight" and prefix + "w" in state:
            state[prefix + "weight"] = state.pop(prefix + "w")

    def forward(self, x: Tensor) -> Tensor:
        return x @ getattr(self, self.name)


class Compiled(Base):
    """With a module of that kind, whose wrapper is in names."""

    def __init__(self, name: str = "weight") -> None:
        super().__init__()
        self.written = torch.compile(Written(name), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.written(self.inputs(x)))


def former_names_in_compiled_modules(side: Side) -> dict[str, Any]:
    return side.validated(fresh(Compiled), side.saved(seeded(Compiled, name="w")))


def dictionaries(side: Side) -> dict[str, Any]:
    """Ways to make another dictionary of one."""

    def change(model: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"].copy()
        state = state | {"scale": state["scale"] * 2}
        checkpoint["state_dict"] = {"shift": torch.zeros(())} | copy.copy(state)
        for optimizer in checkpoint["optimizer_states"]:
            optimizer["state"] = optimizer["state"].copy()

    return resumed(side, change, strict=False)


class Tied(Loading):
    """Two layers with one weight."""

    def __init__(self, change: Callable[[Any, dict[str, Any]], None]) -> None:
        super().__init__(change)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


def tied(side: Side) -> dict[str, Any]:
    """Write into an entry of a weight with two names, or replace it: then the last one counts."""
    first, second = (f"blocks.{number}.linear.weight" for number in range(2))
    changes: dict[str, Callable[[Any], Any]] = {
        "write": lambda state: (state[first].mul_(2), state[second].add_(1)),
        "replace first": lambda state: state.update({first: state[first] * 2}),
        "replace second": lambda state: state.update({second: state[second] * 2}),
    }
    path = side.saved(seeded(Tied, change=lambda model, checkpoint: None))
    found: dict[str, Any] = {}
    for name, change in changes.items():
        model = fresh(Tied, change=lambda model, checkpoint, change=change: change(checkpoint["state_dict"]))
        found[name] = side.validated(model, path)
    return found


PROGRAMS: tuple[Callable[[Side], dict[str, Any]], ...] = (
    *(teacher, mixing, counting, conversion, versions, renamed_by_hooks, other_state),
    *(empty_optimizer, other_rate, zero_averages, drop_head, rename, compute, queues, snippet, order),
    *(rename_and_resume, former_names_in_compiled_modules, dictionaries, tied),
)
# ModelParallelStrategy calls the same code. What it cannot do there is left out: drop what is read in place, other names and shapes,
# metrics and extra states, on_load_checkpoint.
ALSO_MODEL_PARALLEL = (teacher, counting, conversion)


def run(rank: int, world_size: int, folder: str, sides_of: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """What each program comes to under DDP and under the strategies named for it."""
    found: dict[str, dict[str, Any]] = {}
    for program in PROGRAMS:
        sides = ["ddp", *(["mp"] if program in ALSO_MODEL_PARALLEL else []), *sides_of[program.__name__]]
        for name in sides:
            own = Path(folder, program.__name__, name)
            own.mkdir(parents=True, exist_ok=True)
            side = Side(name=name, rank=rank, world_size=world_size, folder=own)
            try:
                found.setdefault(program.__name__, {})[name] = program(side)
            except Exception as error:
                raise AssertionError(f"{program.__name__} under {name}") from error
            dist.barrier()
    return found
