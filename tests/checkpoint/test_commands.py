"""`python -m lightning_mfsdp checkpoint ...`: what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

import lightning_mfsdp.checkpoint
from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.base import progress
from lightning_mfsdp.checkpoint.tools.leaves import StoredTensor
from lightning_mfsdp.checkpoint.tools.verify import count_nonfinite, cover_problems
from lightning_mfsdp.commands import main
from tests.helpers.distributed import run_distributed
from tests.helpers.forked import run as run_forked
from tests.lightning.models import FOREIGN_WARNINGS, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import EPOCH, Scheduled, assert_same

STEPS = 2

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def save(rank: int, world_size: int, folder: str) -> None:
    """One training, saved sharded and as one file; then with NaN in a weight."""
    strict_warnings()
    model = seeded(Scheduled)
    strategy = MFSDPStrategy(units=["Block"])
    trainer = make_trainer(folder, world_size, strategy=strategy, max_epochs=-1, max_steps=STEPS)
    trainer.fit(model, loader(8 // world_size, EPOCH, rank, world_size))
    trainer.save_checkpoint(f"{folder}/sharded.ckpt")
    strategy.state_dict_type = "full"
    trainer.save_checkpoint(f"{folder}/full.ckpt")
    strategy.state_dict_type = "sharded"
    with torch.no_grad():
        model.tiny.add_(float("inf"))
        model.head.bias.mul_(float("nan"))
    trainer.save_checkpoint(f"{folder}/not_finite.ckpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    run_distributed(save, 2, str(made))
    return made


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "sharded.ckpt", tmp_path / "copy.ckpt")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a subcommand; returns its exit code, and what it wrote to stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


# -- info --------------------------------------------------------------------------------------------------------------


def test_info_shows_a_table_without_reading_tensors(copy: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(StoredTensor, "read", refuse)
    code, out, err = run("info", copy, "--largest", 2)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"checkpoint   {copy}",
        "kind         sharded directory, written by 2 ranks",
        "epoch        1",
        "global step  2",
        f"versions     lightning {version('lightning')}, torch.distributed.checkpoint 1.0.0",
        "model        17 tensors, 665 elements, 2.6 KiB of float32",
        "optimizer_0  14 parameters in 2 groups: step x 13, exp_avg x 13, exp_avg_sq x 13, 3.8 KiB of float32",
        "beside them  epoch, global_step, loops, callbacks, lr_schedulers, rank_states, data_positions, training_run",
        "",
        "largest tensors               shape    dtype    size   pieces",
        "model.blocks.0.linear.weight  12 x 12  float32  576 B  2",
        "model.blocks.1.linear.weight  12 x 12  float32  576 B  2",
    ]


def test_info_says_the_same_of_a_directory_and_of_a_file_in_json(folder: Path, run: Run) -> None:
    sharded, full = (json.loads(run("info", folder / name, "--json")[1]) for name in ("sharded.ckpt", "full.ckpt"))
    assert (sharded["kind"], full["kind"]) == ("sharded directory", "full file")
    assert (sharded["writers"], full["writers"]) == ([0, 1], None)
    assert sharded["optimizers"][0]["states"] == {"step": 13, "exp_avg": 13, "exp_avg_sq": 13}
    for key in ("epoch", "global_step", "tensors", "elements", "bytes_by_dtype", "rest"):
        assert sharded[key] == full[key], key
    assert {**sharded["optimizers"][0], "name": ""} == {**full["optimizers"][0], "name": ""}


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_reads_everything_and_counts_what_is_not_finite(folder: Path, run: Run) -> None:
    code, out, _ = run("verify", folder / "sharded.ckpt")
    assert code == 0
    assert out.splitlines()[1:] == ["no problems"]
    assert "57 tensors, 1" in out
    assert "57 tensors, not read" in run("verify", folder / "sharded.ckpt", "--fast")[1]
    assert run("verify", folder / "full.ckpt")[0] == 0
    code, out, _ = run("verify", folder / "not_finite.ckpt")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["not", "finite", "NaN", "infinite"],
        ["model.tiny", "0", "12"],
        ["model.head.bias", "5", "0"],
        ["no", "problems"],
    ]


def flip_a_bit(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))


def place_of_data(folder: Path, key: str) -> tuple[Path, int]:
    """File and offset of the numbers of the first piece of a tensor."""
    metadata = FileSystemReader(folder).read_metadata()
    item = next(place for index, place in metadata.storage_data.items() if index.fqn == key)
    file = folder / item.relative_path
    piece = file.read_bytes()[item.offset : item.offset + item.length]
    # torch.save aligns numbers to 64 bytes after the name of their entry.
    start = piece.index(b"data/0") + len(b"data/0")
    return file, item.offset + (start + 63) // 64 * 64 + 64


def test_verify_finds_missing_short_and_altered_files(folder: Path, tmp_path: Path, run: Run) -> None:
    def broken(name: str, change: Callable[[Path], object]) -> list[str]:
        path = shutil.copytree(folder / "sharded.ckpt", tmp_path / name)
        change(path)
        code, out, err = run("verify", path)
        assert (code, err) == (1, "")
        return out.splitlines()[1:]

    assert broken("missing", lambda path: (path / "__1_0.distcp").unlink()) == [
        "problems: 1",
        "  __1_0.distcp is missing",
    ]
    size = (folder / "sharded.ckpt/__1_0.distcp").stat().st_size
    assert broken("short", lambda path: os.truncate(path / "__1_0.distcp", size - 7)) == [
        "problems: 1",
        f"  __1_0.distcp has {size - 7} bytes instead of {size}",
    ]
    (count, problem) = broken("flipped", lambda path: flip_a_bit(*place_of_data(path, "model.head.weight")))
    assert count == "problems: 1"
    assert "model.head.weight in __" in problem
    assert "checksum" in problem
    (count, problem) = broken("meta", lambda path: os.truncate(path / "meta.pt", 900))
    assert count == "problems: 1"
    assert "meta.pt is a damaged file of torch.save" in problem
    (count, problem) = broken("contents", lambda path: os.truncate(path / ".metadata", 900))
    assert "table of contents .metadata cannot be read" in problem


def test_verify_finds_chunks_that_do_not_cover_their_tensor(copy: Path, run: Run) -> None:
    metadata = FileSystemReader(copy).read_metadata()
    metadata.state_dict_metadata["model.blocks.0.linear.weight"].chunks.pop()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    for options in ([], ["--fast"]):
        code, out, _ = run("verify", copy, *options)
        assert code == 1
        assert "model.blocks.0.linear.weight: chunks cover" in out
        assert "of 144 elements" in out


def test_verify_checks_full_files(folder: Path, tmp_path: Path, run: Run) -> None:
    data = (folder / "full.ckpt").read_bytes()
    (tmp_path / "short.ckpt").write_bytes(data[:-100])
    code, out, _ = run("verify", tmp_path / "short.ckpt")
    assert code == 1
    assert "is a damaged file of torch.save" in out
    model = torch.load(folder / "full.ckpt", weights_only=True)
    numbers = model["state_dict"]["head.weight"].numpy().tobytes()
    (tmp_path / "flipped.ckpt").write_bytes(data)
    flip_a_bit(tmp_path / "flipped.ckpt", data.index(numbers))
    code, out, _ = run("verify", tmp_path / "flipped.ckpt")
    assert code == 1
    assert "checksum" in out
    assert run("verify", tmp_path / "flipped.ckpt", "--fast")[0] == 0


@pytest.mark.parametrize(
    ("shape", "chunks", "problem"),
    [
        ((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))], ""),
        ((4, 2), [((0, 0), (4, 1)), ((0, 1), (4, 1))], ""),
        ((4, 2), [((0, 0), (3, 2)), ((2, 0), (2, 2))], "chunks at (0, 0) and (2, 0) overlap"),
        ((4, 2), [((0, 0), (4, 2)), ((0, 0), (4, 2))], "overlap"),
        ((4, 2), [((0, 0), (3, 2))], "chunks cover 6 of 8 elements"),
        ((4, 2), [((0, 0), (5, 2))], "lies outside of its shape"),
        ((4, 2), [((0,), (8,))], "lies outside of its shape"),
        ((), [((), ())], ""),
        ((), [], "chunks cover 0 of 1 elements"),
        ((), [((), ()), ((), ())], "overlap"),
        ((0, 2), [], ""),
        ((3,), [((0,), (3,)), ((0,), (0,))], ""),
    ],
)
def test_chunks_must_cover_a_tensor_exactly_once(shape: Any, chunks: Any, problem: str) -> None:
    problems = cover_problems(shape, chunks)
    assert problem in " ".join(problems)
    assert bool(problems) == bool(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_nan_and_infinity_are_counted_in_every_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), float("nan"), 0.0]).to(dtype)
    found = count_nonfinite(values)
    assert (found.nan, found.inf) == (2, 2)
    assert count_nonfinite(torch.arange(3)).nan == 0


# -- consolidate -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def consolidated(folder: Path) -> dict[str, Path]:
    """One file of ours and one by Lightning's own tool."""
    paths = {"ours": folder / "ours.ckpt", "lightnings": folder / "lightnings.ckpt"}
    assert main(["checkpoint", "consolidate", str(folder / "sharded.ckpt"), str(paths["ours"])]) == 0
    arguments = ["consolidate", str(folder / "sharded.ckpt"), "--output_file", str(paths["lightnings"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    return paths


def test_consolidate_writes_what_a_full_checkpoint_is(folder: Path, consolidated: dict[str, Path], run: Run) -> None:
    ours, full = (torch.load(path, weights_only=True) for path in (consolidated["ours"], folder / "full.ckpt"))
    assert_same(ours, full)
    assert run("verify", consolidated["ours"])[0] == 0
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("ours")) == ["ours.ckpt"]


def plain_state(trainer: Any, model: LightningModule) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": trainer.global_step,
    }


def resume(folder: Path, world_size: int, strategy: str, path: Path) -> dict[str, Any]:
    """Load without a step; weights were something else before."""
    model = seeded(Scheduled)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    trainer = make_trainer(folder, world_size, strategy=strategy, max_epochs=-1, max_steps=STEPS)
    trainer.fit(model, loader(8 // world_size, EPOCH), ckpt_path=path)
    return plain_state(trainer, model)


def resume_with_ddp(rank: int, world_size: int, folder: str, paths: dict[str, Path]) -> dict[str, Any]:
    strict_warnings()
    return {
        name: resume(Path(folder), world_size, "ddp_find_unused_parameters_true", path) for name, path in paths.items()
    }


def test_ddp_and_a_single_device_resume_from_consolidated_files(
    folder: Path, consolidated: dict[str, Path], tmp_path: Path
) -> None:
    full = torch.load(folder / "full.ckpt", weights_only=True)
    expected = {"weights": full["state_dict"], "optimizer": full["optimizer_states"][0], "step": STEPS}
    for path in consolidated.values():
        assert_same(resume(tmp_path, 1, "auto", path), expected)
    for found in run_distributed(resume_with_ddp, 2, str(tmp_path), consolidated):
        for state in found.values():
            assert_same(state, expected)


LARGE = """
import resource, sys
from pathlib import Path
import torch
from lightning_mfsdp.checkpoint.tools import convert
from lightning_mfsdp.checkpoint.tools import verify

def memory(kind):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kind)) * 1024

folder = Path(sys.argv[1])
convert._SmallFilesWriter.file_bytes = 16 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + 64 * 2**20, -1))
convert.consolidate_checkpoint(folder / "large", folder / "large.ckpt")
convert.convert_checkpoint(folder / "large", folder / "converted")
assert not verify.verify(folder / "converted").problems
try:
    [torch.ones(4 * 2**20) for _ in range(8)]
except RuntimeError:
    sys.exit(0)
sys.exit("the limit does not limit")
"""


@pytest.mark.nightly
def test_memory_is_bounded_by_files_and_chunks_and_not_by_the_checkpoint(tmp_path: Path) -> None:
    """128 MiB of tensors in chunks of 4 MiB, with 64 MiB of memory to spare, also for the allocator's gaps."""
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        torch.distributed.checkpoint.save(
            {"model": {f"layer{number}": torch.full((1024, 1024), float(number)) for number in range(32)}},
            checkpoint_id=tmp_path / "large",
            no_dist=True,
        )
    result = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert torch.load(tmp_path / "large.ckpt", mmap=True)["state_dict"]["layer31"][-1, -1] == 31
    assert len(list((tmp_path / "converted").glob("*.distcp"))) == 8


# -- export and convert ------------------------------------------------------------------------------------------------


def test_export_hands_its_arguments_on(folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def export_checkpoint(path: Path, output: Path, *, progress: Any, **options: Any) -> list[Path]:
        calls.append((path, output, options))
        assert progress is None, "stderr is no terminal"
        file = tmp_path / "model.safetensors"
        file.write_bytes(bytes(2048))
        return [file]

    monkeypatch.setattr(lightning_mfsdp.checkpoint, "export_checkpoint", export_checkpoint, raising=False)
    options = ["--prefix", "model.", "--max-shard-size", "1.5MiB", "--dtype", "bfloat16"]
    code, out, err = run("export", folder / "sharded.ckpt", tmp_path / "out", *options)
    assert (code, out, err) == (0, f"{tmp_path / 'model.safetensors'}  2.0 KiB\n", "")
    run("export", "a", "b", "--trust", "--averaged")
    assert calls == [
        (
            folder / "sharded.ckpt",
            tmp_path / "out",
            {
                "prefix": "model.",
                "max_shard_bytes": 3 * 2**19,
                "dtype": torch.bfloat16,
                "weights_only": None,
                "averaged": False,
            },
        ),
        (
            Path("a"),
            Path("b"),
            {"prefix": "", "max_shard_bytes": 5 * 10**9, "dtype": None, "weights_only": False, "averaged": True},
        ),
    ]
    with pytest.raises(SystemExit) as info:
        run("export", "a", "b", "--max-shard-size", "large")
    assert info.value.code == 2


def test_export_writes_what_the_checkpoint_holds(folder: Path, tmp_path: Path, run: Run) -> None:
    code, out, err = run("export", folder / "sharded.ckpt", tmp_path / "out", "--dtype", "float64")
    file = tmp_path / "out" / "model.safetensors"
    assert (code, err) == (0, "")
    assert out.startswith(f"{file}  ")
    run("consolidate", folder / "sharded.ckpt", tmp_path / "whole.ckpt")
    state = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
    exported = load_file(file)
    assert exported
    assert {name: value.dtype for name, value in exported.items() if value.is_floating_point()} == {
        name: torch.float64 for name, value in exported.items() if value.is_floating_point()
    }
    for name, value in exported.items():
        assert torch.equal(value, state[name].to(value.dtype)), name


def test_convert_hands_its_arguments_on_and_tells_what_it_did(tmp_path: Path, run: Run) -> None:
    weights = {"net.weight": torch.ones(2, 3), "net.bias": torch.ones(2)}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    state = {number: {"momentum_buffer": tensor} for number, tensor in enumerate(reversed(weights.values()))}
    content = {"net": weights, "ema": weights, "optimizer": {"state": state, "param_groups": groups}, "step": 3}
    torch.save(content, tmp_path / "file.pt")
    (tmp_path / "names.txt").write_text("model.bias\nmodel.weight\n")
    options = ["--from", "full", "--model", "net", "--strip-prefix", "net.", "--add-prefix", "model."]
    output = tmp_path / "new/out.ckpt"
    code, out, err = run("convert", tmp_path / "file.pt", output, *options, "--parameters", tmp_path / "names.txt")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"wrote {output}: 2 model entries, state of 2 parameters in 1 optimizer",
        "optimizer: names given for its 2 parameters",
        "Lightning did not write the source: epochs, steps and learning rate schedules start at the beginning",
        "left out: ema.net.weight, ema.net.bias, step",
    ]
    summary = json.loads(run("info", output, "--json")[1])
    assert [tensor["name"] for tensor in summary["largest"]] == [
        "model.model.weight",
        "optimizer_0.state.model.weight.momentum_buffer",
        "model.model.bias",
        "optimizer_0.state.model.bias.momentum_buffer",
    ]


# -- folders of safetensors ----------------------------------------------------------------------------------------------


def test_folders_of_safetensors_are_described_and_verified(tmp_path: Path, run: Run) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    first, second = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"
    safetensors.save_file({"weight": torch.ones(4, 3), "count": torch.tensor(3)}, first)
    safetensors.save_file({"bias": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)}, second)
    index = {"weight_map": {"weight": first.name, "count": first.name, "bias": second.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    code, out, _ = run("info", tmp_path)
    assert code == 0
    assert "kind        safetensors folder" in out
    assert "model       3 tensors, 15 elements, 60 B (" in out
    assert ["bias", "2", "bfloat16", "4", "B", "1"] in [line.split() for line in out.splitlines()]
    code, out, _ = run("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "no problems")
    assert ["bias", "1", "0"] in [line.split() for line in out.splitlines()]
    assert run("verify", first)[0] == 0
    os.truncate(second, second.stat().st_size - 1)
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert f"{second} is a damaged safetensors file" in out
    assert f"bias is not in {second.name}, where model.safetensors.index.json has it" in out


# -- what cannot be done -------------------------------------------------------------------------------------------------


class Opaque:
    """Nothing that torch.load knows."""


def test_errors_are_one_line_and_exit_code_2(folder: Path, tmp_path: Path, run: Run) -> None:
    def error(*arguments: object) -> str:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    (tmp_path / "text").write_text("not a checkpoint")
    (tmp_path / "empty").mkdir()
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0", "mine": Opaque()}, tmp_path / "objects.ckpt")
    for command in ("info", "verify"):
        assert "there is nothing at that path" in error(command, tmp_path / "missing")
        assert "is no checkpoint" in error(command, tmp_path / "text")
        assert "is a directory without .metadata" in error(command, tmp_path / "empty")
        assert "; take one of those in it: not_finite.ckpt, sharded.ckpt" in error(command, folder)
    assert "--trust" in error("info", tmp_path / "objects.ckpt")
    assert run("info", tmp_path / "objects.ckpt", "--trust")[0] == 0
    assert "is a single file already" in error("consolidate", folder / "full.ckpt", tmp_path / "out")
    for command in ("consolidate", "convert"):
        assert "is there already; choose a free path" in error(command, folder / "sharded.ckpt", tmp_path / "text")
        assert "there is nothing at that path" in error(command, tmp_path / "missing", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "objects.ckpt", "text"]


def test_a_damaged_source_is_named_and_nothing_is_written(copy: Path, tmp_path: Path, run: Run) -> None:
    os.truncate(copy / "__1_0.distcp", 100)
    for command in ("consolidate", "convert"):
        code, _, err = run(command, copy, tmp_path / "out.ckpt")
        assert code == 2
        assert "__1_0.distcp ends" in err
        assert [path.name for path in tmp_path.iterdir()] == ["copy.ckpt"]


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["info", "consolidate"])
def test_a_missing_file_is_named_with_what_to_do(command: str, tmp_path: Path, run: Run) -> None:
    path = shutil.copytree(Path(__file__).parents[1] / "data/tag/sharded.ckpt", tmp_path / "tag.ckpt")
    (path / "__1_0.distcp").unlink()
    code, out, err = run(command, path, *([tmp_path / "out.ckpt"] if command == "consolidate" else []))
    assert (code, out) == (2, "")
    assert re.search(r"^error: .*__1_0\.distcp\S* .*is missing\. Copy ", err), err
    assert not (tmp_path / "out.ckpt").exists()


def test_a_bar_shows_progress_on_a_terminal_only(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BYTES_WORTH_A_BAR", 1)
    assert run("verify", folder / "full.ckpt")[2] == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["checkpoint", "verify", str(folder / "full.ckpt")]) == 0
    assert terminal.getvalue().startswith("\rreading: ")


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = ["-m", "lightning_mfsdp", "checkpoint", "info", "nothing"]
    code, output = run_forked(command, os.environ, tmp_path / "output", tmp_path, timeout=100)
    assert code == 2
    assert output == "error: nothing: there is nothing at that path; expected a checkpoint\n"
