"""Directories are read by any version of PyTorch, whichever wrote them.

`tests/data/torch-2.15` was written by PyTorch 2.15.0 alone:

    import torch.distributed.checkpoint as dcp
    turned = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    dcp.save({"model": {"weight": torch.arange(6.0).reshape(2, 3), "turned": turned}, "step": 3}, checkpoint_id="tests/data/torch-2.15")
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from lightning_mfsdp.checkpoint import load_checkpoint
from lightning_mfsdp.checkpoint.io.trust import read_table

WRITTEN_BY_2_15 = Path(__file__).parents[1] / "data/torch-2.15"


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_directory_of_a_newer_version_is_read(weights_only):
    found = load_checkpoint(WRITTEN_BY_2_15, weights_only=weights_only)["state_dict"]
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["turned"], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t())


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("fields", [5, 6, 7])
def test_properties_of_tensors_may_have_more_fields_or_fewer(monkeypatch, fields, trusted):
    """Of 5 fields until torch 2.14, of 6 from 2.15 on; 7 stand for a later version."""
    properties = TensorProperties(dtype=torch.float64)
    table = Metadata({"weight": TensorStorageMetadata(properties, torch.Size([2]), [])})
    with monkeypatch.context() as patch:
        state = (*TensorProperties.__getstate__(properties), "added", "later")[:fields]
        patch.setattr(TensorProperties, "__getstate__", lambda _: state)
        written = pickle.dumps(table)
    read = read_table(io.BytesIO(written), "table", trusted=trusted)
    found = read.state_dict_metadata["weight"].properties
    assert type(found) is TensorProperties
    assert found.dtype is torch.float64
    again = pickle.loads(pickle.dumps(found))
    assert again.dtype is torch.float64
