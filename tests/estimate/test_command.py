"""`lightning-mfsdp memory`: what it prints, what it finds, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_mfsdp.commands import main
from lightning_mfsdp.commands.memory import command
from lightning_mfsdp.estimate import MemoryEstimate, Rehearsal, batch_of
from lightning_mfsdp.optim import AdamW
from tests.estimate.models import BATCH, write_config

CLASS = "tests.estimate.models:Causal"
SHORT = ("--sequence", "96")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; returns its exit code, and what it printed: its result, or its error if there is none."""

    def run(*arguments: Any) -> tuple[int, str]:
        code = main(["memory", *map(str, arguments)])
        output, errors = capsys.readouterr()
        return code, output or errors

    return run


def test_a_model_that_fits_is_a_table_by_kind(run: Any, tmp_path: Path) -> None:
    code, printed = run(write_config(tmp_path), "--gpus", 8, *SHORT, "--outer", 2, "--outer-sharding", "optim")
    assert code == 0
    assert "313,280 parameters on 8 GPUs (outer 2, data 4), bf16-mixed" in printed
    kinds = ("main weights, float32", "weights, bfloat16", "gradients", "gathered weights", "reduction buckets")
    for kind in (*kinds, "optimizer state", "activations", "logits and loss", "reserve", "total"):
        assert f"\n{kind} " in printed
    assert "with --recompute" in printed
    assert printed.count(" fits") == 2


def test_a_module_of_the_current_folder_is_found_by_the_installed_command(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_this_folder.py").write_text(f"from {CLASS.partition(':')[0]} import Causal\n")
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(sys, "path", [root, *(each for each in sys.path if each not in ("", root, str(tmp_path)))])
    code, printed = run("in_this_folder:Causal", "--gpus", 2, "--batch", BATCH, "--quick")
    assert code == 0, printed


def test_it_says_at_once_what_it_rehearses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(write_config(tmp_path)), "--gpus", "2", *map(str, SHORT), "--quick"]) == 0
    begun, ended = capsys.readouterr().err.splitlines()
    assert begun == "as asked: two steps of 313,280 parameters"
    assert ended.startswith("as asked: 3.")


