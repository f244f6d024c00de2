"""Checkpoints that Lightning's strategies and megatron-fsdp write on GPUs, loaded or converted to the bit."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import convert_checkpoint
from tests.checkpoint.foreign import STEPS, Trained, whole
from tests.checkpoint.internals import full_optimizer_state
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import Block, Classifier, full_state, loader, make_trainer, seeded
from tests.lightning.test_checkpoint import assert_same

pytestmark = [
    pytest.mark.gpus2,
    needs_gpus(2),
]

HAS_MEGATRON = find_spec("megatron_fsdp") is not None


def by_lightning(strategy: Any, path: str, rank: int, world: int) -> dict[str, Any]:
    model = seeded(Trained)
    trainer = make_trainer(path, world, accelerator="cuda", strategy=strategy, max_epochs=-1, max_steps=STEPS)
    trainer.fit(model, loader(4, STEPS * 4 * world, rank, world))
    trainer.save_checkpoint(path)
    return whole(trainer.model, trainer.optimizers[0])


def by_megatron(path: str, rank: int, world: int) -> dict[str, Any]:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard
    from megatron_fsdp.uneven_dtensor import gather_uneven_dtensor_to_full_tensor

    module = seeded(Classifier).cuda()
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.05),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32),
        sync_model_each_microbatch=True,
    )
    for x, y in loader(4, STEPS * 4 * world, rank, world):
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    dcp_save({"model": weights, "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return {
        "weights": {
            name.removeprefix("module."): gather_uneven_dtensor_to_full_tensor(value).to_local().cpu()
            for name, value in weights.items()
            if hasattr(value, "to_local")
        }
    }


def by_others(rank: int, world: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # other programs' own
    found = {
        "fsdp1": by_lightning(
            FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded"), f"{folder}/fsdp1", rank, world
        ),
        "fsdp2": by_lightning(
            ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1), f"{folder}/fsdp2", rank, world
        ),
    }
    if HAS_MEGATRON:
        found["megatron"] = by_megatron(f"{folder}/megatron-dcp", rank, world)
    return found


def by_us(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Through `ckpt_path`, without a step."""
    warnings.simplefilter("ignore")
    if HAS_MEGATRON and rank == 0:
        names = [name for name, _ in Classifier().named_parameters()]  # by number; weights and averages share shapes
        convert_checkpoint(Path(folder, "megatron-dcp"), Path(folder, "megatron"), parameters=names)
    dist.barrier()
    found = {}
    for name in ("fsdp1", "fsdp2", *(["megatron"] if HAS_MEGATRON else [])):
        model = seeded(Classifier if name == "megatron" else Trained)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        strategy = MFSDPStrategy(units=["Block"])
        options: dict[str, Any] = {"accelerator": "cuda", "max_steps": STEPS, "limit_train_batches": 0}
        trainer = make_trainer(folder, world, strategy=strategy, **options)
        trainer.fit(model, loader(4, 8, rank, world), ckpt_path=f"{folder}/{name}")
        state = full_optimizer_state(trainer.optimizers[0], keep=rank == 0)
        found[name] = {"weights": full_state(model), "optimizer": state}
    return found


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("foreign"))
    saved, loaded = (run_distributed(function, 2, folder, backend="nccl")[0] for function in (by_others, by_us))
    return saved, loaded


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_a_directory_of_lightnings_strategies_resumes_to_the_bit(states: Any, name: str) -> None:
    saved, loaded = (one[name] for one in states)
    for key, tensor in loaded["weights"].items():
        assert torch.equal(tensor, saved["weights"][key].cpu()), key
    trained = [key for key, parameter in seeded(Trained).named_parameters() if parameter.requires_grad]
    for number, key in enumerate(trained):
        expected = {part: value.cpu() for part, value in saved["optimizer"]["state"][key].items()}
        assert_same(loaded["optimizer"]["state"][number], expected, key)


@pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-fsdp")
def test_a_checkpoint_of_megatron_fsdp_is_converted_to_the_bit(states: Any) -> None:
    saved, loaded = (one["megatron"] for one in states)
    assert saved["weights"].keys() >= loaded["weights"].keys()
    for key, tensor in loaded["weights"].items():
        assert torch.equal(tensor, saved["weights"][key]), key
    assert len(loaded["optimizer"]["state"]) == len(loaded["weights"])
