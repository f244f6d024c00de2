"""Calls share processes and nothing else."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.engine import fully_shard
from tests.helpers.distributed import RANKS, RankError, run_distributed
from tests.helpers.process_state import ProcessState


def process(rank: int, world: int) -> int:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world
    return os.getpid()


def test_calls_share_processes_and_have_a_process_group_each() -> None:
    both = run_distributed(process, 2)
    assert run_distributed(process, 2) == both
    assert run_distributed(process, 3)[:2] == both
    assert run_distributed(process, 1) == both[:1]
    assert not set(run_distributed(process, 2, apart=True)) & {*both, os.getpid()}


def what_is_imported(rank: int, world: int) -> bool:
    return {"lightning.pytorch", "torch.distributed.checkpoint", "lightning_mfsdp.fabric.strategy"} <= set(sys.modules)


def test_the_server_has_imported_what_is_heavy() -> None:
    """The first statement of a forked process would import it anew, unseen but for the time."""
    assert run_distributed(what_is_imported, 1, apart=True) == [True]


def settings(rank: int, world: int) -> dict[str, Any]:
    return {
        "device": str(torch.get_default_device()),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "drawn": (random.random(), numpy.random.rand(), torch.rand(()).item()),
        "environment": sorted(name for name in os.environ if "PYTEST" not in name),
        "folder": os.getcwd(),
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "filters": len(warnings.filters),
        "signal": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "safe": torch.serialization.get_safe_globals(),
    }


def change_everything(rank: int, world: int, folder: str) -> int:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.manual_seed(rank)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(folder)
    sys.argv.append("left behind")
    sys.path.append("left behind")
    warnings.simplefilter("error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.serialization.add_safe_globals([ProcessState])
    return os.getpid()


def test_what_a_call_sets_is_put_back(tmp_path: Any) -> None:
    before, processes = run_distributed(settings, 2), run_distributed(process, 2)
    assert run_distributed(change_everything, 2, str(tmp_path)) == processes
    assert run_distributed(settings, 2) == before
    assert run_distributed(process, 2) == processes


def warned(rank: int, world: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            warnings.warn("once for a place", UserWarning, stacklevel=1)
    return len(caught)


def test_a_warning_of_one_call_is_given_in_the_next_as_well() -> None:
    assert run_distributed(warned, 1) == run_distributed(warned, 1) == [1]


def replace(rank: int, world: int) -> int:
    dist.all_gather = print
    return os.getpid()


def add_to_the_package(rank: int, world: int) -> int:
    fully_shard.__globals__["left_behind"] = replace
    return os.getpid()


def leave_a_hook(rank: int, world: int) -> int:
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    return os.getpid()


def leave_a_thread(rank: int, world: int) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def leave_a_mode(rank: int, world: int) -> int:
    torch.overrides.BaseTorchFunctionMode().__enter__()
    return os.getpid()


@pytest.mark.parametrize("leave", [replace, add_to_the_package, leave_a_hook, leave_a_thread, leave_a_mode])
def test_a_process_that_cannot_be_put_back_serves_no_other_call(leave: Any) -> None:
    left = run_distributed(leave, 1)
    assert run_distributed(process, 1) != left


def leave_a_group(rank: int, world: int) -> int:
    dist.new_group([0])
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_of_a_call_end_with_it() -> None:
    assert run_distributed(leave_a_group, 2) == [2, 1]
    assert run_distributed(leave_a_group, 2) == [2, 1]


def fail(rank: int, world: int, how: str) -> None:
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(f"on rank {rank}")
    dist.barrier()


@pytest.mark.parametrize(("how", "said"), [("raise", "ZeroDivisionError: on rank 1"), ("kill", "died: exit code -9")])
def test_one_rank_that_fails_ends_all_and_the_next_call_gets_others(how: str, said: str) -> None:
    before = run_distributed(process, 2)
    with pytest.raises(RankError, match=said):
        run_distributed(fail, 2, how)
    assert not set(run_distributed(process, 2)) & set(before)


def test_a_process_that_was_killed_between_calls_is_replaced() -> None:
    (before,) = run_distributed(process, 1)
    os.kill(before, signal.SIGKILL)
    RANKS._ranks[0][0].join()
    assert run_distributed(process, 1) != [before]


def test_what_cannot_be_sent_is_an_error_and_costs_no_process() -> None:
    before = run_distributed(process, 1)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_distributed(lambda rank, world: None, 1)
    assert run_distributed(process, 1) == before
