"""`lightning-mfsdp doctor`: what it finds in a host, between hosts and in a folder for checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_mfsdp.commands import main
from lightning_mfsdp.commands.doctor import command, ranks, storage
from lightning_mfsdp.commands.doctor.ranks import (
    Exchange,
    RankFacts,
    clock_findings,
    difference_findings,
    first_of_hosts,
    measured_clock,
    outliers,
    shared_gpu_findings,
    unreached,
    unreached_findings,
)
from lightning_mfsdp.commands.doctor.speed import (
    all_gather_speed,
    host_speed_findings,
    network_rate,
    network_speed_findings,
    nvlink_rate,
    product_speed,
    product_speed_findings,
)
from lightning_mfsdp.commands.doctor.storage import (
    Storage,
    speed_findings,
    storage_findings,
    storage_of_rank,
    tried_renames,
)
from tests.helpers.distributed import run_distributed
from tests.lightning.test_launch import ROOT, environment, free_port, launch_together, slurm
from tests.stops.test_networks import named, unable

HOST_A = RankFacts(host="a", network="a", addresses=["127.0.0.1"], gpu="", facts={"torch": "2.13"}, findings=[])
HOST_B = replace(HOST_A, host="b", network="b")
FOUR = [HOST_A, HOST_A, HOST_B, HOST_B]


def on_ranks(size: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank returns; ranks are threads."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Exchange(store, rank, size)), range(size)))


def test_every_rank_learns_the_value_of_each() -> None:
    def work(channel: Exchange) -> list[Any]:
        values = [channel.gather([channel.rank, "first"]), channel.gather(channel.rank**2)]
        channel.close()
        return values

    assert on_ranks(3, work) == [[[[rank, "first"] for rank in range(3)], [0, 1, 4]]] * 3
    assert Exchange(None, 0, 1).gather("alone") == ["alone"]
    assert on_ranks(2, lambda channel: channel.gather_facts(FOUR[2 * channel.rank])) == [[HOST_A, HOST_B]] * 2


def test_hosts_of_equal_names_are_told_apart() -> None:
    images = [HOST_A, HOST_A, replace(HOST_B, host="a"), replace(HOST_B, host="c", network="c")]
    (names, *_) = on_ranks(4, lambda channel: [facts.host for facts in channel.gather_facts(images[channel.rank])])
    assert names == ["a of rank 0", "a of rank 0", "a of rank 2", "c"]


def test_ranks_of_a_host_are_found_in_any_order() -> None:
    assert first_of_hosts([HOST_B, HOST_A, HOST_B, HOST_A]) == {0: [0, 2], 1: [1, 3]}


def test_what_differs_between_hosts_is_found_with_ranks_and_hosts() -> None:
    newer = replace(HOST_B, facts={"torch": "2.14", "NCCL_ALGO": "Ring", "GPU 0": "H200", "LOCAL_RANK": "1"})
    findings = difference_findings([HOST_A, HOST_A, newer, newer])
    assert [finding.what for finding in findings] == [
        "GPU 0 differs: not set on ranks 0-1 (a); H200 on ranks 2-3 (b)",
        "NCCL_ALGO differs: not set on ranks 0-1 (a); Ring on ranks 2-3 (b)",
        "torch differs: 2.13 on ranks 0-1 (a); 2.14 on ranks 2-3 (b)",
    ]
    advice = [finding.advice for finding in findings]
    assert advice[0].startswith("choose equal nodes")
    assert advice[1].startswith("set it alike on all ranks")
    assert advice[2] == "install the same version on all hosts"
    assert difference_findings(FOUR) == []


def test_a_gpu_of_two_ranks_is_found() -> None:
    on_gpus = [replace(facts, gpu=f"GPU-{rank % 2}") for rank, facts in enumerate(FOUR)]
    assert shared_gpu_findings(on_gpus) == []
    on_gpus[1] = on_gpus[0]
    (finding,) = shared_gpu_findings(on_gpus)
    assert finding.what == "ranks 0-1 (a) compute on the same GPU, GPU-0"


def test_a_clock_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = on_ranks(2, measured_clock)[0]
    assert ahead[0] == 0
    (finding,) = clock_findings(FOUR, [0.0, 0.0, -7.25, -7.25])
    assert finding.what.startswith("the clock of host b is 7.2 s behind that of a")
    assert clock_findings(FOUR, [0.0, 0.0, 0.2, 0.2]) == []


def test_hosts_reach_each_other() -> None:
    assert on_ranks(4, lambda channel: unreached(FOUR, channel)) == [[[], [], [], []]] * 4


def test_a_host_that_is_not_reached_is_found() -> None:
    lost = replace(HOST_B, addresses=["255.255.255.255"])  # to which no connection can be opened
    facts = [HOST_A, lost, replace(HOST_A, host="c", network="c")]
    failed = on_ranks(3, lambda channel: unreached(facts, channel))[0]
    assert failed == [[1], [], [1]]
    (finding,) = unreached_findings(facts, failed)
    assert finding.what == "host b at 255.255.255.255 is not reached from a, c"
    assert "firewall" in finding.advice


def test_outliers_are_far_below_the_others() -> None:
    assert outliers({}) == outliers({"a": 1.0}) == outliers({"a": 1.0, "b": 0.9}) == []
    assert outliers({"a": 10.0, "b": 4.0}) == ["b"]
    assert outliers({"a": 10.0, "b": 4.0, "c": 9.0, "d": 90.0}) == ["b"]


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_computes_slowly_is_found() -> None:
    on_gpus = [replace(facts, gpu=str(rank)) for rank, facts in enumerate(FOUR)]
    (finding,) = product_speed_findings(on_gpus, [780e12, 790e12, 640e12, 700e12])
    assert finding.what.startswith("rank 2 on b computes 640 TFLOP/s, and half of all ranks 780 or more")
    assert "nvidia-smi -q -d PERFORMANCE" in finding.advice
    assert product_speed_findings(on_gpus, [780e12, 790e12, 700e12, 690e12]) == []
    assert product_speed_findings(FOUR, [0.1e12, 0.1e12, 0.1e12, 0.01e12]) == [], "CPUs"


def test_matrix_products_have_a_speed() -> None:
    assert product_speed(torch.device("cpu"), 0.01) > 0


def gather_speed(rank: int, world_size: int) -> float:
    everyone = dist.group.WORLD
    assert everyone is not None
    return all_gather_speed(everyone, torch.device("cpu"), 0.01)


def measure(rank: int, world_size: int) -> None:
    assert gather_speed(rank, world_size) > 0


def test_an_all_gather_has_a_speed() -> None:
    run_distributed(measure, 2)


def test_a_slow_host_is_found() -> None:
    (finding,) = host_speed_findings({"a": 300e9, "b": 100e9, "c": 310e9}, nvlink=None)
    assert finding.what.startswith("an all-gather within host b has 100.0 GB/s")
    (finding,) = host_speed_findings({"a": 20e9}, nvlink=450e9)
    assert "NVLinks carry 450 GB/s" in finding.what
    assert host_speed_findings({"a": 300e9}, nvlink=450e9) == []


def test_a_network_that_is_hardly_used_is_found() -> None:
    (finding,) = network_speed_findings(2e9, 400e9)
    assert "NCCL_IB_HCA" in finding.advice
    assert network_speed_findings(200e9, 400e9) == network_speed_findings(1e9, None) == []


def test_the_rate_of_active_ports_is_read(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert network_rate(tmp_path) == 100e9
    assert network_rate(tmp_path / "none") is None


def test_the_rate_of_nvlinks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\nprintf "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: 26.562 GB/s\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvlink_rate() == pytest.approx(53.124e9)
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert nvlink_rate() is None


# -- storage -----------------------------------------------------------------------------------------------------------


def test_a_shared_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "new/checkpoints"
    found = on_ranks(4, lambda channel: storage_of_rank(folder, FOUR, channel, 0.0))
    assert found[0] == found[3]
    assert [bool(entry.write_speed) for entry in found[0]] == [True, False, True, False], "first ranks of hosts write"
    assert not any(entry.problem for entry in found[0])
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_shared_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has a folder of its own under the same path."""
    monkeypatch.setattr(storage, "_SEEN_S", 0.0)
    folders = [tmp_path / "of a", tmp_path / "of b"]
    facts = [HOST_A, HOST_B]
    real = storage._looked_at

    def looked_at(folder: Path, own: Path, *rest: Any) -> Storage:
        mine = folders[rest[0] == "written-by-1"]
        return real(mine, mine / own.name, *rest)

    monkeypatch.setattr(storage, "_looked_at", looked_at)
    found = on_ranks(2, lambda channel: storage_of_rank(folders[0], facts, channel, 0.0))[0]
    (finding,) = storage_findings(folders[0], facts, found)
    assert "cannot hold checkpoints of this run: it does not see what rank 0 wrote" in finding.what
    assert finding.what.endswith("(host b)")
    assert finding.advice == "name a folder that all hosts mount and this user may write to"


