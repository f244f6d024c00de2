"""Models divided by their own plans and sharded by the engine train as on one process: weights, norms and whole parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp import full_state_dict
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    sharded_parameters,
    unshard,
)
from lightning_mfsdp.tensor_parallel import apply_plan
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import pairwise
from tests.tensor_parallel.models import MODELS, VOCABULARY, built, copied_model

FLOAT64 = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64)
MESHES = {"tensor 2": (1, 1, 2), "data 2 x tensor 2": (1, 2, 2), "tensor 4": (1, 1, 4), "outer 2 x tensor 2": (2, 1, 2)}
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, MICROBATCHES = 2, 2  # the second step sees what the first one wrote


def batch(step: int, micro: int, data_rank: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + 10 * micro + data_rank)
    tokens = torch.randint(1, VOCABULARY, (2, 8), generator=numbers)
    return {"input_ids": tokens, "labels": torch.randint(0, VOCABULARY, (2, 8), generator=numbers)}


def reference(model: Any, data_ranks: int) -> list[float]:
    """Train a plain model on all data; returns the norms of its gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            for data_rank in range(data_ranks):
                (model(**batch(step, micro, data_rank)).loss / data_ranks).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def sharded(model: Any, mesh: Any, sharding: str) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh, sharding=sharding, policy=FLOAT64)
    fully_shard(model, mesh, sharding=sharding, policy=FLOAT64)


def compare(kind: str, sizes: tuple[int, int, int], sharding: str, *, sequence_parallel: bool = False) -> None:
    outer, data, tensor = sizes
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "data", "tensor"))
    mesh = mesh if outer > 1 else mesh["data", "tensor"]
    plain = built(kind)
    model = copied_model(plain)
    apply_plan(model, None, mesh.get_group("tensor"), sequence_parallel=sequence_parallel)
    sharded(model, mesh, sharding)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = reference(plain, outer * data)
    data_rank = dist.get_rank() // tensor
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            model(**batch(step, micro, data_rank)).loss.backward()
        norm = clip_grad_norm_(model, 0.5)
        torch.testing.assert_close(float(norm), norms[step], rtol=1e-12, atol=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    want = plain.state_dict()
    found = full_state_dict(model, rank0_only=False)
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    with unshard(model):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), want[name], rtol=0, atol=1e-12)
    for view in sharded_parameters(model):
        assert view.shape == want[view.name].shape == view.dtensor.shape
        torch.testing.assert_close(
            float(view.dtensor.detach().norm()), float(want[view.name].norm()), rtol=1e-12, atol=0
        )
        if not view.piece.parts:  # whole on every rank of the tensor axis, and equal to the bit
            pieces = [torch.empty_like(view.main) for _ in range(tensor)]
            dist.all_gather(pieces, view.main.contiguous(), group=mesh.get_group("tensor"))
            assert all(torch.equal(piece, view.main) for piece in pieces), view.name


# On a push: mesh, model, strategy. Two ranks hold the models, which divide no data; four hold the axes.
ON_FOUR = (
    ("data 2 x tensor 2", "Llama, biases", "optim_grads_params"),
    ("outer 2 x tensor 2", "Mixtral", "optim"),
)


def rows_of(world: int, models: Iterable[str]) -> list[tuple[str, str, str]]:
    """Of the meshes with so many ranks; at night the full product."""
    if NIGHT:
        rows = pairwise(MESHES, models, SHARDINGS)
    else:
        on_four = [row for row in ON_FOUR if row[1] in models]
        others = [kind for kind in models if kind not in [row[1] for row in on_four]]
        rows = [*on_four, *(("tensor 2", kind, "optim_grads_params") for kind in others)]
    return [row for row in rows if math.prod(MESHES[row[0]]) == world]


def every_mesh(rank: int, world: int) -> None:
    with in_double():
        for name, kind, sharding in rows_of(world, MODELS):
            try:
                compare(kind, MESHES[name], sharding)
            except Exception as error:
                raise AssertionError(f"{kind}, {name}, {sharding}") from error


@pytest.mark.parametrize("world", [2, 4])
def test_weights_and_norms_are_those_of_one_process(world: int) -> None:
    run_distributed(every_mesh, world)


DENSE = [kind for kind in MODELS if kind not in ("Mixtral", "Qwen3-MoE", "DeepSeek-V2")]


def divided_sequences(rank: int, world: int) -> None:
    with in_double():
        for name, kind, sharding in rows_of(
            world, DENSE if NIGHT else ("Llama, biases", "Llama, tied", "OLMo2", "Phi3")
        ):
            if sharding != "optim_grads_params":
                continue
            try:
                compare(kind, MESHES[name], sharding, sequence_parallel=True)
            except Exception as error:
                raise AssertionError(f"{kind}, {name}") from error


@pytest.mark.parametrize("world", [2, 4])
def test_divided_sequences_give_the_same_weights_and_norms(world: int) -> None:
    run_distributed(divided_sequences, world)


LONG = (("Qwen3", False), ("Qwen3", True), ("Llama, biases", True), ("Mixtral", False))


def long_training(rank: int, world: int) -> None:
    """Twenty steps with bfloat16 weights: what is whole stays equal to the bit, weights and optimizer state."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    group = mesh.get_group("tensor")
    for kind, sequence_parallel in LONG if NIGHT else LONG[2:]:
        model = built(kind).float()
        apply_plan(model, None, group, sequence_parallel=sequence_parallel)
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh, policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(20):
            model(**batch(step, 0, rank // 2)).loss.backward()
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        whole = [view for view in sharded_parameters(model) if not view.piece.parts]
        assert len(whole) > 4
        for view in whole:
            state = optimizer.state[view.dtensor]
            for value in (view.main, *(as_rows(state[key]) for key in ("exp_avg", "exp_avg_sq"))):
                pieces = [torch.empty_like(value) for _ in range(2)]
                dist.all_gather(pieces, value.contiguous(), group=group)
                assert torch.equal(*pieces), f"{kind}: {view.name}"


def as_rows(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_whole_parameters_and_their_state_are_equal_to_the_bit_after_twenty_steps(world: int) -> None:
    run_distributed(long_training, world)
