"""What the strategy refuses before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_mfsdp import ShardingError
from lightning_mfsdp.fabric import MFSDPFabricStrategy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sharding": "zero3"}, ShardingError, "sharding: expected one of"),
        ({"units": "Block"}, TypeError, "a list of module classes"),
        ({"blocks_per_unit": 0}, ValueError, "blocks_per_unit=0"),
        ({"storage": "heap"}, ValueError, "'pooled', 'dynamic'"),
        ({"accumulation": "none"}, ValueError, "'local', 'sharded'"),
        ({"state_dict_type": "other"}, ValueError, "'sharded', 'full'"),
        ({"policy": "bf16"}, TypeError, "expected a MixedPrecisionPolicy"),
        ({"outer_size": 0}, ValueError, "expected a positive number"),
        ({"ignored_parameters": "*"}, TypeError, "expected a list of parameters"),
        ({"compile": 3}, TypeError, "a mapping of options"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MFSDPFabricStrategy(**arguments)


def test_there_is_no_mesh_before_launch() -> None:
    with pytest.raises(RuntimeError, match=r"no mesh before fabric.launch\(\)"):
        _ = MFSDPFabricStrategy().device_mesh


def test_a_checkpoint_plugin_would_be_ignored_and_is_refused() -> None:
    with pytest.raises(TypeError, match="TorchCheckpointIO would be ignored"):
        Fabric(accelerator="cpu", devices=1, strategy="mfsdp", plugins=[TorchCheckpointIO()])


def test_other_devices_are_refused() -> None:
    strategy = MFSDPFabricStrategy(parallel_devices=[torch.device("meta")])
    with pytest.raises(ValueError, match="runs on CPU and CUDA, got meta"):
        strategy.setup_environment()