def test_a_folder_that_cannot_be_written_to_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = on_ranks(2, lambda channel: storage_of_rank(tmp_path / "file/folder", FOUR[1:3], channel, 0.0))[1]
    (finding,) = storage_findings(tmp_path / "file/folder", FOUR[1:3], found)
    assert "rank 0 failed: [Errno 20] Not a directory" in finding.what


def test_files_and_folders_are_moved_as_a_save_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    tried_renames(tmp_path / "a")
    assert (tmp_path / "a/moved").is_dir()
    monkeypatch.setattr(storage, "exchange", lambda first, second: False)
    (tmp_path / "b").mkdir()
    assert tried_renames(tmp_path / "b") is False


def test_slow_late_and_full_storage_is_found(tmp_path: Path) -> None:
    good = Storage(write_speed=500e6, free_bytes=2**40)
    facts = [HOST_A, HOST_B]
    assert storage_findings(tmp_path, facts, [good, good]) == []
    (late,) = storage_findings(tmp_path, facts, [good, replace(good, late_s=3.0)])
    assert "hosts see what another wrote after 3.0 s" in late.what
    (full,) = storage_findings(tmp_path, facts, [replace(good, free_bytes=2**30), good])
    assert "has 1.0 GiB left" in full.what
    (slow,) = speed_findings(tmp_path, {"a": 100e6})
    assert (
        "takes 100 MB/s of all hosts, so a checkpoint of 8 billion parameters with Adam takes 16 minutes" in slow.what
    )
    (uneven,) = speed_findings(tmp_path, {"a": 1e9, "b": 1e8})
    assert uneven.what.startswith("host b writes 100 MB/s")


