"""A predictor on GPUs: recompute changes no bit in bfloat16 and FP8, takes less memory, and tied weights stay tied."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from lightning_mfsdp.te import library
from tests.engine.cases import run_cases
from tests.gpu.test_te import needs_engine
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import full_state, make_trainer, seeded
from tests.mtp.models import build
from tests.mtp.test_checkpoint import data
from tests.mtp.test_low_precision import WideNet
from tests.te.test_training import fp8

DIM = 256
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
UNITS = {"automatic": "auto", "one by one": ["Embedding", "LinearLossHead", "PredictorLayer"]}


def by_the_library(*args: Any, **kwargs: Any) -> Tensor:
    """Looked up when it is called: only then is it there."""
    again: Tensor = library.load("pytorch").checkpoint(*args, use_reentrant=False, **kwargs)
    return again


def trained(
    rank: int, world: int, precision: Any, sharding: str = "optim_grads_params", units: Any = "auto", **model: Any
) -> tuple[WideNet, Any]:
    made = seeded(WideNet, dim=DIM, depth=2, **model)
    plugins = {"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}
    strategy = MFSDPStrategy(sharding=sharding, units=units)
    trainer = make_trainer(
        "unused", world, accelerator="cuda", strategy=strategy, max_steps=4, max_epochs=-1, **plugins
    )
    torch.manual_seed(5 + rank)
    trainer.fit(made, data(rank, 4))
    return made, trainer


def assert_same(model: WideNet, other: WideNet, case: str) -> None:
    assert torch.equal(torch.stack(model.losses), torch.stack(other.losses)), case
    state = full_state(other)
    for name, value in full_state(model).items():
        assert torch.equal(state[name], value), f"{case}: {name}"


# -- one GPU -----------------------------------------------------------------------------------------------------------


def computed_again(precision: str, recompute: Any, rank: int, world: int) -> None:
    """Weights and losses after some steps are the same to the bit, with dropout, and with one layer for both depths."""
    for shared in (False, True):
        made = partial(fp8, precision) if precision != "bf16-mixed" else lambda: precision
        kept, _ = trained(rank, world, made(), shared=shared)
        again, _ = trained(rank, world, made(), shared=shared, recompute=recompute)
        assert kept.losses[-1] != kept.losses[0]
        assert_same(kept, again, f"{precision} {shared=}")


def less_memory(rank: int, world: int) -> None:
    """Between forward and backward a layer that is computed again keeps two inputs, which are there anyway."""
    taken = []
    for recompute in (False, True):
        layer = build(dim=DIM, recompute=recompute).predictor.layers[0].cuda()
        hidden, embeddings = torch.randn(2, 8, 512, DIM, device="cuda", requires_grad=True).unbind()
        layer(hidden, embeddings).sum().backward()  # work spaces
        before = torch.cuda.memory_allocated()
        y = layer(hidden, embeddings)
        taken.append(torch.cuda.memory_allocated() - before)
        del y
    assert taken[1] < 2 * hidden.numel() * 4 < taken[0] / 2, taken


ONE = {
    "bfloat16": partial(computed_again, "bf16-mixed", True),
    "less memory": less_memory,
}
ONE_FP8 = {
    "FP8 by torch": partial(computed_again, "current", True),
    "FP8 by the library": partial(computed_again, "current", by_the_library),
    "FP8 in blocks": partial(computed_again, "block", True),
}


@pytest.fixture(scope="module")
def on_one() -> dict[str, str]:
    return run_cases(ONE, 1, backend="nccl")


@pytest.fixture(scope="module")
def on_one_with_the_library() -> dict[str, str]:
    return run_cases(ONE_FP8, 1, backend="nccl")


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("case", ONE)
def test_on_one_gpu(on_one: dict[str, str], case: str) -> None:
    assert not on_one[case], on_one[case]


@pytest.mark.gpu
@needs_engine()
@pytest.mark.parametrize("case", ONE_FP8)
def test_in_fp8_on_one_gpu(on_one_with_the_library: dict[str, str], case: str) -> None:
    assert not on_one_with_the_library[case], on_one_with_the_library[case]


# -- two GPUs ----------------------------------------------------------------------------------------------------------


def tied_under_every_strategy(rank: int, world: int, precisions: list[str]) -> None:
    """Also by NCCL, with embedding and head in the root or as units: tied before and after a checkpoint that another layout reads."""
    for precision, sharding, units in product(precisions, STRATEGIES, UNITS.values()):
        case = f"{precision} {sharding} {units}"
        made = partial(fp8, precision) if precision != "bf16-mixed" else lambda precision=precision: precision
        kept, _ = trained(rank, world, made(), sharding, units)
        again, trainer = trained(rank, world, made(), sharding, units, recompute=True)
        assert_same(kept, again, case)
        tied = next(view for view in sharded_parameters(again) if view.name == "model.embedding.weight")
        assert tied.names == ("model.embedding.weight", "model.head.weight")
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            trainer.save_checkpoint(f"{folders[0]}/one")
            other = WideNet(dim=DIM, depth=2)
            loading = make_trainer("unused", world, accelerator="cuda", strategy="mfsdp", max_steps=4, max_epochs=-1)
            loading.fit(other, data(rank, 4), ckpt_path=f"{folders[0]}/one")
            dist.barrier()
        expected = full_state(again)
        assert all(torch.equal(value, expected[name]) for name, value in full_state(other).items()), case


@pytest.mark.gpus2
@needs_gpus(2)
def test_a_tied_head_in_bfloat16_on_two_gpus() -> None:
    run_distributed(tied_under_every_strategy, 2, ["bf16-mixed"], backend="nccl")


@pytest.mark.gpus2
@needs_engine()
def test_a_tied_head_in_fp8_on_two_gpus() -> None:
    run_distributed(tied_under_every_strategy, 2, ["current"], backend="nccl")
