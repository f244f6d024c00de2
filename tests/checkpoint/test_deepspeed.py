"""Directories of DeepSpeed's ZeRO 1 to 3, which DeepSpeed 0.19.8 wrote on three ranks: read without it, to the bit, and trained on."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

import lightning_mfsdp
from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import convert_checkpoint, load_checkpoint
from lightning_mfsdp.checkpoint.tools import deepspeed, deepspeed_files
from lightning_mfsdp.checkpoint.tools.leaves import CheckpointError
from lightning_mfsdp.checkpoint.tools.parts import read_parts, value_of
from lightning_mfsdp.commands import main
from tests.checkpoint.internals import full_optimizer_state
from tests.checkpoint.written_by_deepspeed import ARCHIVE, CASES, RANKS, STEPS, Net, make_loader, make_net
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]
MOMENTS = ("exp_avg", "exp_avg_sq")
TRAINED = [name for name, parameter in make_net().named_parameters() if parameter.requires_grad]
MORE = 2


@pytest.fixture(scope="module", autouse=True)
def without_deepspeed() -> Any:
    """Imports of it fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", None)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed wrote, a folder for each stage, and converted beside it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for case in CASES:
        convert_checkpoint(folder / case, folder / f"{case}.ckpt")
    return folder


def state_of(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights, and the optimizer's state by parameter."""
    parts = read_parts(path)
    state = {
        name: {key: value_of(leaf) for key, leaf in own.items()} for name, own in parts.optimizers[0].state.items()
    }
    return {name: value_of(leaf) for name, leaf in parts.model.items()}, state


# -- what is in them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_main_weights_and_moments_are_those_that_deepspeeds_own_converter_takes_out(written: Path, case: str) -> None:
    """It stores them flat, all in float32, and the second name of a tied weight in the precision of the forward."""
    expected = torch.load(written / case / "expected.pt")
    weights, state = state_of(written / case)
    for name, values in expected.items():
        if name == "outputs.weight":
            continue
        assert torch.equal(weights[name].float().flatten(), values["fp32"].float().flatten()), name
        for key in MOMENTS if name in TRAINED else ():
            assert torch.equal(state[name][key].flatten(), values[key].flatten()), (name, key)
    assert set(expected) >= set(TRAINED)
    assert state.keys() == set(TRAINED)


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_dtypes_and_ties_are_those_of_the_module(written: Path, case: str) -> None:
    weights, state = state_of(written / case)
    net = make_net().state_dict()
    assert list(weights) == list(net)
    for name, value in net.items():
        assert weights[name].shape == value.shape
        assert weights[name].dtype == (torch.bfloat16 if "frozen" in name and case != "zero2" else value.dtype), name
    assert torch.equal(weights["outputs.weight"], weights["inputs.weight"])
    assert read_parts(written / case).tied == {"outputs.weight": "inputs.weight"}
    assert {float(own["step"]) for own in state.values()} == {STEPS}
    assert weights["count"] == STEPS


def test_plain_training_on_all_batches_comes_to_the_same(written: Path) -> None:
    """In float32, with parameters that DeepSpeed has dealt out to the ranks."""
    net = make_net()
    [optimizer], [schedule] = net.configure_optimizers()
    data = make_loader().dataset
    samples = [list(DistributedSampler(data, RANKS, rank)) for rank in range(RANKS)]  # type: ignore[arg-type]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            [batch] = data[samples[rank][4 * step : 4 * (step + 1)]]
            (net.training_step([batch]) / RANKS).backward()
        optimizer.step()
        schedule["scheduler"].step()
    weights, state = state_of(written / "zero2")
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)
        for key in MOMENTS if name in TRAINED else ():
            expected = optimizer.state[parameter][key]
            torch.testing.assert_close(state[name][key], expected, rtol=1e-4, atol=1e-7, msg=f"{name} {key}")


@pytest.mark.parametrize("case", CASES)
def test_groups_have_the_order_and_options_that_the_program_gave_them(written: Path, case: str) -> None:
    optimizer = read_parts(written / case).optimizers[0]
    own = make_net()
    names = {parameter: name for name, parameter in own.named_parameters()}
    [expected], _ = own.configure_optimizers()
    for group, wanted in zip(optimizer.groups, expected.param_groups, strict=True):
        assert group["params"] == [names[parameter] for parameter in wanted["params"]]
        assert group["weight_decay"] == wanted["weight_decay"]
        assert group["lr"] == pytest.approx(1e-3)  # after two steps of the schedule
    assert torch.load(written / "zero2/checkpoint/mp_rank_00_model_states.pt")["ds_config"]["zero_optimization"][
        "round_robin_gradients"
    ]