# -- the command -------------------------------------------------------------------------------------------------------


def test_alone_it_prints_facts_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "shared_memory_findings", list)
    monkeypatch.setattr(command, "loader_file_findings", lambda limit: [])
    monkeypatch.setattr(ranks, "environment", lambda: dict.fromkeys(("torch", "NCCL", "NVIDIA driver", "GPUs"), "some"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert main(["doctor", "--seconds", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "ranks            1 on 1 host\n" in text
    assert "storage          not looked at; --storage FOLDER does\n\nno findings\n" in text
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert main(["doctor", "--seconds", "0.01"]) == 1
    text = capsys.readouterr().out
    assert "\nfindings: 1\n\nCUDA_DEVICE_MAX_CONNECTIONS=1, with which" in text
    assert "\n  unset it: the engine orders" in text


def test_slurm_starts_it_on_all_ranks(tmp_path: Path) -> None:
    options = ["--seconds", "0.01", "--storage", str(tmp_path / "storage")]
    own = {"CUDA_LAUNCH_BLOCKING": "1", "MASTER_PORT": str(free_port())}
    command = ["-m", "lightning_mfsdp", "doctor", *options]
    first, second = launch_together(command, [slurm(task, 1) | own for task in range(2)], tmp_path, code=1)
    assert_reported(first)
    assert "on 1 host" not in second, "rank 0 prints alone"


def assert_reported(text: str) -> None:
    """On two ranks of one host, with a variable that is none for a run."""
    assert text.count("on 1 host\n") == 1, text
    assert "ranks  " in text
    assert re.search(r"^matrix products .* TFLOP/s on rank [01], the slowest$", text, re.MULTILINE)
    assert "all-gather in a host, gloo" in text
    assert "MB/s of all hosts" in text
    assert text.count("CUDA_LAUNCH_BLOCKING=1, with which the host waits") == 1, "once for all ranks"


@pytest.mark.nightly
def test_torchrun_starts_it_on_all_ranks(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--seconds", "0.01", "--storage", str(tmp_path)]
    variables = {**environment(), "CUDA_LAUNCH_BLOCKING": "1"}
    done = subprocess.run(
        [*launcher, "-m", "lightning_mfsdp", "doctor", *options],
        env=variables, capture_output=True, text=True, timeout=250, cwd=ROOT,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert_reported(done.stdout)
    assert done.returncode == 1, output


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_hosts_are_compared_and_measured(tmp_path: Path) -> None:
    if problem := unable():
        pytest.skip(problem)
    nodes = named("doc")
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    options = ["--master-addr=10.77.0.1", "--master-port=29444", "-m", "lightning_mfsdp", "doctor", "--seconds=0.1"]
    try:
        nodes.up()
        for node in range(2):
            hidden = ["ip", "netns", "exec", nodes.names[node], "unshare", "--uts"]
            shell = ["sh", "-c", f'hostname node{node}; exec "$@"', "sh", sys.executable]
            variables = environment(GLOO_SOCKET_IFNAME="cable", NCCL_ALGO=("Ring", "Tree")[node])
            command = [*hidden, *shell, *launcher, f"--node-rank={node}", *options, f"--storage={tmp_path / 'storage'}"]
            with (tmp_path / f"output-{node}").open("w") as output:
                nodes.processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=ROOT))
        codes = [process.wait(500) for process in nodes.processes]
    finally:
        nodes.down()
    text, other = [(tmp_path / f"output-{node}").read_text() for node in range(2)]
    assert codes == [1, 1], text + other
    assert re.search(r"ranks +4 on 2 hosts\n", text), text
    assert re.search(r"connections +all hosts to all\n", text)
    assert re.search(r"all-gather in a host, gloo +[\d.]+ GB/s on node[01], the slowest\n", text)
    assert re.search(r"all-gather of all, gloo +[\d.]+ GB/s\n", text)
    assert "NCCL_ALGO differs: Ring on ranks 0-1 (node0); Tree on ranks 2-3 (node1)" in text
    assert "NCCL_ALGO differs" not in other, "rank 0 prints alone"
    assert "exit barrier" not in other, "no node waits for the other"
