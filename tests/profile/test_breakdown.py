"""What a trace of torch.profiler says about steps: each moment once, communication that nothing hides, waits of the host, and advice."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mfsdp.commands import main
from lightning_mfsdp.profile import Breakdown, Event, Trace, break_down, read_trace, report
from lightning_mfsdp.profile.breakdown import by_kind
from lightning_mfsdp.profile.intervals import Interval, common, contains, length, merged, without
from lightning_mfsdp.profile.report import advice

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
# Name, start, length and when it was launched, of what ran on a GPU in two steps of 100 us.
WORK = [
    (PRODUCT, 10, 30, 2),
    (GATHER, 20, 30, 4),  # 10 us of it are not hidden
    (REDUCE, 45, 10, 6),  # 5 us behind the gather, and so all of what it shows is 5
    ("Memcpy HtoD (Pinned -> Device)", 60, 5, 8),
    ("multi_tensor_apply_kernel<Copy>", 64, 6, 3.5),  # a cast for a gather, of which nothing hides 6 us
    ("multi_tensor_apply_kernel<AdamW>", 70, 10, 31),  # launched by the optimizer
    (PRODUCT, 110, 80, 102),
    (ALL_TO_ALL, 190, 6, 104),
    ("Memcpy PtoP (Device -> Device)", 110, 80, 106),  # a gather by copy engines, hidden
]
RANGES = [
    ("ProfilerStep#7", 0, 100),
    ("ProfilerStep#8", 100, 100),
    ("mfsdp gather layers.0[0]", 3, 2),
    ("mfsdp reduce layers.1[0]", 5, 2),
    ("mfsdp optimizer", 30, 5),
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 95, 10),
]


def entry(kind: str, name: str, start: float, length: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": length,
        "pid": 1,
        "tid": thread,
        "args": arguments,
    }


def write(folder: Path, entries: Sequence[dict[str, Any]], *, compressed: bool = False) -> Path:
    content = json.dumps({"schemaVersion": 1, "traceEvents": list(entries)}).encode()
    path = folder / ("trace.json.gz" if compressed else "trace.json")
    path.write_bytes(gzip.compress(content) if compressed else content)
    return path


def trace_of_work() -> list[dict[str, Any]]:
    entries = [entry("user_annotation", *one) for one in RANGES]
    for number, (name, start, size, launched) in enumerate(WORK):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        entries.append(entry(kind, name, start, size, 20, stream=20, correlation=number))
        entries.append(entry("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=number))
    return [{"ph": "M", "name": "process_name"}, *entries]


@pytest.mark.parametrize("compressed", [False, True])
def test_each_moment_of_the_device_counts_once_and_the_rest_is_idle(compressed: bool, tmp_path: Path) -> None:
    found = break_down(read_trace(write(tmp_path, trace_of_work(), compressed=compressed)))
    assert found.steps == 2
    assert found.step == 100
    assert found.shown == {
        "compute": 55,
        "optimizer": 5,
        "copies on the device": 3,
        "all-gathers": 5,
        "reductions": 2.5,
        "other communication": 3,
        "copies to and from the host": 2,
    }
    assert found.hidden == {
        "copies on the device": 0,
        "all-gathers": 50,
        "reductions": 2.5,
        "other communication": 0,
        "copies to and from the host": 0.5,
    }
    assert found.idle == 24.5
    assert found.idle + sum(found.shown.values()) == found.step


@pytest.mark.parametrize(
    ("kernel", "is_fused"),
    [
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>, float>", True),
        ("void transformer_engine::multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<float, int>>", True),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpScalarFunctor<float, 2, 1, 1>, std::multiplies>", False),
    ],
)  # fmt: skip
def test_a_fused_optimizer_is_known_by_its_kernel(kernel: str, is_fused: bool, tmp_path: Path) -> None:
    work = [entry("user_annotation", *one) for one in RANGES]
    for number, name in enumerate((PRODUCT, kernel)):
        work.append(entry("kernel", name, 40 + 10 * number, 10, 20, stream=20, correlation=number))
        work.append(entry("cuda_runtime", "cudaLaunchKernel", (20, 31)[number], 1, correlation=number))
    found = break_down(read_trace(write(tmp_path, work)))
    assert found.shown["optimizer"] == 5
    assert found.optimizer_is_fused == is_fused


def test_what_is_exposed_is_counted_for_the_unit_in_whose_range_it_was_launched(tmp_path: Path) -> None:
    found = break_down(read_trace(write(tmp_path, trace_of_work())))
    assert found.exposed == {"layers.0": 5, "layers.1": 5}


def test_idle_time_while_the_next_batch_is_waited_for_is_told_apart(tmp_path: Path) -> None:
    found = break_down(read_trace(write(tmp_path, trace_of_work())))
    assert found.for_data == 5
    assert found.idle_for_data == 5


def test_a_wait_for_the_device_is_named_by_its_operator_and_waits_of_others_do_not_count(tmp_path: Path) -> None:
    inside = [entry("cpu_op", "aten::empty", 39.5 + number / 1000, 0.0005) for number in range(200)]
    waits = [
        entry("cpu_op", "aten::item", 39, 12),
        *inside,
        entry("cpu_op", "aten::_local_scalar_dense", 40, 10),
        entry("cuda_runtime", "cudaStreamSynchronize", 42, 6),
        entry("cuda_runtime", "cudaMemcpyAsync", 50, 1),  # which does not wait
        entry("cuda_runtime", "cudaDeviceSynchronize_ptsz", 150, 3),
        entry("cuda_runtime", "cudaMemcpy", 155, 1),
        entry("cuda_runtime", "cudaStreamSynchronize", 160, 30, thread=7),  # a thread of NCCL
        entry("user_annotation", "mfsdp profile ends", 190, 10),
        entry("cuda_runtime", "cudaDeviceSynchronize", 193, 6),  # the profiler's own
    ]
    found = break_down(read_trace(write(tmp_path, [*trace_of_work(), *waits])))
    assert found.waits == {"aten::_local_scalar_dense": 0.5, "cudaDeviceSynchronize_ptsz": 0.5, "cudaMemcpy": 0.5}
    assert found.waiting == 5
    assert found.at_work == found.step - found.waiting - found.for_data - 5, "the profiler's own wait is no work"


def test_a_validation_between_steps_is_no_part_of_them(tmp_path: Path) -> None:
    plain = break_down(read_trace(write(tmp_path, trace_of_work())))
    entries = trace_of_work()
    for one in entries:
        if one.get("ts", 0) >= 100:
            one["ts"] += 1000
        elif one["name"] == "ProfilerStep#7":
            one["dur"] += 1000
    ran = [
        entry("user_annotation", "mfsdp validation", 100, 1000),
        entry("kernel", PRODUCT, 150, 900, 20, stream=20, correlation=99),
        entry("cuda_runtime", "cudaLaunchKernel", 140, 1, correlation=99),
    ]
    found = break_down(read_trace(write(tmp_path, [*entries, *ran])))
    assert (found.shown, found.hidden, found.idle) == (plain.shown, plain.hidden, plain.idle)
    assert found.step == plain.step


def test_where_the_device_lags_behind_a_step_is_as_long_as_on_the_device(tmp_path: Path) -> None:
    entries = [entry("user_annotation", f"ProfilerStep#{number}", 10 * number, 10) for number in range(3)]
    for number in range(-1, 3):  # the first was launched before the steps
        entries.append(entry("cuda_runtime", "cudaLaunchKernel", 10 * number + 5, 1, correlation=number))
        entries.append(entry("kernel", PRODUCT, 100 * number + 108, 90, 7, stream=7, correlation=number))
    found = break_down(read_trace(write(tmp_path, entries)))
    assert found.step == pytest.approx(290 / 3)
    assert found.shown == {"compute": 90}
    assert found.idle == pytest.approx(20 / 3)


def test_what_runs_outside_of_the_steps_is_exposed_nowhere(tmp_path: Path) -> None:
    late = [
        entry("user_annotation", "mfsdp gather layers.9[0]", 199.5, 9),
        entry("cuda_runtime", "cudaLaunchKernel", 201, 1, correlation=77),
        entry("kernel", GATHER, 202, 5, 20, stream=20, correlation=77),
    ]
    found = break_down(read_trace(write(tmp_path, [*trace_of_work(), *late])))
    assert found.exposed == {"layers.0": 5, "layers.1": 5}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "reductions"),
        ("ncclSymkDevKernel_AllGather_LL", "all-gathers"),
        ("void multimem_all_gather_kernel<16>", "all-gathers"),
        ("void two_shot_all_reduce_kernel<c10::BFloat16, 16>", "reductions"),
        ("void deep_ep::intranode::dispatch<8>", "other communication"),
        ("Memcpy DtoH (Device -> Pinned)", "copies to and from the host"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("Memset (Device)", "compute"),
        ("void at::native::reduce_kernel<512, 1>", "compute"),
        ("triton_poi_fused_all_gather_into_tensor_relu_0", "compute"),
        ("triton_red_fused_add_reduce_scatter_tensor_sum_1", "compute"),
        ("void at::native::vectorized_gather_kernel<16, long>", "compute"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "compute"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    kernel = Event(name, 1.0, 3.0, 7, 1.0)
    assert [one for one, events in by_kind(Trace([kernel], [], [], [])).items() if events] == [kind]


def test_a_trace_without_steps_is_one_and_one_without_a_device_shows_the_host(tmp_path: Path) -> None:
    kernels = [one for one in trace_of_work() if one.get("cat") == "kernel"]
    found = break_down(read_trace(write(tmp_path, kernels)))
    assert (found.steps, found.step) == (1, 186)
    host = break_down(read_trace(write(tmp_path, [entry("user_annotation", *one) for one in RANGES])))
    assert not host.has_device
    assert host.host == {"mfsdp gather": 1, "mfsdp reduce": 1, "mfsdp optimizer": 2.5, "the rest": 90.5}
    said = report(host, "trace").splitlines()
    assert "nothing ran on a GPU" in said[1]
    assert [line.split()[0] for line in said[2:]] == ["gather", "reduce", "optimizer", "next", "the"]


def test_tables_of_the_command_have_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, trace_of_work())
    assert main(["profile", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{path}: 2 steps of 0.10 ms",
        "                               ms  of the step  hidden, ms",
        "compute                      0.06        55.0%",
        "optimizer                    0.01         5.0%",
        "copies on the device         0.00         3.0%        0.00",
        "all-gathers                  0.01         5.0%        0.05",
        "reductions                   0.00         2.5%        0.00",
        "other communication          0.00         3.0%        0.00",
        "copies to and from the host  0.00         2.0%        0.00",
        "idle                         0.02        24.5%",
        "the host: 0.10 ms at work, 0.00 waiting for the GPU, 0.01 for the next batch",
        "communication that nothing hides, by unit: layers.0 0.01, layers.1 0.01",
        "try first: compile=True, cuda_graph=True, blocks_per_unit=2, or a larger batch: the GPU waits for the host",
    ]
    assert main(["profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shown"]["compute"] == 55


@pytest.mark.parametrize("content", [b"no JSON", b"[]", b"{}", b'{"traceEvents": [1]}', b"\x1f\x8bno gzip"])
def test_what_is_no_trace_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["profile", str(path)]) == 2
    assert f"{path} is no trace of torch.profiler" in capsys.readouterr().err


def test_traces_without_steps_or_of_several_gpus_are_refused(tmp_path: Path) -> None:
    for empty in ([], [entry("user_annotation", "ProfilerStep#1", 5, 0)]):
        with pytest.raises(ValueError, match="neither steps nor kernels"):
            break_down(read_trace(write(tmp_path, empty)))
    two = [entry("kernel", PRODUCT, 1, 1, device=number, stream=7, correlation=number) for number in range(2)]
    with pytest.raises(ValueError, match="kernels of 2 GPUs, which would hide each other's communication"):
        read_trace(write(tmp_path, two))


BUSY = Breakdown(3, 100.0, shown={"compute": 98.0}, idle=2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "computation is 98% of the step"),
        ({"shown": {"compute": 80.0, "all-gathers": 18.0}}, 'reshard_after_forward="auto"'),
        ({"shown": {"compute": 80.0, "reductions": 18.0}}, "grad_comm_dtype=torch.bfloat16"),
        ({"shown": {"compute": 80.0, "other communication": 18.0}}, "expert or context axis"),
        ({"shown": {"compute": 80.0, "copies on the device": 18.0}}, "keep_compute_shard=True"),
        ({"shown": {"compute": 80.0, "copies to and from the host": 18.0}}, "less offload"),
        ({"shown": {"compute": 80.0, "optimizer": 18.0}}, "fused=True"),
        ({"shown": {"compute": 80.0, "optimizer": 18.0}, "optimizer_is_fused": True}, "since the optimizer is fused"),
        ({"shown": {"compute": 60.0}, "idle": 40.0, "idle_for_data": 30.0}, "more workers of the DataLoader"),
        ({"shown": {"compute": 60.0}, "idle": 40.0, "waiting": 9.0, "waits": {"aten::item": 2.0}}, "aten::item (2 a step)"),
        ({"shown": {"compute": 60.0}, "idle": 40.0, "waiting": 1.0, "waits": {"aten::item": 2.0}}, "waits for the host"),
    ],
)  # fmt: skip
def test_advice_is_about_what_costs_most_besides_computation(change: dict[str, Any], words: str) -> None:
    assert words in advice(replace(BUSY, **change))


def moments(intervals: Sequence[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda one: (one[0], one[0] + one[1])), max_size=12
)


@settings(max_examples=200, database=None, derandomize=True, deadline=None)
@given(INTERVALS, INTERVALS)
def test_sets_of_moments_are_those_of_single_moments(some: list[Interval], others: list[Interval]) -> None:
    one, other = merged(some), merged(others)
    for result, expected in [
        (one, moments(some)),
        (without(one, other), moments(some) - moments(others)),
        (common(one, other), moments(some) & moments(others)),
    ]:
        assert moments(result) == expected
        assert length(result) == len(expected), "disjoint"
        assert result == sorted(result)
    for moment in range(60):
        assert contains(one, moment + 0.5) == (moment in moments(some))
