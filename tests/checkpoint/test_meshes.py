"""What is written on any mesh is read on any other, to the bit, and is what one process would have written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from lightning_mfsdp.checkpoint import convert_checkpoint, export_checkpoint, load_checkpoint
from lightning_mfsdp.checkpoint.tools.leaves import StoredCheckpoint
from lightning_mfsdp.checkpoint.tools.verify import cover_problems, verify
from lightning_mfsdp.fabric import checkpoints
from lightning_mfsdp.tensor_parallel import Part
from tests.checkpoint.internals import DcpShard, Ranks, Staging, consolidate_checkpoint, full_model_state, locate
from tests.checkpoint.meshes import LAYOUTS, WHOLE, Sharded, filled_in_one_process, pattern
from tests.engine.internals import Piece
from tests.engine.test_piece import cut_rows, divided
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT

FORMS = ("sharded", "full", "safetensors")

Problems = dict[str, list[str]]
Weights = dict[str, dict[str, Tensor]]


def made(world: int) -> dict[str, Sharded]:
    """The model on every mesh of a size, with right values."""
    models = {name: Sharded(layout) for name, layout in LAYOUTS.items() if layout.ranks == world}
    for sharded in models.values():
        sharded.fill()
    return models


def write(rank: int, world: int, folder: str) -> None:
    for name, sharded in made(world).items():
        sharded.write(Path(folder, name), whole=name in WHOLE)


def write_and_read(rank: int, world: int, folder: str) -> tuple[Problems, Weights]:
    models = made(world)
    for name, sharded in models.items():
        sharded.write(Path(folder, name), whole=name in WHOLE)
    return read_into(models, Path(folder))


def read(rank: int, world: int, folder: str) -> tuple[Problems, Weights]:
    return read_into(made(world), Path(folder))


def sources_of(name: str) -> list[str]:
    """Meshes that a mesh reads directories of: one rank, and another one, which differs for each; at night all."""
    names = list(LAYOUTS)
    if NIGHT:
        return names
    places = {0, (names.index(name) + 1) % len(names)}
    return [name for place, name in enumerate(names) if place in places]


def wholes_of(name: str) -> list[str]:
    """The same for the other forms, which are equal to the bit whichever mesh wrote them; on a push another one's, for some."""
    return list(WHOLE) if NIGHT else [other for other in WHOLE if name in WHOLE and other != name]


def read_into(models: dict[str, Sharded], folder: Path) -> tuple[Problems, Weights]:
    """What is wrong, by what was read where; and for each mesh the weights after one more step."""
    problems, weights = {}, {}
    for name, sharded in models.items():
        sharded.clear()
        assert set(sharded.problems()) >= {label for label, memory, _ in sharded.tensors() if memory.numel()}
        for form in FORMS:
            for source in sources_of(name) if form == "sharded" else wholes_of(name):
                problems[f"{form} of {source} -> {name}"] = sharded.read(folder / source / form)
        sharded.read(folder / "one rank" / "sharded")
        weights[name] = sharded.next_step()
    return problems, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[tuple[Problems, Weights]]:
    """Of every rank of four, and of one."""
    run_distributed(write, 1, str(folder))
    return [*run_distributed(write_and_read, 4, str(folder)), *run_distributed(read, 1, str(folder))]


def test_every_mesh_reads_what_every_mesh_wrote(results: list[tuple[Problems, Weights]]) -> None:
    pairs = {
        tuple(case.removeprefix("sharded of ").split(" -> "))
        for problems, _ in results
        for case in problems
        if case.startswith("sharded")
    }
    assert pairs == {(source, name) for name in LAYOUTS for source in sources_of(name)}
    assert {source for source, _ in pairs} == {name for _, name in pairs} == LAYOUTS.keys()
    for place, (problems, _) in enumerate(results):
        wrong = {case: labels for case, labels in problems.items() if labels}
        assert not wrong, f"result {place}: {wrong}"


def test_every_mesh_goes_on_as_one_process(results: list[tuple[Problems, Weights]]) -> None:
    model, optimizer = filled_in_one_process()
    optimizer.step()
    found = {**results[0][1], **results[-1][1]}
    assert found.keys() == LAYOUTS.keys()
    for name, weights in found.items():
        assert weights.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, msg=lambda text, where=(name, key): f"{where}: {text}")


# -- what is on the disk -----------------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Nested dictionaries and lists are equal, tensors to the bit."""
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}.{number}")
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("results")
def test_everything_is_written_once(folder: Path, name: str) -> None:
    path = folder / name / "sharded"
    assert verify(path).problems == []
    places = (StoredCheckpoint(path).metadata.storage_data or {}).values()
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) == sum(place.length for place in places)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.usefixtures("results")
def test_files_are_those_of_one_process(folder: Path, name: str, tmp_path: Path) -> None:
    model, optimizer = filled_in_one_process()
    plain = {"state_dict": dict(model.state_dict()), "optimizer_states": [optimizer.state_dict()]}
    full, alone = (torch.load(folder / one / "full", weights_only=True) for one in (name, "one rank"))
    assert_same(full, alone)
    assert_same({key: full[key] for key in plain}, plain)
    assert full["state_dict"]["head.weight"] is full["state_dict"]["tokens.weight"]
    averages, gradients = (full["parameter_states"][key] for key in ("average", "gradients"))
    for label, values in (("average", averages), ("gradient", gradients)):
        for key, value in values.items():
            wanted = pattern(f"{label} {key}", value.shape)
            assert torch.equal(value, wanted), (label, key)
    assert averages.keys() - gradients.keys() == {"others.ignored"}
    directory = load_checkpoint(folder / name / "sharded")
    assert_same({key: directory[key] for key in plain}, plain)
    exported, alone = (folder / one / "safetensors/model.safetensors" for one in (name, "one rank"))
    assert exported.read_bytes() == alone.read_bytes()
    (file,) = export_checkpoint(folder / name / "sharded", tmp_path / "exported")
    assert_same(load_file(file), load_file(alone))


