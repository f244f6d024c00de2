"""One model on many meshes, filled with numbers that do not depend on the mesh, and what it writes and reads there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp import fully_shard, fully_shard_optimizer, sharded_parameters
from lightning_mfsdp.checkpoint import export_model, load_safetensors
from lightning_mfsdp.checkpoint.safetensors import load
from lightning_mfsdp.checkpoint.state.parameter_state import (
    PARAMETER_STATES,
    ParameterState,
    dcp_shards,
    full_tensors,
)
from lightning_mfsdp.engine import AveragedWeights, ParameterView
from lightning_mfsdp.tensor_parallel import apply_plan
from lightning_mfsdp.trainer.continuation import GRADIENTS, PendingGradients
from tests.checkpoint.internals import (
    ParameterIndex,
    Ranks,
    full_model_state,
    full_optimizer_state,
    lightning_io,
    locate,
)
from tests.engine.internals import ShardedTensor
from tests.helpers.nights import NIGHT

AVERAGE = "average"
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and how a model is sharded over it.

    Attributes:
        axes: Names and sizes, for dense layers.
        experts: The same for experts; empty: as for dense layers.
        options: Of `fully_shard`.
    """

    axes: Mapping[str, int]
    experts: Mapping[str, int]
    options: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        return _size(self.axes)


def _size(axes: Mapping[str, int]) -> int:
    return torch.Size(axes.values()).numel()


def _layout(axes: dict[str, int], experts: dict[str, int] | None = None, **options: Any) -> Layout:
    return Layout(axes=axes, experts=experts or {}, options=options)


_EVERY = {
    "one rank": _layout({"data": 1}),
    "data 4": _layout({"data": 4}),
    "data 2 x tensor 2": _layout({"data": 2, "tensor": 2}),
    "data 2 x tensor 2, not sharded": _layout({"data": 2, "tensor": 2}, sharding="no_shard"),
    "data 2 x context 2": _layout({"data": 2, "context": 2}, sharding="optim"),
    "context 2 x tensor 2": _layout({"data": 1, "context": 2, "tensor": 2}, sharding="optim_grads"),
    "outer 2 x tensor 2": _layout({"outer": 2, "data": 1, "tensor": 2}, outer_sharding="optim"),
    "data 4, experts 2": _layout({"data": 4}, {"shard": 2, "expert": 2}),
    "data 2 x tensor 2, experts 2": _layout({"data": 2, "tensor": 2}, {"shard": 1, "expert": 2, "tensor": 2}),
}
# On a push those that no other one is a part of; axes of data alone are in tests/lightning/test_resharding.py.
ON_A_PUSH = ("one rank", "context 2 x tensor 2", "outer 2 x tensor 2", "data 2 x tensor 2, experts 2")
LAYOUTS = _EVERY if NIGHT else {name: _EVERY[name] for name in ON_A_PUSH}
# Those that also write whole tensors, which ranks gather one by one.
WHOLE = tuple(LAYOUTS) if NIGHT else ("one rank", "data 2 x tensor 2, experts 2")


class Experts(nn.Module):
    """Weights of several experts, `[experts, in, out]`: gate and up one after the other, and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 3, 2 * 6))
        self.down = nn.Parameter(torch.zeros(4, 6, 3))


class Others(nn.Module):
    """Whole on every tensor rank: fewer rows than ranks, no dims, no elements, not trained, not sharded; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.zeros(()))
        self.no_rows = nn.Parameter(torch.zeros(0, 3))
        self.no_columns = nn.Parameter(torch.zeros(5, 0))
        self.frozen = nn.Parameter(torch.zeros(5, 2), requires_grad=False)
        self.ignored = nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.zeros(2))


