"""The benchmark's tools that need no GPU: rows of a matrix, ratios of a report, and host time over a fake process group."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmark import context, logprobs, multi_token, recompute, record, tensor, through_trainer
from examples.benchmark.engines import ENGINES, Options, build
from examples.benchmark.flops import adapted_flops, trained_flops
from examples.benchmark.host_time import BASE, BLOCKS, SUBJECTS, table
from examples.benchmark.matrix import DEFAULT_ROWS, TE_ROWS, split_row
from examples.benchmark.overlap import overlap
from examples.benchmark.peers import PEERS
from examples.benchmark.precision_curves import NAMES, NUDGED, precision_of
from examples.benchmark.report import ratio_to, write_report
from examples.benchmark.te_engines import TE_ENGINES, decoder
from examples.decoder import Decoder, next_token_loss
from tests.helpers.distributed import run_distributed
from tests.te import fake_engine
from tests.te.test_training import kinds

ROOT = Path(__file__).resolve().parents[2]


def result(engine: str, step_ms: float, **options: Any) -> dict[str, Any]:
    known = {
        "size": "1b",
        "layers": 24,
        "seq": 4096,
        "world": 4,
        "compiled": False,
        "graph": False,
        "reduce": "float32",
        "clip": 0.0,
    }
    figures = {"median_ms": step_ms, "host_ms": 1.0, "tokens_per_s_gpu": 1000, "peak_gib": 2.0, "reserved_gib": 3.0}
    return {"engine": engine, "accumulation": 1, "step_ms": step_ms, **known, **figures, **options}


def test_a_row_of_the_matrix_is_engines_and_then_options() -> None:
    assert split_row("limit mfsdp --compile --reduce bfloat16") == (
        ["limit", "mfsdp"],
        ["--compile", "--reduce", "bfloat16"],
    )
    assert split_row("ddp") == (["ddp"], [])
    assert all(split_row(row)[0] for row in DEFAULT_ROWS)


def rows_of_recompute(rank: int, world: int) -> list[list[str]]:
    return list(recompute.rows("tiny", 1, 1, torch.device("cpu")))


@pytest.mark.nightly
def test_every_way_of_recompute_is_a_row_beside_what_was_planned() -> None:
    (rows,) = run_distributed(rows_of_recompute, 1)
    assert [row[0] for row in rows] == [f"first {count}" for count in range(5)] + list(recompute.WAYS)
    assert all(len(row) == 7 for row in rows)
    assert all(float(row[4]) > 0 and row[1] == recompute.NOBODY for row in rows), "nobody counts memory here"
    assert all(float(row[5]) > 0 for row in rows[:5])
    assert recompute.cells(4 * 2**30, 3 * 2**30, 2**-30, 2) == ["4.00", "3.00", "0.750"]


def rows_of_predictors(rank: int, world: int) -> list[list[str]]:
    return list(multi_token.rows("tiny", ["bf16"], 1, 1, torch.device("cpu")))


@pytest.mark.nightly
def test_every_predictor_is_a_row_beside_the_decoder_alone() -> None:
    (rows,) = run_distributed(rows_of_predictors, 1)
    assert [row[1] for row in rows] == list(multi_token.PREDICTORS)
    assert rows[0][3] == "1.000"
    assert all(float(row[2]) > 0 and row[4] == "-" for row in rows), "nobody counts memory here"


def a_predictor_in_fp8(rank: int, world: int) -> set[str | None]:
    """Recipes in which products were computed."""
    with fake_engine.installed():
        multi_token.step_of("tiny", multi_token.PREDICTORS["1 token, computed again"], "fp8", 1, torch.device("cpu"))()
        return set(kinds())


def test_a_predictor_is_measured_in_fp8_too() -> None:
    assert run_distributed(a_predictor_in_fp8, 1) == [{"current"}]


def test_a_nudged_curve_is_one_of_the_same_precision() -> None:
    for name in NAMES:
        plain, nudged = (precision_of(each) for each in (name, name + NUDGED))
        others = {"fp8": "fp8", "8bit-moments": "bf16-mixed", "lean": "bf16-true"}
        expected = "bf16-mixed" if name.startswith("bf16") else others.get(name, "transformer-engine")
        assert plain.precision == nudged.precision == expected
        assert plain.keep_high_precision == nudged.keep_high_precision
        if plain.fp8 is not None and nudged.fp8 is not None:
            assert plain.fp8.options == nudged.fp8.options


def test_a_ratio_compares_the_same_work_only() -> None:
    mine = result("mfsdp", 50.0)
    others = [result("fsdp2", 10.0, size="8b"), result("fsdp2", 20.0, compiled=True), result("fsdp2", 100.0)]
    assert ratio_to([mine, *others], mine, ("fsdp2-tuned", "fsdp2")) == 0.5
    assert ratio_to([mine], mine, ("fsdp2",)) is None


def test_flops_are_counted_as_in_the_published_row_that_records_are_compared_with() -> None:
    config = Options(size="8b", seq=8192).config
    with torch.device("meta"):
        model = Decoder(config)
    assert (
        config.multiplied == sum(weight.numel() for weight in model.parameters() if weight.dim() == 2) - 128_256 * 4096
    )
    a_token = trained_flops(config.multiplied, config.layers, config.dim, config.seq)
    assert round(14_451 * a_token / 1e12) == 744
    assert adapted_flops(100, 0, 1, 8, 16) == trained_flops(100, 1, 8, 16) - 2 * 100, "no gradients of what is frozen"


def test_a_row_of_the_record_says_what_was_published_and_what_did_not_run() -> None:
    row = record.ROWS["dense"]
    ran = result("trainer:mfsdp-tuned", 14_000.0, tflops_gpu=481.2, mfu=0.4866, peak_gib=120.04, reserved_gib=None)
    text = record.table(row, [("trainer:mfsdp-tuned", ran), ("limit", "OutOfMemoryError: 3 GiB")])
    assert row.published in text
    assert "| trainer:mfsdp-tuned | 4 | 14.00 | 1,000 | 481 | 0.487 | 120.0 | - |" in text
    assert "| limit | OutOfMemoryError: 3 GiB |" in text
    known = {
        *ENGINES,
        *PEERS,
        *TE_ENGINES,
        *(f"trainer:{name}" for name in through_trainer.STRATEGIES),
        "mfsdp",
        "single",
    }
    assert {contender for each in record.ROWS.values() for contender in each.contenders} <= known


def test_a_report_has_ratios_charts_and_what_failed(tmp_path: Path) -> None:
    results = [result("limit", 40.0), result("mfsdp", 50.0), result("fsdp2", 100.0)]
    write_report(results, ["deepspeed: no module"], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 1b | mfsdp | 50.0 | 1,000 | 0.500 | 0.800 | 1.0 | 2.0 | 3.0 |" in text
    assert "- deepspeed: no module" in text
    assert (tmp_path / "charts.png").stat().st_size > 1000


@pytest.mark.nightly
def test_host_time_of_all_engines_is_measured_without_a_gpu() -> None:
    command = [sys.executable, str(ROOT / "examples/benchmark/host_time.py"), "--warmup=1", "--steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == list(BASE)
    assert all(float(figure) > 0 for row in rows for figure in row[3:])


@pytest.mark.nightly
def test_a_context_axis_is_measured_without_a_gpu() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        str(ROOT / "examples/benchmark/context.py"),
        "--accelerator=cpu",
        "--size=tiny",
        "--speed=64",
        "--rounds=1",
        "--steps=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["data", "context, ulysses", "context, gather"]
    assert all(float(row[-1]) > 0 for row in rows)


@pytest.mark.nightly
def test_a_tensor_axis_is_measured_without_a_gpu() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        str(ROOT / "examples/benchmark/tensor.py"),
        "--accelerator=cpu",
        "--size=tiny",
        "--rounds=1",
        "--steps=1",
    ]
    command += ["--memory=64", "--speed=64", "--rows", tensor.DATA, tensor.TENSOR, tensor.PEER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    memory, speed = rows[2:5], rows[7:]
    assert [row[0] for row in memory] == [row[0] for row in speed] == [tensor.DATA, tensor.TENSOR, tensor.PEER]
    assert all(float(row[1]) > 0 for row in (*memory, *speed))
    (_, ours, peer) = ([float(loss) for loss in row[-2:]] for row in memory)
    assert ours == pytest.approx(peer, abs=0.01), "the same model and tokens"


@pytest.mark.nightly
def test_an_outer_axis_is_measured_without_a_gpu() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(ROOT / "examples/benchmark/outer_axis.py"), "--accelerator=cpu", "--outer=2", "--size=tiny"]
    command += ["--length=64", "--rounds=1", "--steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (row,) = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert all(float(figure.replace(",", "")) > 0 for figure in row[1:4])
    assert row[4] == "-", "nothing runs at the same time there"


@pytest.mark.parametrize("base", ["nf4", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_adapters_are_measured_without_a_gpu(base: str) -> None:
    for package in ("peft", "transformers", *(["bitsandbytes"] if base == "nf4" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}")
    command = [sys.executable, str(ROOT / "examples/benchmark/qlora.py"), "mfsdp", "--tiny", "--warmup=1", "--steps=1"]
    command += ["--rows=2", "--accumulation=2", f"--base={base}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["trained"] == 32_768
    assert result["accumulation"] == 2
    assert all(4 < loss < 7 for loss in result["losses"])


def test_the_peers_attention_is_the_function_that_context_parallel_puts_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = context.LongDecoder("tiny", context._attend, None)
    calls = []

    def ring(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options)
        return value

    tokens = torch.arange(8)[None]
    model(tokens, tokens)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ring)
    model(tokens, tokens)
    assert calls == [{"is_causal": True, "enable_gqa": False}] * len(model.blocks)


def test_host_time_is_told_beside_the_plain_model_and_fsdp2_of_the_same_round() -> None:
    def one_round(slowdown: float) -> dict[str, dict[str, float]]:
        base = {"forward": slowdown, "backward": 2 * slowdown, "clip": 0.0, "step": 0.0}
        found = {name: dict(base, forward=(1 + BLOCKS) * slowdown, clip=4 * slowdown) for name in SUBJECTS}
        found["plain"] = found["plain-fp32"] = base
        found["mfsdp"] = dict(base, backward=(2 + BLOCKS / 4) * slowdown, clip=slowdown)
        return found

    lines = table([one_round(slowdown) for slowdown in (1.0, 7.0, 1.0)]).splitlines()
    assert len(lines) == 2 + len(BASE)
    assert lines[-1] == "| mfsdp | 0.250 | 0.25 | 1.000 | 0.25 |"


def test_communication_that_computation_hides_is_not_exposed() -> None:
    kernels = [
        ("gemm", 0.0, 4000.0),
        ("ncclDevKernel_AllGather", 1000.0, 5000.0),  # 1 ms after the matrix product
        ("Memcpy PtoP (Device -> Device)", 4500.0, 6000.0),  # and 1 ms after that
        ("adam", 8000.0, 10000.0),
    ]
    found = overlap(kernels, 2)
    assert found == {"compute_ms": 3.0, "communication_ms": 2.5, "exposed_ms": 1.0, "idle_ms": 1.0, "step_ms": 5.0}


def test_losses_over_large_vocabularies_are_measured_and_agree_and_failures_are_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_memory(*inputs: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setitem(logprobs.ENGINES["loss"], "compiled", without_memory)
    sizes = ["--tokens=16", "--vocab=64", "--width=8", "--repeats=1", "--device=cpu", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["logprobs.py", *sizes, "--engines=mfsdp,eager,compiled,cce"])
    monkeypatch.setitem(logprobs.ENGINES["logprobs"], "compiled", logprobs.calling(logprobs.eager_logprobs))
    logprobs.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    failed = {row["engine"]: row["failed"] for row in rows if "failed" in row}
    assert failed.pop("compiled") == "out of memory"
    assert failed.pop("cce", "not installed").startswith("not installed")
    assert not failed
    for work in ("loss", "logprobs"):
        losses = {row["engine"]: row["loss"] for row in rows if row["work"] == work and "failed" not in row}
        assert losses["mfsdp"] == pytest.approx(losses["eager"], abs=2e-4)
    assert "| loss | 16 | 64 | compiled | out of memory | | | | | |" in lines


def test_memory_of_what_does_not_fit_is_estimated_from_what_does() -> None:
    def result(engine: str, tokens: int, **figures: Any) -> dict[str, Any]:
        times = {"forward_ms": 1.0, "backward_ms": 2.0, "step_ms": 3.0, "loss": 1.0}
        return {"work": "loss", "engine": engine, "tokens": tokens, "vocab": 100, **times, **figures}

    rows = [
        result("eager", 1000, peak_gib=10.0),
        result("mfsdp", 1000, peak_gib=1.0),
        result("eager", 4000, failed="out of memory"),
        result("mfsdp", 4000, peak_gib=2.0),
    ]
    lines = logprobs.table(rows).splitlines()[2:]
    assert "| 1.00 | 10.0% |" in lines[1]
    assert "out of memory (about 40 GiB)" in lines[2]
    assert "| 2.00 | ~5.0% |" in lines[3]


def te_losses(rank: int, world: int) -> dict[str, list[float]]:
    """Two steps of the tiny decoder in modules of a small engine that stands in for Transformer Engine."""
    with fake_engine.installed():
        found = {}
        for name, engine in TE_ENGINES.items():
            if not name.startswith("mfsdp-te") or "-symm" in name:
                continue
            fake_engine.forget()
            made = engine(Options(size="tiny"), torch.device("cpu"), te=fake_engine.pytorch)  # type: ignore[call-arg]
            generator = torch.Generator().manual_seed(rank)
            found[name] = []
            for _ in range(2):
                ids = torch.randint(0, 1024, (1, 33), generator=generator)
                loss = next_token_loss(made.forward(ids[:, :-1]), ids[:, 1:])
                made.backward(loss)
                made.step()
                found[name].append(loss.item())
    return found


@pytest.mark.nightly
def test_engines_on_modules_of_transformer_engine_train_alike() -> None:
    for found in run_distributed(te_losses, 2):
        bf16, fp8 = found["mfsdp-te-bf16"], found["mfsdp-te-fp8"]
        assert bf16 != fp8
        assert bf16 == pytest.approx(fp8, rel=0.02)
        assert {name: losses for name, losses in found.items() if "fp8" in name and losses != fp8} == {}
        assert len(found) == 7


def test_the_decoder_of_transformer_engine_has_the_sizes_of_the_plain_one() -> None:
    with fake_engine.installed():
        made = decoder(fake_engine.pytorch, Options(size="tiny"), torch.device("cpu"))
    plain = build(Options(size="tiny"), torch.device("cpu"))
    assert sum(part.numel() for part in made.parameters()) == sum(part.numel() for part in plain.parameters())
    with pytest.raises(SystemExit, match="without --compile"):
        decoder(fake_engine.pytorch, Options(size="tiny", compiled=True), torch.device("cpu"))


def test_rows_of_the_matrix_name_engines() -> None:
    known = {*ENGINES, *PEERS, *TE_ENGINES}
    for row in (*DEFAULT_ROWS, *TE_ROWS):
        assert {name for name in split_row(row)[0] if not name.startswith("trainer:")} <= known