def test_what_does_not_fit_is_said_with_the_options_that_make_it_fit(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimates are made up: recomputing leaves 30 GiB of 50, smaller messages 2 less, smaller moments 5, and offload 10."""

    def rehearsed(subject: Any, run: Rehearsal) -> MemoryEstimate:
        activations = 30 if run.options.recompute is None else 10
        (optimizer,) = subject.optimizers(torch.nn.Linear(1, 1))
        state = 5 if isinstance(optimizer, AdamW) else 10
        kinds = {"activations": activations, "optimizer state": state if run.options.offload is None else 0}
        kinds |= {"reduction buckets": 8 if run.policy else 10, "gradients": 0}
        in_bytes = {kind: gib << 30 for kind, gib in kinds.items()}
        return MemoryEstimate(most=in_bytes, peak=in_bytes, moment="loss", host=0, parameters=1, padding=0.0)

    monkeypatch.setattr(command, "rehearse", rehearsed)
    asked = (write_config(tmp_path), "--gpus", 2, "--reserve", 0)
    code, printed = run(*asked, "--gib", 29)
    assert code == 1
    assert printed.splitlines()[-4:] == [
        "",
        "does not fit: 50.0 of 29 GiB, most of it activations (30.00 GiB)",
        "  with --recompute: 30.0 GiB, does not fit",
        "  with --recompute --grad-comm-dtype bfloat16: 28.0 GiB, fits",
    ]
    code, printed = run(*asked, "--gib", 10)
    assert code == 1
    assert printed.splitlines()[-3:] == [
        "  with --recompute --grad-comm-dtype bfloat16 --optimizer adamw_bf16: 23.0 GiB, does not fit",
        "  with --recompute --grad-comm-dtype bfloat16 --optimizer adamw_bf16 --offload optimizer: 18.0 GiB, does not fit",
        "  nothing that was tried makes it fit: use more GPUs, or larger ones",
    ]
    assert run(*asked, "--gib", 50, "--json")[0] == 0
    assert main(["memory", *map(str, asked), "--gib", "29"]) == 1
    lines = capsys.readouterr().err.splitlines()  # as they are computed
    assert [line.split(" GiB")[0] for line in lines] == [
        "as asked: 50.0",
        "for comparison: 30.0",
        "--recompute --free-gradients: 30.0",
        "--recompute --grad-comm-dtype bfloat16: 28.0",
    ]
    code, printed = run(*asked, "--gib", 10, "--quick")
    assert code == 1
    assert printed.endswith("activations (30.00 GiB)\n")


def test_a_lightning_module_is_estimated_with_what_a_file_says(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {optimizer: sgd}\n"
        "trainer: {precision: bf16-true, strategy: {class_path: lightning_mfsdp.MFSDPStrategy, init_args: {sharding: optim}}}\n"
    )
    code, printed = run(CLASS, "--config", file, "--batch", BATCH, "--gpus", 2, "--json", "--quick")
    facts = json.loads(printed)
    assert code == 0
    assert facts["parameters"] == 313_280
    assert {kind.split(",")[0] for kind in facts["most"]} >= {"weights", "main weights", "optimizer state"}
    assert "weights, bfloat16" in facts["most"]
    assert facts["most"]["optimizer state"] == facts["most"]["main weights, bfloat16"], "momentum alone, in bf16"


def test_moments_in_bfloat16_take_half_those_in_8_bits_a_quarter_and_their_step_nothing(run: Any) -> None:
    wide, narrow, narrowest = (
        json.loads(run(CLASS, "--batch", BATCH, "--gpus", 2, "--json", "--quick", "--optimizer", name)[1])["most"]
        for name in ("adamw", "adamw_bf16", "adamw_8bit")
    )
    main_bytes = narrow["main weights, float32"]
    steps_bytes = wide["optimizer state"] - 2 * main_bytes  # a number for each parameter
    assert 0 < steps_bytes < 1000
    assert narrow["optimizer state"] == main_bytes + steps_bytes
    assert narrowest["optimizer state"] == main_bytes // 2 + steps_bytes
    assert narrow["activations"] <= wide["activations"]


def test_options_as_lightning_cli_reads_them_are_taken_from_a_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    options = "timeout: 0:05:00, policy: {main_params_dtype: torch.bfloat16}"
    file.write_text(f"trainer: {{strategy: {{class_path: lightning_mfsdp.MFSDPStrategy, init_args: {{{options}}}}}}}\n")
    code, printed = run(CLASS, "--config", file, "--batch", BATCH, "--gpus", 2, "--json", "--quick")
    assert code == 0, printed
    assert "main weights, bfloat16" in json.loads(printed)["most"]


def test_gradients_that_wait_for_the_last_microbatch_are_counted(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {accumulate_grad_batches: 4}\n")
    whole = 4 * 313_280  # bytes, on every rank
    found = {}
    for given in ((), ("--accumulate", 4), ("--config", file), ("--accumulate", 4, "--set", "accumulation=sharded")):
        code, printed = run(CLASS, *given, "--batch", BATCH, "--gpus", 2, "--json", "--quick", "--reserve", 0)
        assert code == 0
        facts = json.loads(printed)
        found[given] = facts["most"].get("reduction buckets", 0)
    once, *accumulated, sharded = found.values()
    assert accumulated == [pytest.approx(whole, rel=0.01)] * 2  # and padding
    assert sharded == once < whole


@pytest.mark.parametrize(
    ("model", "trained"),
    [("OnlyItsHead", 1003 * 64), ("Adapted", 4 * 4 * (4 * 128 - 2 * 32 + 3 * (64 + 176)))],
)
def test_what_is_frozen_has_no_state_and_no_gradients(run: Any, model: str, trained: int) -> None:
    code, printed = run(
        f"tests.estimate.models:{model}", "--batch", BATCH, "--gpus", 2, "--json", "--quick", "--accumulate", 2
    )
    assert code == 0, printed
    most = json.loads(printed)["most"]
    assert most["optimizer state"] == pytest.approx(8 * trained / 2, rel=0.05)  # and padding, and steps
    if model == "Adapted":  # gradients of a head alone lie with the logits
        assert most["reduction buckets"] == pytest.approx(4 * trained, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{folder}/nowhere", "--gpus", 2), "does not exist. Give a LightningModule as package.module:ClassName"),
        (("meta-llama/Meta-Llama-3-8B", "--gpus", 2), "of a gated model, once you have accepted its license"),
        (
            ("{broken}", "--gpus", 2),
            "is no config.json of transformers; give the one that came with a model: JSONDecodeError",
        ),
        (
            ("{strange}", "--gpus", 2),
            "has no model_type 'strange' of its own, and code of a model's repository is not run",
        ),
        (("{vision}", "--gpus", 2), "'vit' is no causal language model. Give a LightningModule"),
        (
            ("{config}", "--gpus", 6, "--tensor", 4),
            "outer x data x context x tensor = 1 x 1 x 1 x 4 = 4, but there are 6 ranks",
        ),
        (("{config}", "--gpus", 0), "--gpus 0: expected a positive number"),
        (("{config}", "--gpus", 2, "--batch", "int64[1]"), "--batch is not for a config.json"),
        (("{config}", "--gpus", 2, "--set", "colour=red"), "MFSDPStrategy has no option 'colour'"),
        (("{config}", "--gpus", 2, "--set", "recompute=3"), "recompute=3: expected a Recompute"),
        (("{config}", "--gpus", 2, "--set", "data"), "expected NAME=VALUE"),
        (("{config}", "--gpus", 4, "--expert", 2), "has no experts to divide"),
        ((CLASS, "--gpus", 2), "its batch is not known; use --batch"),
        ((CLASS, "--gpus", 2, "--batch", "int64"), "batch 'int64': expected dtypes and shapes"),
        ((CLASS, "--gpus", 2, "--sequence", 8), "--sequence is not for a LightningModule"),
        (("tests.estimate.models:Other", "--gpus", 2), "there is no such class"),
        (("tests.estimate.models:Same", "--gpus", 2), "expected a LightningModule"),
        (
            ("mymodel", "--gpus", 2),
            "Give a LightningModule as package.module:ClassName, or the path of a model's config",
        ),
        (
            ("tests.estimate.models:SavesItself", "--gpus", 2, "--batch", BATCH),
            "tests.estimate.models:SavesItself cannot be built: it failed in line ",
        ),
        (
            ("tests.estimate.models:AsksItsTrainer", "--gpus", 2, "--batch", BATCH),
            "tests.estimate.models:AsksItsTrainer.training_step failed in line ",
        ),
        (
            ("tests.estimate.models:ReadsValues", "--gpus", 2, "--batch", BATCH, "--optimizer", "sgd"),
            "training_step needs values of tensors (aten.nonzero.default)",
        ),
    ],
)
def test_what_cannot_be_estimated_is_one_line(run: Any, tmp_path: Path, arguments: Any, message: str) -> None:
    places = {"folder": tmp_path, "config": write_config(tmp_path)}
    for name, text in {
        "broken": "{",
        "strange": '{"model_type": "strange", "auto_map": {}}',
        "vision": '{"model_type": "vit"}',
    }.items():
        places[name] = tmp_path / f"{name}.json"
        places[name].write_text(text)
    code, printed = run(*(str(argument).format(**places) for argument in arguments))
    assert code == 2
    assert message in printed
    *begun, said = printed.splitlines()
    assert said.startswith("error: ")
    assert len(begun) <= 1, "at most that the steps of a model begin"
    assert not dist.is_initialized()


def test_a_process_that_has_a_process_group_is_refused(run: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        code, printed = run(write_config(tmp_path), "--gpus", 2)
    finally:
        dist.destroy_process_group()
    assert code == 2
    assert "needs a process without a process group" in printed


def test_a_batch_is_a_tensor_a_tuple_or_a_mapping() -> None:
    tensor = batch_of("int64[4, 129]")
    assert (tensor.shape, tensor.dtype) == ((4, 129), torch.int64)
    (alone,) = batch_of("(int64[4,129])")
    assert alone.shape == (4, 129)
    images, labels = batch_of("float32[8,3,2,2] int64[8]")
    assert (images.shape, labels.shape) == ((8, 3, 2, 2), (8,))
    assert {name: value.shape for name, value in batch_of("a=int64[2] b=bool[2,1]").items()} == {"a": (2,), "b": (2, 1)}


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "how many GiB of each GPU a training step takes" in " ".join(capsys.readouterr().out.split())
