"""`env`: versions, devices and settings of this machine, for reports of defects."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import lightning_mfsdp
from lightning_mfsdp.base.tables import readable_bytes, table_lines

__all__ = ["add_environment_command", "environment"]

_MISSING = "not found"
_DISTRIBUTIONS = (
    *("lightning", "pytorch-lightning", "lightning-utilities", "torchmetrics", "transformer-engine", "triton"),
    *("transformers", "peft", "safetensors", "fsspec", "numpy"),
)
# What changes how a run computes and communicates. Paths and addresses in them may name users and hosts.
_PREFIXES = (
    *("CUBLAS_", "CUDA_", "GLOO_", "LIGHTNING_MFSDP_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCHINDUCTOR_"),
    *("TORCH_", "TRITON_"),
)
_NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_DRIVER_S = 30


def add_environment_command(subparsers: Any) -> None:
    """Add `env` to a parser."""
    text = "versions, devices and settings of this machine, for reports of defects"
    parser = subparsers.add_parser("env", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def environment() -> dict[str, str]:
    """What `env` prints, by name. What is not there has "not found"."""
    facts = {
        "lightning-mfsdp": lightning_mfsdp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        **{name: _version(name) for name in _DISTRIBUTIONS},
        "CUDA of torch": torch.version.cuda or _MISSING,
        "ROCm of torch": torch.version.hip or _MISSING,
        "cuDNN": str(torch.backends.cudnn.version() or _MISSING),
        "NCCL": _nccl(),
        "NVIDIA driver": _driver(),
        "GPUs": str(torch.cuda.device_count()),
    }
    facts |= {f"GPU {index}": _gpu(index) for index in range(torch.cuda.device_count())}
    return facts | {name: value for name, value in sorted(os.environ.items()) if _matters(name)}


def _run(arguments: Namespace) -> int:
    facts = environment()
    lines = [json.dumps(facts, indent=2)] if arguments.json else table_lines(list(facts.items()))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def _version(distribution: str) -> str:
    """By its metadata: a library that is broken, or slow to import, is not imported."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _MISSING


def _nccl() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return _MISSING
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver() -> str:
    if shutil.which(_DRIVER[0]) is None:
        return _MISSING
    try:
        driver = subprocess.run(_DRIVER, capture_output=True, text=True, check=True, timeout=_DRIVER_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{_DRIVER[0]} failed: {error}"
    return ", ".join(sorted(set(driver.stdout.split())))


def _gpu(index: int) -> str:
    try:
        device = torch.cuda.get_device_properties(index)
    except RuntimeError as error:  # one that is broken, or that another process has for itself
        return f"cannot be used: {' '.join(str(error).split())}"
    return f"{device.name}, {readable_bytes(device.total_memory)}, compute capability {device.major}.{device.minor}"


def _matters(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
