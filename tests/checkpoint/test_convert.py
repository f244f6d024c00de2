"""Checkpoints of Lightning's other strategies, of FSDP2 loops and of megatron-fsdp: loaded as they are or converted, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch.distributed.checkpoint import save

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import convert_checkpoint
from lightning_mfsdp.checkpoint.tools.leaves import CheckpointError, StoredTensor
from lightning_mfsdp.checkpoint.tools.parts import names_of_numbers, read_parts
from tests.checkpoint.foreign import STEPS, Trained, joined, write_foreign, write_fsdp1_file
from tests.checkpoint.internals import full_optimizer_state
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import assert_same

# What is converted, with what options, and whose whole state it holds.
CONVERTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "from_model_parallel": ("model_parallel.ckpt", {}, "lightning"),
    "from_fsdp1": ("fsdp1.ckpt", {"source": "fsdp1"}, "fsdp1"),
    "from_fsdp1_mesh": ("fsdp1_mesh.ckpt", {}, "fsdp1"),
    "from_named": ("named", {"source": "fsdp2"}, "fsdp2"),
    "from_flat": ("flat", {}, "fsdp2"),
    "from_numbered": ("numbered", {}, "fsdp2"),
    "from_two_groups": ("two_groups", {}, "fsdp2"),
    "from_megatron": ("megatron", {}, "fsdp2"),
    "from_bare": ("bare", {}, "fsdp2"),
    "from_inner": ("inner", {"strip_prefix": "inner."}, "fsdp2"),
    "from_unclear": ("unclear", {"model_key": "teacher"}, "fsdp2"),
    "from_file": ("file.ckpt", {"source": "full"}, "fsdp2"),
}
WEIGHTS_ONLY = ("from_bare", "from_inner", "from_unclear")
DIRECT = {
    "model_parallel.ckpt": "lightning",
    "model_parallel_file.ckpt": "lightning",
    "fsdp1.ckpt": "fsdp1",
    "fsdp1_mesh.ckpt": "fsdp1",
    "fsdp1_file.ckpt": "fsdp1_file",
}
LOADED = (*DIRECT, "from_model_parallel", "from_named", "from_two_groups", "from_bare")
LIGHTNINGS = (*DIRECT, "from_model_parallel", "from_fsdp1", "from_fsdp1_mesh")


def optimizer_names() -> list[str]:
    return [name for name, parameter in seeded(Trained).named_parameters() if parameter.requires_grad]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder, and the whole states that its checkpoints hold."""
    folder = tmp_path_factory.mktemp("foreign")
    ranks = run_distributed(write_foreign, 2, str(folder))
    states = {**ranks[0], "fsdp1": joined([rank["fsdp1"] for rank in ranks])}
    states["fsdp1_file"] = run_distributed(write_fsdp1_file, 1, str(folder))[0]
    numbers = {name: number for number, name in enumerate(optimizer_names())}
    optimizer = states["fsdp2"]["optimizer"]
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    state = {numbers[name]: own for name, own in optimizer["state"].items()}
    plain = {"model": states["fsdp2"]["weights"], "optimizer": {"state": state, "param_groups": groups}}
    torch.save(plain, folder / "file.ckpt")
    return folder, states


@pytest.fixture(scope="module")
def converted(written: Any) -> dict[str, Any]:
    folder = written[0]
    options = {name: dict(given) for name, (_, given, _) in CONVERTED.items()}
    options["from_two_groups"]["parameters"] = optimizer_names()
    return {
        name: convert_checkpoint(folder / source, folder / name, **options[name])
        for name, (source, _, _) in CONVERTED.items()
    }


