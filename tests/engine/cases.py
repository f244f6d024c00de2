"""Many small distributed cases in one start of processes: each case passes or fails by itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.helpers.distributed import run_distributed

Case = Callable[[int, int], None]


class Problems:
    """Collects what is wrong and says so at the end, so that a rank never leaves the others inside a collective."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.found.append(what)

    def close(self, got: Any, expected: Any, what: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        if got is None or got.shape != expected.shape:
            self.found.append(
                f"{what}: expected shape {tuple(expected.shape)}, got {got if got is None else got.shape}"
            )
        elif (
            got.numel() and not (got.double() - expected.double()).abs().le(atol + rtol * expected.double().abs()).all()
        ):
            worst = (got.double() - expected.double()).abs().max()
            self.found.append(f"{what}: largest difference {worst:.3g}, expected about {expected.abs().max():.3g}")

    def finish(self) -> None:
        assert not self.found, "\n".join(self.found)


_FACTORIES = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
)
_FACTORIES += (torch.tensor, torch.zeros)


class _ToGPU(TorchFunctionMode):
    """Tensors are made on the CPU, with its random numbers, and moved to the GPU, unless the caller says where."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        checkpoints_dummy = func is torch.empty and args == (
            (0,),
        )  # made again in a backward, where no mode of the main thread is
        if func not in _FACTORIES or kwargs.get("device") is not None or checkpoints_dummy:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "requires_grad": False}).to("cuda")
        return (
            made.requires_grad_() if kwargs.get("requires_grad") else made
        )  # torch.func refuses to have it set, whatever the value


def on_gpus(case: Case, rank: int, world: int) -> None:
    """A case that does not say where it makes its tensors, on this rank's GPU."""
    with _ToGPU():
        case(rank, world)


def device_type() -> str:
    """Where the ranks of a case compute."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def run_cases(cases: Mapping[str, Case], world: int, backend: str = "gloo") -> dict[str, str]:
    """Run every case on `world` ranks; returns the tracebacks of all ranks by case, empty where it passed."""
    outcomes = run_distributed(_run_all, world, dict(cases), backend=backend)
    return {
        name: "\n".join(f"rank {rank}: {outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name])
        for name in cases
    }


def _run_all(rank: int, world: int, cases: dict[str, Case]) -> dict[str, str]:
    outcome = {}
    for name, case in cases.items():
        try:
            case(rank, world)
            outcome[name] = ""
        except (Exception, pytest.fail.Exception):
            outcome[name] = traceback.format_exc()
    return outcome