# -- trained on --------------------------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, folder: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Every case through `ckpt_path`, with so many more steps."""
    strict_warnings()
    found = {}
    for case in CASES:
        net = make_net()
        limit: dict[str, Any] = {} if steps else {"limit_train_batches": 0}
        trainer = make_trainer(
            folder, world_size, strategy=MFSDPStrategy(**options), max_epochs=-1, max_steps=STEPS + steps, **limit
        )
        trainer.fit(net, make_loader(STEPS * world_size), ckpt_path=f"{folder}/{case}.ckpt")
        found[case] = {
            "weights": full_state(net),
            "optimizer": full_optimizer_state(trainer.optimizers[0], keep=True),
            "steps": trainer.global_step,
            "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        }
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {}), (2, {}), pytest.param(4, {"outer": 2, "sharding": "optim"}, marks=pytest.mark.nightly)],
)
def test_a_trainer_resumes_on_any_number_of_ranks(written: Path, world: int, options: dict[str, Any]) -> None:
    numbers = {name: number for number, name in enumerate(order_of_the_optimizer())}
    for found in run_distributed(resume, world, str(written), 0, options):
        for case in CASES:
            weights, state = state_of(written / case)
            for name, value in found[case]["weights"].items():
                assert torch.equal(value, weights[name].to(value.dtype)), (case, name)
            for name, number in numbers.items():
                for key in (*MOMENTS, "step"):
                    assert torch.equal(found[case]["optimizer"]["state"][number][key], state[name][key]), (case, name)
            assert (found[case]["steps"], found[case]["schedule"]) == (STEPS, STEPS)


def order_of_the_optimizer() -> list[str]:
    net = make_net()
    names = {parameter: name for name, parameter in net.named_parameters()}
    return [
        names[parameter] for group in net.configure_optimizers()[0][0].param_groups for parameter in group["params"]
    ]


def test_it_goes_on_as_a_single_device_does_with_the_consolidated_file(written: Path, tmp_path: Path) -> None:
    """Lightning itself reads the file: optimizer, schedule, loops and hyperparameters."""
    here = run_distributed(resume, 1, str(written), MORE, {})[0]
    for case in CASES:
        file = tmp_path / f"{case}.ckpt"
        assert main(["checkpoint", "consolidate", str(written / case), str(file)]) == 0
        net = make_net()
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=-1, max_steps=STEPS + MORE, **options)
        trainer.fit(net, make_loader(STEPS), ckpt_path=file)
        for name, value in net.named_parameters():
            assert torch.equal(here[case]["weights"][name], value), (case, name)
        assert Net.load_from_checkpoint(file).hparams["width"] == 5


@pytest.mark.parametrize("case", CASES)
def test_the_module_is_built_from_the_directory_with_its_hyperparameters(written: Path, case: str) -> None:
    for path in (written / case, written / case / "checkpoint", written / f"{case}.ckpt"):
        net = lightning_mfsdp.load_from_checkpoint(Net, path)
        assert net.hparams["width"] == 5
        assert net.outputs.weight is net.inputs.weight
        assert torch.equal(net.scale, state_of(written / case)[0]["scale"])


def test_the_command_tells_what_it_wrote(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.ckpt"
    assert main(["checkpoint", "convert", str(written / "zero3"), str(output), "--from", "deepspeed"]) == 0
    assert capsys.readouterr().out == f"wrote {output}: 13 model entries, state of 8 parameters in 1 optimizer\n"
    assert main(["checkpoint", "verify", str(output)]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "info", str(written / "zero3")]) == 0
    shown = capsys.readouterr().out
    assert "kind         DeepSpeed, ZeRO 3, 3 ranks\n" in shown
    assert "global step  3\n" in shown
    assert main(["checkpoint", "convert", str(written / "zero3"), str(tmp_path / "x"), "--from", "fsdp2"]) == 2
    assert "was written by DeepSpeed, not by fsdp2" in capsys.readouterr().err


def test_a_trainer_that_is_given_the_directory_itself_names_the_command(written: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, strategy=MFSDPStrategy(), max_steps=1)
    with pytest.raises(ValueError, match=r"DeepSpeed wrote this directory: .*lightning-mfsdp checkpoint convert"):
        trainer.fit(make_net(), make_loader(), ckpt_path=written / "zero2")