def load_all(rank: int, world_size: int, folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Through `ckpt_path`, without a step."""
    strict_warnings()
    found = {}
    data = loader(4, 4 * world_size, rank, world_size)
    for name in names:
        model = seeded(Trained, groups=2 if name == "from_two_groups" else 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        trainer = make_trainer(
            folder, world_size, max_steps=STEPS, strategy=MFSDPStrategy(units=["Block"]), limit_train_batches=0
        )
        if name in WEIGHTS_ONLY and rank == 0:
            with pytest.warns(UserWarning, match="holds no state for 1 of 1 optimizers"):
                trainer.fit(model, data, ckpt_path=f"{folder}/{name}")
        else:
            trainer.fit(model, data, ckpt_path=f"{folder}/{name}")
        optimizer = full_optimizer_state(trainer.optimizers[0], keep=rank == 0)
        found[name] = {"weights": full_state(model), "optimizer": optimizer, "global_step": trainer.global_step}
    return found


@pytest.fixture(scope="module")
def loaded(written: Any, converted: Any) -> dict[str, Any]:
    return run_distributed(load_all, 2, str(written[0]), LOADED)[0]  # type: ignore[no-any-return]


def expected_of(name: str, states: dict[str, Any]) -> dict[str, Any]:
    return states[DIRECT[name] if name in DIRECT else CONVERTED[name][2]]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOADED)
def test_a_trainer_resumes_with_the_weights_state_and_counts_that_were_saved(
    written: Any, loaded: dict[str, Any], name: str
) -> None:
    assert_resumed(loaded[name], expected_of(name, written[1]), name)


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_checkpoints_of_fsdpstrategy_and_modelparallelstrategy_load_on_another_number_of_ranks(
    written: Any, world: int
) -> None:
    found = run_distributed(load_all, world, str(written[0]), tuple(DIRECT))[0]
    for name in DIRECT:
        assert_resumed(found[name], expected_of(name, written[1]), name)


def assert_resumed(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    for key, tensor in found["weights"].items():
        assert torch.equal(tensor, expected["weights"][key]), key
    assert found["global_step"] == (STEPS if name in LIGHTNINGS else 0)
    if name in WEIGHTS_ONLY:
        assert not found["optimizer"]["state"]
        return
    for number, key in enumerate(optimizer_names()):
        assert_same(found["optimizer"]["state"][number], dict(expected["optimizer"]["state"][key]), key)
    groups = found["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == ([3, 10] if name == "from_two_groups" else [13])
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.05, 0.1)}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_directory_holds_what_was_saved_and_nothing_else(written: Any, converted: Any, name: str) -> None:
    """Read by PyTorch's own loader, as Lightning uses it."""
    expected = expected_of(name, written[1])
    found = _load_distributed_checkpoint(written[0] / name)
    assert found["model"].keys() == seeded(Trained).state_dict().keys()
    for key, tensor in expected["weights"].items():
        assert torch.equal(found["model"][key], tensor), key
    assert found["model"]["shift"].tolist() == [0.25] * 12
    if name in WEIGHTS_ONLY:
        assert "optimizer_0" not in found
        return
    assert found["optimizer_0"]["state"].keys() == set(optimizer_names())
    for key, state in found["optimizer_0"]["state"].items():
        assert_same(state, dict(expected["optimizer"]["state"][key]), key)
    groups = found["optimizer_0"]["param_groups"]
    assert sorted(key for group in groups for key in group["params"]) == sorted(optimizer_names())
    assert {(group["lr"], group["weight_decay"], group["betas"]) for group in groups} == {(0.05, 0.1, (0.9, 0.999))}


def test_the_training_that_wrote_them_was_not_idle(written: Any) -> None:
    """Else equality above would say little."""
    fresh = dict(seeded(Trained).named_parameters())
    for states in written[1].values():
        assert not torch.equal(states["weights"]["head.bias"], fresh["head.bias"])
        assert states["optimizer"]["state"]["head.bias"]["step"] == STEPS


def test_what_is_left_out_or_guessed_is_told(converted: Any) -> None:
    assert converted["from_named"].left_out == ["step", "ema.scale"]
    assert converted["from_numbered"].notes == [
        "optimizer: its 13 parameters go by number; they were taken in the order of the model, which their shapes follow"
    ]
    assert converted["from_two_groups"].notes == ["optimizer: names given for its 13 parameters"]
    assert converted["from_model_parallel"].rest["global_step"] == STEPS
    assert not converted["from_bare"].rest


def test_tensors_are_read_one_chunk_at_a_time(written: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Progress counts each chunk right after it was read, so no second one was asked for in between."""
    events: list[str] = []
    read = StoredTensor.read

    def noticed(self: StoredTensor, offsets: torch.Size) -> Any:
        events.append("read")
        return read(self, offsets)

    monkeypatch.setattr(StoredTensor, "read", noticed)
    sizes: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        events.append("done")
        sizes.append((done, total))

    convert_checkpoint(written[0] / "named", tmp_path / "out", progress=progress)
    assert events == ["read", "done"] * (len(events) // 2)
    weights, state = written[1]["fsdp2"]["weights"], written[1]["fsdp2"]["optimizer"]["state"]
    total = sum(
        tensor.nbytes for tensor in (*weights.values(), *(part for own in state.values() for part in own.values()))
    )
    assert sizes[-1] == (total, total)


class InterruptedWriteError(Exception):
    """Raised in the middle."""


def test_an_interrupted_conversion_leaves_nothing_behind(written: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedWriteError

    with pytest.raises(CheckpointError, match=r"out was not written \(InterruptedWriteError\)"):
        convert_checkpoint(written[0] / "named", tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


# -- what cannot be mapped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("two_groups", {}, "its 2 groups come in an order of their own"),
        ("two_groups", {"parameters": ["scale"]}, "1 parameter names were given, expected 13"),
        ("two_groups", {"parameters": ["nothing"] * 13}, "nothing is not in the model"),
        ("unclear", {}, "tensors outside of optimizers lie under 'student', 'teacher'"),
        ("named", {"strip_prefix": "model."}, "do not begin with 'model.'"),
        ("named", {"source": "megatron-fsdp"}, "do not begin with 'module.'"),
        ("named", {"source": "full"}, "is a directory, and checkpoints of full are a file"),
        ("file.ckpt", {"source": "fsdp2"}, "is a file, and checkpoints of fsdp2 are a directory"),
        ("named", {"source": "horovod"}, "expected one of auto, fsdp1"),
        ("named", {"source": "deepspeed"}, "was written by another program, not by deepspeed"),
        ("", {}, "is a directory without .metadata"),
    ],
)
def test_what_cannot_be_mapped_is_refused(written: Any, source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as info:
        read_parts(written[0] / source, **options)
    assert message in str(info.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_chosen_part_of_a_directory_is_the_model_whatever_lies_beside_it(tmp_path: Path) -> None:
    own, average = {"weight": torch.zeros(2, 3)}, {"weight": torch.ones(2, 3)}
    save(
        {"model": own, "ema": average, "other": {"weight": torch.ones(4)}},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    torch.save({"pytorch-lightning_version": "2.6.0", "epoch": 1}, tmp_path / "saved/meta.pt")
    parts = convert_checkpoint(tmp_path / "saved", tmp_path / "average", model_key="ema")
    assert (list(parts.states), sorted(parts.left_out)) == ([], ["model.weight", "other.weight"])
    assert torch.equal(_load_distributed_checkpoint(tmp_path / "average")["model"]["weight"], average["weight"])
    parts = convert_checkpoint(tmp_path / "saved", tmp_path / "both")
    assert (list(parts.states), parts.left_out) == (["ema"], ["other.weight"])
    found = _load_distributed_checkpoint(tmp_path / "both")
    assert torch.equal(found["model"]["weight"], own["weight"])
    assert torch.equal(found["ema"]["weight"], average["weight"])


def test_an_optimizer_of_another_model_and_nested_state_are_refused(tmp_path: Path) -> None:
    group = {"lr": 0.1, "params": ["weight"]}
    other = {"state": {"other": {"momentum": torch.ones(2)}}, "param_groups": [group]}
    torch.save({"model": {"weight": torch.ones(2)}, "optimizer": other}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="optimizer holds state of other"):
        read_parts(tmp_path / "other")
    nested = {"state": {"weight": {"factors": {"left": torch.ones(2)}}}, "param_groups": [group]}
    torch.save({"model": {"weight": torch.ones(2)}, "optimizer": nested}, tmp_path / "nested")
    with pytest.raises(CheckpointError, match=r"optimizer.state.weight.factors.left lies too deep"):
        read_parts(tmp_path / "nested")


def names(shapes: list[tuple[int, ...]], model: dict[str, tuple[int, ...]], **group: Any) -> list[str]:
    state = {
        str(number): {"exp_avg": torch.zeros(shape), "step": torch.zeros(())} for number, shape in enumerate(shapes)
    }
    groups = [{"params": list(range(len(shapes))), **group}]
    tensors = {name: torch.zeros(shape) for name, shape in model.items()}
    return list(names_of_numbers(Path("here"), "optimizer", state, groups, tensors, None)[0].values())


def test_numbers_become_names_only_where_shapes_leave_one_way() -> None:
    model = {"weight": (4, 3), "bias": (4,), "mean": (4,), "head": (2, 4)}
    assert names([(4, 3), (2, 4)], model) == ["weight", "head"]
    assert names([(4, 3), (4,), (4,), (2, 4)], model) == ["weight", "bias", "mean", "head"]
    with pytest.raises(CheckpointError, match="fit the model in more than one way"):
        names([(4, 3), (4,), (2, 4)], model)
    with pytest.raises(CheckpointError, match="do not follow the order of the model"):
        names([(2, 4), (4, 3)], model)
    assert names([(4, 3), (4,), (2, 4)], model, param_names=["weight", "mean", "head"]) == ["weight", "mean", "head"]


def test_tied_weights_of_a_file_count_once_among_numbers() -> None:
    weight = torch.ones(4, 3)
    model = {"first": weight, "tied": weight}
    state = {"0": {"exp_avg": torch.zeros(4, 3)}}
    found, _ = names_of_numbers(Path("here"), "optimizer", state, [{"params": [0]}], model, None)
    assert found == {0: "first"}