@pytest.mark.usefixtures("results")
def test_directories_become_files_and_other_directories(folder: Path, tmp_path: Path) -> None:
    path = folder / "data 2 x tensor 2, experts 2/sharded"
    expected = load_checkpoint(path)
    consolidate_checkpoint(path, tmp_path / "one.ckpt")
    assert_same(load_checkpoint(tmp_path / "one.ckpt")["state_dict"], expected["state_dict"])
    convert_checkpoint(path, tmp_path / "other")
    assert verify(tmp_path / "other").problems == []
    for key in ("state_dict", "optimizer_states"):
        assert_same(load_checkpoint(tmp_path / "other")[key], expected[key])


# -- other ways to write and read --------------------------------------------------------------------------------------


def other_ways(rank: int, world: int, folder: str) -> None:
    """Those of Fabric, torch.distributed.checkpoint with sharded tensors as they are, and an average in place of the weights."""
    sharded = Sharded(LAYOUTS["data 2 x tensor 2, experts 2"])
    state = {"model": sharded.model, "optimizer": sharded.optimizer}
    for whole in (False, True):
        sharded.fill()
        location = locate(Path(folder, f"fabric {whole}"))
        checkpoints.save(location, state, {}, whole=whole, ranks=Ranks())
        sharded.clear()
        checkpoints.load(location, dict(state), strict=True, weights_only=True)
        assert [label for label in sharded.problems("weights and optimizer") if "average" not in label] == []
    sharded.fill()
    tensors = {name: value for name, value in sharded.model.state_dict().items() if isinstance(value, DTensor)}
    dcp_save(tensors, checkpoint_id=Path(folder, "plain"))
    sharded.clear()
    dcp_load(tensors, checkpoint_id=Path(folder, "plain"))
    assert [label for label in sharded.problems("weights") if label in tensors] == []
    sharded.fill()
    averaged = full_model_state(sharded.average.in_place_of(sharded.model.state_dict()), keep=True)
    names = [view.name for view in sharded.views if view.requires_grad]
    assert all(torch.equal(averaged[name], pattern(f"average {name}", averaged[name].shape)) for name in names)


def test_other_ways(tmp_path: Path) -> None:
    run_distributed(other_ways, 4, str(tmp_path))


# -- chunks ------------------------------------------------------------------------------------------------------------


def pieces_of(case: tuple[torch.Size, list[tuple[Part, ...]], int]) -> Iterator[Piece]:
    """Of every rank."""
    shape, every, sharers = case
    for parts in every:
        length = Piece(shape=shape, rows=range(0), parts=parts).part_shape[0]
        for rows in cut_rows(length, sharers):
            yield Piece(shape=shape, rows=rows, parts=parts)


def place_of(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


@settings(max_examples=200, deadline=None)
@given(divided())
def test_chunks_of_all_ranks_are_the_tensor_once(case: tuple[torch.Size, list[tuple[Part, ...]], int]) -> None:
    whole = torch.arange(case[0].numel(), device="cpu").reshape(case[0])
    written, chunks = torch.full_like(whole, -1), []
    for piece in pieces_of(case):
        shard = DcpShard.of(piece.of(whole), piece)
        assert shard.size() == whole.shape
        found = shard.__create_chunk_list__()
        items = shard.__create_write_items__("name", shard)
        assert [item.tensor_data.chunk for item in items] == found
        staged = Staging().copy(shard)
        assert isinstance(staged, DcpShard)
        for chunk in found:
            for one in (shard, staged):
                values = one.__get_tensor_shard__(MetadataIndex("name", chunk.offsets))
                assert torch.equal(values, whole[place_of(chunk)])
            written[place_of(chunk)] = values
        chunks += [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found]
    assert cover_problems(tuple(whole.shape), chunks) == []
    for piece in pieces_of(case):
        shard = DcpShard.of(torch.full((len(piece.rows), *piece.part_shape[1:]), -1, device="cpu"), piece)
        for chunk in shard.__create_chunk_list__():
            shard.__get_tensor_shard__(MetadataIndex("name", chunk.offsets)).copy_(written[place_of(chunk)])
        if piece.boxes:
            assert torch.equal(shard.local, piece.of(whole))


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 0)])
def test_a_tensor_without_rows_is_one_chunk(shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape, device="cpu")
    shard = DcpShard.of(value, Piece(shape=value.shape, rows=range(value.numel())))
    (item,) = shard.__create_write_items__("name", shard)
    assert (item.index.offset, item.tensor_data.chunk.sizes) == (torch.Size([0] * len(shape)), value.shape)
    assert shard.__get_tensor_shard__(item.index).shape == value.shape
    assert len(shard.__create_chunk_list__()) == value.numel()