@pytest.mark.parametrize("command", ["verify", "export"])
def test_commands_that_need_a_directory_of_this_strategy_name_convert(
    written: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [str(tmp_path / "folder")] if command == "export" else []
    assert main(["checkpoint", command, str(written / "zero3"), *output]) == 2
    assert re.search("DeepSpeed.*checkpoint convert", capsys.readouterr().err)


def test_large_tensors_are_read_in_rows(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "_CHUNK_ELEMENTS", 10)
    for case in CASES:
        weight = read_parts(written / case).model["layers.0.weight"]
        assert [tuple(chunk.sizes) for chunk in weight.chunks] == [(2, 5), (2, 5), (2, 5), (1, 5)]
        convert_checkpoint(written / case, tmp_path / case)
        whole, cut = load_checkpoint(written / f"{case}.ckpt"), load_checkpoint(tmp_path / case)
        for name, value in whole["state_dict"].items():
            assert torch.equal(cut["state_dict"][name], value), (case, name)
        for own, wanted in zip(*(part["optimizer_states"][0]["state"].values() for part in (cut, whole)), strict=True):
            assert all(torch.equal(own[key], wanted[key]) for key in wanted)


# -- variants of the files ---------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], int], None]


def changed(source: Path, target: Path, kind: str, change: Change, ranks: range | None = None) -> Path:
    """A copy of a checkpoint with `change(content, rank)` in its files "*_<kind>_states.pt"."""
    shutil.copytree(source, target)
    for rank, file in enumerate(sorted((target / "checkpoint").glob(f"*_{kind}_states.pt"))):
        if ranks is None or rank in ranks:
            content = deepspeed_files.load_rank_file(file, trust=False)
            change(content, rank)
            for state in [content["optimizer_state_dict"]] if kind == "optim" else []:
                state.pop("loss_scaler", None)  # stand-ins, which cannot be saved
                state.pop("param_slice_mappings", None)
            torch.save(content, target / "new")  # the old one is mapped
            (target / "new").replace(file)
    return target


def assert_as(path: Path, source: Path) -> None:
    for found, expected in zip(state_of(path), state_of(source), strict=True):
        assert found.keys() == expected.keys()
    weights, state = state_of(path)
    for name, value in state_of(source)[0].items():
        assert torch.equal(weights[name], value), name
    for name, own in state_of(source)[1].items():
        assert all(torch.equal(state[name][key], value) for key, value in own.items()), name


def test_the_optimizer_of_bfloat16_which_saves_no_stage_and_all_zeros(written: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any], rank: int) -> None:
        state = content["optimizer_state_dict"]
        del state["zero_stage"]
        fill = state["group_paddings"]
        weights = zip(state["single_partition_of_fp32_groups"], fill, strict=True)
        state["single_partition_of_fp32_groups"] = [torch.cat([part, torch.zeros(more)]) for part, more in weights]

    assert_as(changed(written / "zero1", tmp_path / "changed", "optim", change), written / "zero1")


def test_zeros_behind_each_parameter_are_left_out(written: Path, tmp_path: Path) -> None:
    """`param_alignment_paddings` of newer versions: each parameter begins at a multiple of four elements."""
    files = sorted((written / "zero2/checkpoint").glob("*_optim_states.pt"))
    states = [deepspeed_files.load_rank_file(file, trust=False)["optimizer_state_dict"] for file in files]
    model = deepspeed_files.load_rank_file(written / "zero2/checkpoint/mp_rank_00_model_states.pt", trust=False)
    lengths = [[shape.numel() for shape in shapes.values()] for shapes in model["param_shapes"]]
    gaps = [[-length % 4 for length in own[:-1]] + [0] for own in lengths]

    def spread(parts: list[Tensor], number: int) -> tuple[Tensor, ...]:
        whole = torch.cat(parts)[: sum(lengths[number])].split(lengths[number])
        spaced = torch.cat([torch.cat([own, torch.zeros(gap)]) for own, gap in zip(whole, gaps[number], strict=True)])
        return torch.cat([spaced, torch.zeros(-len(spaced) % (2 * RANKS))]).chunk(RANKS)

    def change(content: dict[str, Any], rank: int) -> None:
        state = content["optimizer_state_dict"]
        state["param_alignment_paddings"] = gaps
        for number in range(len(lengths)):
            weights = [own["single_partition_of_fp32_groups"][number] for own in states]
            state["single_partition_of_fp32_groups"][number] = spread(weights, number)[rank]
            for key in MOMENTS:
                moments = [own["base_optimizer_state"]["state"][number][key] for own in states]
                state["base_optimizer_state"]["state"][number][key] = spread(moments, number)[rank]

    assert_as(changed(written / "zero2", tmp_path / "changed", "optim", change), written / "zero2")


