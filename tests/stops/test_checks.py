"""What a run finds wrong with its host before it connects, and that it tells so once, with what to do."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mfsdp.launch import checks, communication
from lightning_mfsdp.launch.checks import (
    Finding,
    interface_findings,
    loader_file_findings,
    open_file_findings,
    shared_memory_findings,
    start_findings,
    variable_findings,
)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "unset it"),
        ("CUDA_LAUNCH_BLOCKING", "1", "unset it"),
        ("TORCH_NCCL_BLOCKING_WAIT", "true", "unset it"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "unset it"),
        ("NCCL_P2P_DISABLE", "1", "NVLink"),
    ],
)
def test_a_variable_that_serializes_is_found(name: str, value: str, advice: str) -> None:
    (finding,) = variable_findings({name: value, "PATH": "1"})
    assert finding.what.startswith(f"{name}={value}, with which ")
    assert advice in finding.advice


@pytest.mark.parametrize("value", ["", "0", "8", "32", "INFO", "OFF"])
def test_other_values_are_left_alone(value: str) -> None:
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "NCCL_IB_DISABLE")
    assert variable_findings(dict.fromkeys(names, value)) == []


@pytest.mark.parametrize(
    ("variable", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME=eth", True),  # a prefix
        ("NCCL_SOCKET_IFNAME==eth0", True),
        ("NCCL_SOCKET_IFNAME==eth", False),
        ("NCCL_SOCKET_IFNAME=ib,eth", True),
        ("NCCL_SOCKET_IFNAME=^docker,lo", True),  # all others
        ("NCCL_SOCKET_IFNAME=ib", False),
        ("GLOO_SOCKET_IFNAME=eth0", True),
        ("GLOO_SOCKET_IFNAME=eth", False),
        ("GLOO_SOCKET_IFNAME=ib0,eth0", True),
    ],
)
def test_an_interface_that_the_host_lacks_is_found(variable: str, is_there: bool) -> None:
    name, _, value = variable.partition("=")
    findings = interface_findings({name: value}, ["lo", "eth0"])
    assert [str(finding) for finding in findings] == (
        []
        if is_there
        else [f"{name}={value} names no interface of this host, which has eth0, lo: set it to one of them, or unset it"]
    )


def test_a_limit_of_files_is_found_that_has_no_room_for_all_ranks() -> None:
    assert open_file_findings(4096, 256) == []
    assert open_file_findings(resource.RLIM_INFINITY, 100_000) == []
    (finding,) = open_file_findings(4096, 1024)
    assert "4096 files, and with 1024 ranks it may need 9216" in finding.what
    assert "ulimit -n 65536" in finding.advice


def test_a_limit_of_files_is_found_that_loaders_may_reach() -> None:
    assert loader_file_findings(4096) == loader_file_findings(resource.RLIM_INFINITY) == []
    (finding,) = loader_file_findings(1024)
    assert "1024 files" in finding.what
    assert "ulimit -n 65536" in finding.advice


def test_shared_memory_of_a_container_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs("/")

    def of(size: int, free: int) -> list[Finding]:
        fields = list(status)
        fields[0:5] = 4096, 4096, size // 4096, free // 4096, free // 4096
        monkeypatch.setattr(checks.os, "statvfs", lambda folder: os.statvfs_result(fields))
        return shared_memory_findings()

    assert of(8 * 2**30, 2**30) == []
    assert "has 64 MiB, of which 60 MiB are free" in of(64 * 2**20, 60 * 2**20)[0].what
    assert "--shm-size" in of(8 * 2**30, 2**20)[0].advice


def test_a_system_without_shared_memory_has_no_finding(tmp_path: Path) -> None:
    assert shared_memory_findings(str(tmp_path / "none")) == []


def test_variables_of_gpus_do_not_matter_to_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING" not in "".join(map(str, start_findings("cpu", 1)))
    assert "CUDA_LAUNCH_BLOCKING" in "".join(map(str, start_findings("cuda", 1)))


def test_a_run_logs_each_finding_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = [Finding("a limit", "raise it"), Finding("a variable", "unset it")]
    monkeypatch.setattr(communication, "start_findings", lambda device_type, world_size: found)
    environment = LightningEnvironment()
    try:
        with caplog.at_level(logging.WARNING, logger=communication.__name__):
            for _ in range(2):  # as for a second fit
                communication.connect(environment, torch.device("cpu"), None, None, world_size=1)
    finally:
        environment.teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
    messages = [record.getMessage() for record in caplog.records if record.name == communication.__name__]
    assert [message.partition(": ")[2] for message in messages] == [
        "a limit: raise it. Run `lightning-mfsdp doctor` for all checks",
        "a variable: unset it. Run `lightning-mfsdp doctor` for all checks",
    ]
