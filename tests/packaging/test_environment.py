"""`lightning-mfsdp env`: what a report of a defect needs to say about a machine, whatever that has."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import lightning_mfsdp
from lightning_mfsdp.commands import environment as command
from lightning_mfsdp.commands import main


def environment(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["env", "--json"]) == 0
    facts: dict[str, str] = json.loads(capsys.readouterr().out)
    return facts


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no GPU, no NCCL, and of the libraries torch alone."""

    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", nothing)
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_the_table_has_a_line_for_each_fact(capsys):
    facts = environment(capsys)
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(facts)
    for line, (name, value) in zip(lines, facts.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(value)


def test_versions_are_those_of_this_process(capsys):
    facts = environment(capsys)
    assert facts["lightning-mfsdp"] == lightning_mfsdp.__version__
    assert facts["torch"] == torch.__version__
    assert facts["GPUs"] == str(torch.cuda.device_count())


@pytest.mark.usefixtures("bare_machine")
def test_what_is_not_there_is_said_to_be_missing(capsys):
    facts = environment(capsys)
    assert facts["lightning"] == facts["transformer-engine"] == facts["NCCL"] == facts["NVIDIA driver"] == "not found"
    assert facts["torch"] == torch.__version__
    assert facts["GPUs"] == "0"


@pytest.mark.usefixtures("bare_machine")
def test_each_gpu_is_described_and_a_broken_one_says_why(capsys, monkeypatch):
    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("CUDA error:\nout of order")
        return SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    facts = environment(capsys)
    assert facts["GPUs"] == "2"
    assert facts["GPU 0"] == "NVIDIA H100, 80.0 GiB, compute capability 9.0"
    assert facts["GPU 1"] == "cannot be used: CUDA error: out of order"


@pytest.mark.usefixtures("smi")
def test_the_driver_is_what_every_gpu_has(capsys, monkeypatch):
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.95\n580.95\n"))
    assert environment(capsys)["NVIDIA driver"] == "580.95"


@pytest.mark.usefixtures("smi")
@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), subprocess.TimeoutExpired("smi", 30), subprocess.CalledProcessError(9, "smi")]
)
def test_a_driver_that_does_not_answer_says_why(error, capsys, monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command.subprocess, "run", run)
    assert environment(capsys)["NVIDIA driver"] == f"nvidia-smi failed: {error}"


def test_settings_that_matter_are_shown_and_no_others(capsys, monkeypatch):
    shown = {"NCCL_DEBUG": "INFO", "LIGHTNING_MFSDP_NAMESPACE": "lightning.pytorch", "WORLD_SIZE": "2"}
    for name, value in (shown | {"MASTER_ADDR": "node17", "SECRET_TOKEN": "x"}).items():
        monkeypatch.setenv(name, value)
    facts = environment(capsys)
    assert shown.items() <= facts.items()
    assert not {"MASTER_ADDR", "SECRET_TOKEN"} & facts.keys()