def test_steps_may_be_counted_in_groups_and_as_plain_numbers(written: Path, tmp_path: Path) -> None:
    def in_groups(content: dict[str, Any], rank: int) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for own in base["state"].values():
            del own["step"]
        for group in base["param_groups"]:
            group["step"] = STEPS

    def as_numbers(content: dict[str, Any], rank: int) -> None:
        for own in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            own["step"] = STEPS

    assert_as(changed(written / "zero1", tmp_path / "groups", "optim", in_groups), written / "zero1")
    assert "step" not in read_parts(tmp_path / "groups").optimizers[0].groups[0]
    assert_as(changed(written / "zero3", tmp_path / "numbers", "optim", as_numbers), written / "zero3")


def test_names_of_lightnings_earlier_wrapper_are_those_of_the_module(written: Path, tmp_path: Path) -> None:
    def wrapped(names: dict[str, Any]) -> dict[str, Any]:
        return {f"_forward_module.{name}": value for name, value in names.items()}

    def change(content: dict[str, Any], rank: int) -> None:
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            content[key] = wrapped(content[key])
        content["shared_params"] = {
            f"_forward_module.{name}": f"_forward_module.{first}" for name, first in content["shared_params"].items()
        }
        content["buffer_names"] = list(wrapped(dict.fromkeys(content["buffer_names"])))
        content["param_shapes"] = [wrapped(shapes) for shapes in content["param_shapes"]]

    assert_as(changed(written / "zero3", tmp_path / "changed", "model", change), written / "zero3")


def test_a_loop_without_lightning_has_its_weights_and_moments_converted(written: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any], rank: int) -> None:
        for key in set(content) - deepspeed._OWN_KEYS:
            del content[key]
        content["my_epoch"] = 7

    parts = convert_checkpoint(
        changed(written / "zero2", tmp_path / "changed", "model", change), tmp_path / "out", add_prefix="model."
    )
    assert parts.left_out == ["my_epoch"]
    assert all(name.startswith("model.") for name in (*parts.model, *parts.optimizers[0].state))
    assert load_checkpoint(tmp_path / "out")["global_step"] == 0


def test_classes_of_the_program_are_refused_unless_trusted(written: Path, tmp_path: Path) -> None:
    def change(content: dict[str, Any], rank: int) -> None:
        content["hyper_parameters"]["more"] = SimpleNamespace(width=5)

    path = changed(written / "zero1", tmp_path / "changed", "model", change)
    with pytest.raises(CheckpointError, match=r"hyper_parameters.*SimpleNamespace, which is not loaded by default"):
        read_parts(path)
    assert read_parts(path, trust=True).rest["hyper_parameters"]["more"].width == 5


# -- what is refused ---------------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def add(name: str, like: str = "") -> Callable[[Path], None]:
    return lambda folder: shutil.copy(folder / like, folder / name) if like else (folder / name).write_bytes(b"")


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:2000]) and None


def set_in(kind: str, ranks: range, change: Change) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        source = folder.parent.rename(folder.parent.with_name("source"))
        changed(source, folder.parent, kind, change, ranks)

    return apply


def put(*keys: Any, value: Any) -> Change:
    def change(content: dict[str, Any], rank: int) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


