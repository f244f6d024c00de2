from __future__ import annotations

import csv
import io
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from examples import grpo_logprobs, plain_loop
from examples.lightning_decoder import LightningDecoder, TextDataModule
from lightning_mfsdp import MFSDPStrategy, unshard
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples/configs").glob("*.yaml"))
# LightningCLI of Lightning 2.6 calls jsonargparse in ways that its newest versions call outdated.
QUIET_JSONARGPARSE = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
SHORT = ["--steps", "8", "--interval", "2", "--micro-batch", "2", "--sample-bytes", "4"]


def run_script(name: str, *arguments: str, folder: Path) -> str:
    """Run an example as a user would, warnings being errors, and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "MASTER_"))}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env={**kept, **QUIET_JSONARGPARSE, "PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def script_of_a_rank(rank: int, world_size: int, folder: Path, *calls: tuple[str, ...]) -> list[str]:
    """What the calls of scripts, names and arguments, print on this rank. They find a process for each device already."""
    os.environ.update(QUIET_JSONARGPARSE)
    os.chdir(folder)
    prints = []
    for name, *arguments in calls:
        with (
            mock.patch.object(sys, "argv", [name, *arguments]),
            redirect_stdout(io.StringIO()) as printed,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", message="TypedStorage is deprecated"
            )  # torch 2.10's own writer of checkpoints
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        prints.append(printed.getvalue())
    return prints


def run_on_two_ranks(*calls: tuple[str, ...], folder: Path) -> list[str]:
    """What each call printed on rank 0; sooner than processes that import everything anew."""
    prints: list[str] = run_distributed(script_of_a_rank, 2, folder, *calls)[0]
    return prints


def curve(path: Path, split: str) -> list[tuple[int, float]]:
    with (path / "curve.csv").open() as file:
        return [
            (int(row["step"]), float(row["bits_per_byte"])) for row in csv.DictReader(file) if row["split"] == split
        ]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a short run in two phases; at night by processes that the script starts."""
    folder = tmp_path_factory.mktemp("pretrain")
    call = ("pretrain.py", *SHORT, "--output", "out")
    if NIGHT:
        return folder / "out", run_script(*call, folder=folder)
    return folder / "out", run_on_two_ranks(call, folder=folder)[0]


def test_pretraining_leaves_a_picture_sharded_checkpoints_a_sample_and_a_verdict(resumed: tuple[Path, str]) -> None:
    output, printed = resumed
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    for step in (4, 8):
        checkpoint = output / f"checkpoints/step-{step:06d}.ckpt"
        assert len(list(checkpoint.glob("*.distcp"))) == 2  # one for each process
    for expected in ("resume at step 4", "def read_lines(path):", "unigram baseline", "held-out text", "verdict"):
        assert expected in printed


@pytest.mark.nightly
def test_a_resumed_run_continues_the_curve_of_one_that_was_never_interrupted(
    resumed: tuple[Path, str], tmp_path: Path
) -> None:
    output, _ = resumed
    run_on_two_ranks(("pretrain.py", *SHORT, "--no-resume-demo", "--output", "out"), folder=tmp_path)
    for split, steps in (("train", list(range(1, 9))), ("held_out", [2, 4, 6, 8])):
        in_two_phases, in_one = curve(output, split), curve(tmp_path / "out", split)
        assert [step for step, _ in in_two_phases] == steps
        assert [loss for _, loss in in_two_phases] == pytest.approx([loss for _, loss in in_one], rel=1e-5)


@pytest.mark.nightly
def test_pretraining_takes_other_strategies_by_name(tmp_path: Path) -> None:
    options = ["--strategy", "mfsdp_optim", "--accumulate", "2", "--no-checkpoint", "--precision", "bf16-mixed"]
    run_on_two_ranks(("pretrain.py", *SHORT, *options, "--output", "out"), folder=tmp_path)
    losses = [loss for _, loss in curve(tmp_path / "out", "train")]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert not (tmp_path / "out/checkpoints").exists()


def losses_of_the_plain_loop(rank: int, world_size: int) -> list[float]:
    return plain_loop.train(8, torch.device("cpu"))


@pytest.mark.nightly
def test_the_plain_loop_learns_and_all_ranks_agree() -> None:
    first, second = run_distributed(losses_of_the_plain_loop, 2)
    assert first == second
    assert first[-1] < first[0] - 1


