"""A model with awkward shapes, and safetensors folders for it, shared by the tests in this folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import fully_shard, sharded_parameters
from tests.helpers.models import Decoder


class Awkward(Decoder):
    """Tied weights, no dims, one row, rows that no number of ranks divides, buffers of two dtypes."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied=tied)
        self.tiny = nn.Parameter(torch.randn(1, 12))
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("flags", torch.tensor([True, False, True]))


def plain_state(seed: int = 0, tied: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Awkward(tied).state_dict().items()}


def once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the second name of the tied weight, as it is in files."""
    return {name: value for name, value in state.items() if name != "head.weight"}


def sharded_model(seed: int, tied: bool = True, **options: object) -> Awkward:
    torch.manual_seed(seed)
    model = Awkward(tied)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Main weights and buffers, whole. Collective."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def rows_of(model: nn.Module) -> dict[str, Tensor]:
    """All that loading may write on this rank."""
    state = {view.name: view.main.clone() for view in sharded_parameters(model)}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) and one[name].dtype is value.dtype for name, value in other.items()
    )


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """The same new folder on all ranks."""
    found = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(found)
    try:
        yield Path(found[0])
    finally:
        dist.barrier()


def write_folder(folder: Path, *shares: Mapping[str, Tensor]) -> Path:
    """Files by the safetensors package; an index if there are several."""
    folder.mkdir(parents=True)
    names = [f"model-{n:05}-of-{len(shares):05}.safetensors" for n in range(1, len(shares) + 1)]
    if len(shares) == 1:
        names = ["model.safetensors"]
    for name, share in zip(names, shares, strict=True):
        save_file({key: value.contiguous() for key, value in share.items()}, folder / name, {"format": "pt"})
    if len(shares) > 1:
        places = {key: name for name, share in zip(names, shares, strict=True) for key in share}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def halves(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    items = list(state.items())
    return dict(items[::2]), dict(items[1::2])