class Model(nn.Module):
    """Parameters of every kind that a plan divides. Numbers of rows are no multiples of those of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)
        self.wide = nn.Linear(6, 14)
        self.narrow = nn.Linear(14, 6)
        self.packed = nn.Linear(6, 2 * 10)
        self.packed_narrow = nn.Linear(10, 6, bias=False)
        self.experts = Experts()
        self.others = Others()
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.tokens.weight


PLAN = {
    "tokens": "embedding_rowwise",
    "wide": "colwise",
    "narrow": "rowwise",
    "packed": "packed_colwise",
    "packed_narrow": "rowwise",
    "experts": "moe_tp_experts",
    "experts.up": "packed_rowwise",
    "experts.down": "colwise",
    "others": "replicate",
    "head": "colwise",
}


def pattern(label: str, shape: torch.Size) -> Tensor:
    """Numbers that tell a tensor by its label, and every element of it."""
    start = sum(number * ord(letter) for number, letter in enumerate(label, 1))
    return (torch.arange(start, start + shape.numel(), dtype=torch.float32) / 7).reshape(shape)


def held(view: ParameterView, label: str) -> Tensor:
    """What this rank holds of a pattern."""
    return view.piece.of(pattern(label, view.shape)).reshape(view.main.shape)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": trained[:3], "weight_decay": 0.0}, {"params": trained[3:]}], lr=0.1)


def _mesh(axes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


class Sharded:
    """The model on one mesh, with an optimizer that has made steps, an average of weights, and pending gradients."""

    def __init__(self, layout: Layout) -> None:
        mesh = _mesh(layout.axes)
        self.model = Model()
        experts = _mesh(layout.experts) if layout.experts else mesh
        if "expert" in layout.experts:
            count = layout.experts["expert"]
            for parameter in self.model.experts.parameters():
                parameter.data = parameter.data.chunk(count)[experts.get_local_rank("expert")].clone()
        if layout.axes.get("tensor", 1) > 1:
            apply_plan(self.model, PLAN, mesh.get_group("tensor"))
        if layout.experts:
            fully_shard(self.model.experts, experts, **layout.options)
        fully_shard(self.model, mesh, ignored_parameters=[self.model.others.ignored], **layout.options)
        self.optimizer = fully_shard_optimizer(_optimizer(self.model))
        self.average = AveragedWeights(self.model)
        self.actions: list[Callable[[], None]] = []
        self.pending = PendingGradients(self.model, self.actions)
        for _ in range(STEPS):
            self.set_gradients()
            self.optimizer.step()
        self.average.update(0.9)

    @property
    def states(self) -> dict[str, ParameterState]:
        return {AVERAGE: self.average, GRADIENTS: self.pending}

    @property
    def views(self) -> list[ParameterView]:
        return sharded_parameters(self.model)

    def set_gradients(self) -> None:
        for view in self.views:
            if view.requires_grad:
                view.dtensor.grad = ShardedTensor.over(held(view, f"gradient {view.name}").clone(), view.dtensor)
        self.model.others.ignored.grad = torch.ones(3)

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Label, memory and right values of everything that is saved for this rank, except pending gradients."""
        averages = self.average.rows()
        for view in self.views:
            yield view.name, view.main, held(view, view.name)
            for key, value in self.optimizer.state.get(view.local, {}).items():
                label, local = f"{key} {view.name}", value.to_local() if isinstance(value, DTensor) else value
                yield label, local, torch.tensor(float(STEPS)) if key == "step" else held(view, label)
            if view.requires_grad:
                yield f"average {view.name}", averages[view.name], held(view, f"average {view.name}")
        others = self.model.others
        plain = {"others.ignored": others.ignored.detach(), "others.count": others.count}
        plain["average others.ignored"] = averages["others.ignored"]
        moments = self.optimizer.state[others.ignored]
        plain |= {f"{key} others.ignored": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        for label, value in plain.items():
            yield label, value, pattern(label, value.shape)

    @torch.no_grad()
    def fill(self) -> None:
        """Everything gets its right values."""
        for _, memory, value in self.tensors():
            memory.copy_(value)
        self.set_gradients()

    @torch.no_grad()
    def clear(self) -> None:
        """Everything gets wrong values."""
        for _, memory, _ in self.tensors():
            memory.fill_(-1)
        self.optimizer.zero_grad()

    def problems(self, only: str = "") -> list[str]:
        """Labels of what is not right; of weights and buffers alone, if these are the `only` ones."""
        found = list(self.tensors())
        if only == "weights":
            weights = self.model.state_dict()
            found = [one for one in found if one[0] in weights]
        wrong = [label for label, memory, value in found if not torch.equal(memory, value)]
        if only:
            return wrong
        while self.actions:
            self.actions.pop()()
        wrong += [
            f"gradient {view.name}"
            for view in self.views
            if view.requires_grad
            and (view.grad is None or not torch.equal(view.grad, held(view, f"gradient {view.name}")))
        ]
        kinds = {"exp_avg": 0, "average": 0}
        for label, _, _ in found:
            if (kind := label.partition(" ")[0]) in kinds:
                kinds[kind] += 1
        trained = sum(view.requires_grad for view in self.views) + 1
        return wrong + [f"{count} of {trained} {kind}" for kind, count in kinds.items() if count != trained]

    # -- writing and reading -------------------------------------------------------------------------------------------

    def write(self, folder: Path, *, whole: bool) -> None:
        """All three forms, or that of directories alone."""
        index, ranks = ParameterIndex(self.model), Ranks()
        keep = ranks.rank == 0
        rest = {"global_step": STEPS}
        sharded = lightning_io.ShardedContent.of(
            index,
            {
                **rest,
                "state_dict": self.model.state_dict(),
                "optimizer_states": [lightning_io.optimizer_state(index, self.optimizer)],
                PARAMETER_STATES: {key: dcp_shards(index, state.rows()) for key, state in self.states.items()},
            },
            ranks,
        )
        lightning_io.save(locate(folder / "sharded"), sharded, ranks=ranks)
        if not whole:
            return
        full = {
            **rest,
            "state_dict": full_model_state(self.model.state_dict(), keep=keep),
            "optimizer_states": [full_optimizer_state(self.optimizer, keep=keep)],
            PARAMETER_STATES: {key: full_tensors(index, state.rows(), keep=keep) for key, state in self.states.items()},
        }
        lightning_io.save(locate(folder / "full"), lightning_io.FullContent(checkpoint=full), ranks=ranks)
        export_model(self.model, folder / "safetensors")

    def read(self, path: Path) -> list[str]:
        """Problems after reading one of the forms."""
        self.clear()
        if path.name == "safetensors":
            with patch.object(load, "_CHUNK_BYTES", 50):  # few rows at once
                load_safetensors(self.model, path)
            return self.problems("weights")
        lightning_io.load(
            locate(path), self.model, [self.optimizer], strict=True, weights_only=True, parameter_states=self.states
        )
        return self.problems()

    def next_step(self) -> dict[str, Any]:
        """Whole weights after one more step, on rank 0."""
        self.set_gradients()
        self.optimizer.step()
        return full_model_state(self.model.state_dict(), keep=dist.get_rank() == 0)


@torch.no_grad()
def filled_in_one_process() -> tuple[Model, torch.optim.Optimizer]:
    """The model and its optimizer in plain PyTorch, with the right values."""
    model = Model()
    optimizer = _optimizer(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(pattern(name, parameter.shape))
        if parameter.requires_grad:
            parameter.grad = pattern(f"gradient {name}", parameter.shape)
            moments = {key: pattern(f"{key} {name}", parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(STEPS)), **moments}
    model.others.count.copy_(pattern("others.count", model.others.count.shape))
    model.others.ignored.grad = torch.ones(3)
    return model, optimizer