@pytest.mark.nightly
def test_the_fabric_loop_learns_and_saves(tmp_path: Path) -> None:
    printed = run_script("fabric_loop.py", "--steps", "8", "--output", "out", folder=tmp_path)
    assert len(list((tmp_path / "out/last.ckpt").glob("*.distcp"))) == 2  # one for each process
    meta = torch.load(tmp_path / "out/last.ckpt/meta.pt")
    assert meta.pop("module_versions").keys() == {"model"}
    assert meta == {"step": 8}
    (verdict,) = re.findall(r"2 processes, loss ([0-9.]+) -> ([0-9.]+)", printed)  # printed once
    assert float(verdict[1]) < float(verdict[0]) - 1


@pytest.mark.nightly
def test_the_muon_example_learns_with_one_optimizer(tmp_path: Path) -> None:
    (printed,) = run_on_two_ranks(("muon.py", "--steps", "8"), folder=tmp_path)
    (verdict,) = re.findall(r"2 processes, 8 steps, held-out text ([0-9.]+) bits per byte", printed)
    assert float(verdict) < 5.5  # 10 would be guessing among 1024 tokens


def weights_after_two_steps(rank: int, world_size: int, meta: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = LightningDecoder("tiny", total_steps=2, meta=meta)
    trainer = Trainer(
        strategy="mfsdp",
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    torch.manual_seed(0)
    trainer.fit(module, TextDataModule(batch_size=1))
    with unshard(module):
        return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.nightly
def test_a_module_built_on_the_meta_device_trains_like_one_that_was_not() -> None:
    (real,), (meta,) = (run_distributed(weights_after_two_steps, 1, meta) for meta in (False, True))
    assert real.keys() == meta.keys()
    assert all(torch.equal(real[name], meta[name]) for name in real)


def held_out_bits(model: torch.nn.Module) -> float:
    """What the example reports, by a model without sharding."""
    data = TextDataModule(16, 2, held_out_windows=8 * 2 * 2)
    with torch.no_grad():
        losses = [model(input_ids=batch, labels=batch).loss for batch in data.val_dataloader()]
    return float(torch.stack(losses).mean()) / math.log(2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft asks transformers for it
def test_a_hugging_face_model_is_finetuned_whole_and_by_adapters_and_exported(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    short = ["--steps", "4", "--micro-batch", "2", "--seq", "16"]
    adapters = ["--pretrained", "whole/exported", "--lora", "--output", "lora", "--learning-rate", "0.1"]
    again = ["--pretrained", "whole/exported", "--output", "again", "--learning-rate", "0"]
    calls = (
        ("finetune_hf.py", *short, "--output", "whole"),
        ("finetune_hf.py", *short, *adapters),
        ("finetune_hf.py", *short, *again),
    )
    printed, printed_by_adapters, printed_again = run_on_two_ranks(*calls, folder=tmp_path)
    assert printed_again.splitlines()[-1] == printed.splitlines()[-1], "it begins with the weights that were exported"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole/exported").eval()
    assert f"{held_out_bits(model):.3f} bits per byte" in printed.splitlines()[-1]
    assert len(list((tmp_path / "whole/last.ckpt").glob("*.distcp"))) == 2

    before = held_out_bits(model)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "lora/exported").eval()
    assert f"{held_out_bits(adapted):.3f} bits per byte" in printed_by_adapters.splitlines()[-1]
    assert abs(held_out_bits(adapted) - before) > 0.01
    saved = sum(file.stat().st_size for file in (tmp_path / "lora/last.ckpt").glob("*.distcp"))
    assert saved < 4 * 623_744  # the frozen weights alone would be more


def grpo_of_a_few_steps(rank: int, world_size: int) -> tuple[str, list[float]]:
    """What the example prints, and the rewards that it goes by. In FP8: tests/gpu/test_te.py."""
    sys.argv = ["grpo_logprobs.py", "--steps", "10"]
    learned: list[grpo_logprobs.PolicyGradient] = []
    train = grpo_logprobs.train
    with (
        mock.patch.object(
            grpo_logprobs, "train", lambda *args, **options: learned.append(train(*args, **options)) or learned[0]
        ),
        redirect_stdout(io.StringIO()) as printed,
    ):
        grpo_logprobs.main()
    return printed.getvalue(), [float(reward) for reward in learned[0].rewards]


@pytest.mark.nightly
def test_a_policy_learns_what_it_is_rewarded_for_and_its_ranks_try_different_things() -> None:
    (printed, rewards), (nothing, others) = run_distributed(grpo_of_a_few_steps, 2)
    assert len(rewards) == 10
    assert rewards[0] < 0.2 < 0.5 < rewards[-1]
    assert rewards != others
    assert "verdict: LEARNED" in printed
    assert "verdict" not in nothing


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_a_yaml_file_builds_the_strategy_it_names(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET_JSONARGPARSE.items():
        monkeypatch.setenv(name, value)
    here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    monkeypatch.setattr(sys, "argv", ["cli.py", f"--config={config}", *here])
    cli = LightningCLI(
        LightningDecoder, TextDataModule, run=False, save_config_callback=None, seed_everything_default=False
    )
    assert isinstance(cli.trainer.strategy, MFSDPStrategy)
    assert cli.trainer.strategy.sharding == "optim_grads_params"


def test_the_command_line_trains_from_a_yaml_file(tmp_path: Path) -> None:
    options = ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--data.batch_size=2"]
    files = [ROOT / "examples/configs" / name for name in ("cpu.yaml", "context.yaml", "tensor.yaml")]
    run_on_two_ranks(*(("cli.py", "fit", f"--config={file}", *options) for file in files), folder=tmp_path)
    assert list((tmp_path / "mfsdp-runs/cli/checkpoints").glob("*.ckpt"))


@pytest.mark.nightly
def test_a_mixture_of_experts_trains_with_experts_on_two_ranks(tmp_path: Path) -> None:
    options = ["--trainer.limit_train_batches=8", "--data.batch_size=2", "--data.seq=32", "--data.held_out_windows=4"]
    options += ["--trainer.callbacks+=lightning_mfsdp.callbacks.PagedStash", "--trainer.callbacks.picture=pages.png"]
    # Of fewer layers too many stay where they are, and larger pages would be emptier, so that the callback would warn.
    options += ["--trainer.accumulate_grad_batches=2", "--model.layers=6", "--trainer.callbacks.page_rows=16"]
    call = ("moe.py", "fit", f"--config={ROOT / 'examples/configs/moe/cpu.yaml'}", *options)
    (printed,) = run_on_two_ranks(call, folder=tmp_path)
    (found,) = re.findall(r"held-out text +([0-9.]+) bits", printed)  # printed once
    assert float(found) < 7.9, "a model that knows nothing needs 8 bits for a byte"
    assert re.search(r"busiest expert +[1-8]\.\d\d times the mean", printed)
    assert (tmp_path / "pages.png").read_bytes()[:4] == b"\x89PNG"


def assert_trains_alike(world: int, axes: list[str], folder: Path) -> None:
    """With options by which all processes read the same windows, and without: one curve, and one result of fine-tuning."""
    quick = ["--devices", str(world), "--steps", "4", "--micro-batch"]
    pretraining = ("pretrain.py", "--interval", "2", "--no-checkpoint", "--sample-bytes", "0", *quick)
    calls = (
        (*pretraining, "1", "--output", "expected"),
        (*pretraining, str(world), *axes, "--output", "found"),
        ("finetune_hf.py", *quick, "1", "--output", "tuned"),
        ("finetune_hf.py", *quick, str(world), *axes, "--output", "tuned"),
    )
    *_, expected_tuned, tuned = run_distributed(script_of_a_rank, world, folder, *calls)[0]
    for split in ("train", "held_out"):
        expected, found = ([loss for _, loss in curve(folder / name, split)] for name in ("expected", "found"))
        assert expected[-1] < expected[0] < 11
        assert found == pytest.approx(expected, rel=1e-4)
    held_out, other = (float(re.search(r"held-out text\s+([\d.]+)", printed)[1]) for printed in (tuned, expected_tuned))
    assert held_out == pytest.approx(other, abs=2e-3)
    assert held_out < math.log2(256)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["--context", "--tensor"])
def test_examples_train_alike_with_a_further_axis(axis: str, tmp_path: Path) -> None:
    assert_trains_alike(2, [axis, "2"], tmp_path)


@pytest.mark.nightly
def test_examples_train_alike_with_both_axes(tmp_path: Path) -> None:
    assert_trains_alike(4, ["--context", "2", "--tensor", "2"], tmp_path)