OPTIM, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
EVERY, SECOND = range(RANKS), range(1, 2)
REFUSED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no files of one rank": ("zero2", drop(OPTIM), r"partition_count of its files is 3, .*missing: 1;"),
    "no model of one rank": ("zero3", drop(f"zero_pp_rank_2_{MODEL}"), r"of each rank; missing: 2; not expected: none"),
    "no model": ("zero1", drop(MODEL), "ZeRO 1 writes mp_rank_00_model_states.pt; missing: None"),
    "ranks of an earlier save": (
        "zero2",
        add(OPTIM.replace("1", "3"), OPTIM),
        r"not expected: 3\. .*Remove files of other",
    ),
    "another stage's model": (
        "zero2",
        add(f"zero_pp_rank_0_{MODEL}", MODEL),
        "not expected: 0 .*Remove files of other",
    ),
    "two precisions": ("zero2", add(f"bf16_{OPTIM}", OPTIM), f"bf16_{OPTIM} and {OPTIM}, expected one of them"),
    "another stage": (
        "zero2",
        set_in("optim", SECOND, put("optimizer_state_dict", "zero_stage", value=1)),
        r"zero_stage \[1, 2\], expected one of",
    ),
    "an unknown stage": (
        "zero2",
        set_in("optim", EVERY, put("optimizer_state_dict", "zero_stage", value=4)),
        r"zero_stage \[4\], expected one of 1, 2, 3",
    ),
    "two versions": ("zero1", set_in("optim", SECOND, put("ds_version", value="0.9")), "ds_version 0.9, 0.19.8"),
    "two steps": ("zero3", set_in("model", SECOND, put("global_steps", value=2)), "global_steps 2, 3, expected one"),
    "two steps of the optimizer": (
        "zero3",
        set_in(
            "optim",
            SECOND,
            put("optimizer_state_dict", "optimizer_state_dict", "state", 0, "step", value=torch.tensor(9.0)),
        ),
        "ranks have 3.0, 3.0, 9.0 as step of the optimizer",
    ),
    "another model": (
        "zero2",
        set_in("model", EVERY, put("param_shapes", 0, "inputs.weight", value=torch.Size([9, 9]))),
        "elements of main weights of the 3 parameters from inputs.weight on, expected 151 and a filling together",
    ),
    "weights on NVMe": (
        "zero3",
        set_in("optim", SECOND, put("optimizer_state_dict", "fp32_flat_groups", 0, value=torch.zeros(0))),
        "or a part was kept on NVMe",
    ),
    "a name without values": (
        "zero3",
        set_in("model", EVERY, put("module", "other.weight", value=torch.zeros(0))),
        "the model has other.weight and it is unclear where the values are",
    ),
    "a frozen parameter in part": (
        "zero3",
        set_in("model", SECOND, put("frozen_param_fragments", value={})),
        r"2 of 3 files have .* elements of the frozen parameter frozen.weight",
    ),
    "tensor parallelism": (
        "zero2",
        add(OPTIM.replace("rank_00", "rank_01"), OPTIM),
        "of a model with tensor parallelism",
    ),
    "a degree": (
        "zero1",
        set_in("model", EVERY, put("mp_world_size", value=2)),
        r"\{'mp_world_size': 2\}, expected 1: parts of tensor parallelism",
    ),
    "pipeline stages": ("zero1", add("layer_00-model_00-model_states.pt"), "writes for pipeline stages"),
    "experts": ("zero1", add("expp_rank_0_mp_rank_00_optim_states.pt"), "its layers of experts"),
    "a strange name": ("zero1", add("new_model_states.pt"), "a name that no known version of DeepSpeed writes"),
    "an unknown version": (
        "zero2",
        set_in("model", EVERY, put("param_shapes", value=None)),
        "of DeepSpeed 0.19.8 has no param_shapes",
    ),
    "an unknown optimizer": (
        "zero2",
        set_in("optim", EVERY, put("optimizer_state_dict", "base_optimizer_state", value=[])),
        "optimizer's state dict is not under base_optimizer_state",
    ),
    "other vectors": (
        "zero2",
        set_in("optim", SECOND, put("optimizer_state_dict", "single_partition_of_fp32_groups", value=[])),
        "has 0 vectors under single_partition_of_fp32_groups, expected 2",
    ),
    "another program's file": (
        "zero2",
        lambda folder: torch.save({}, folder / OPTIM),
        "has no optimizer_state_dict with partition_count",
    ),
    "a list": ("zero2", lambda folder: torch.save([], folder / OPTIM), "expected a dictionary, as DeepSpeed saves it"),
    "another file": ("zero2", add(OPTIM), "is no checkpoint"),
    "a damaged file": ("zero2", cut(OPTIM), "is a damaged file of torch.save"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_mapped_is_refused(written: Path, tmp_path: Path, what: str) -> None:
    case, change, message = REFUSED[what]
    shutil.copytree(written / case, tmp_path / "saved")
    change(tmp_path / "saved/checkpoint")
    with pytest.raises(CheckpointError, match=message):
        read_parts(tmp_path / "saved")


def test_a_tag_that_is_not_there_and_a_training_without_zero_are_named(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "zero1", tmp_path / "saved")
    (tmp_path / "saved/latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="names the tag 'global_step9', and there is no such folder"):
        read_parts(tmp_path / "saved")
    (tmp_path / "saved/latest").write_text("../saved/checkpoint")
    with pytest.raises(CheckpointError, match="there is no such folder beside it"):
        read_parts(tmp_path / "saved")
    for file in (tmp_path / "saved/checkpoint").glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no \*_optim_states.pt, .*If ZeRO was off, convert .*mp_rank_00_model"):
        read_parts(tmp_path / "saved/checkpoint")
