"""fabric.load calls what a module overrides and hooks, as under DDP; names are translated and left out on request."""

from __future__ import annotations

import functools
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from tests.fabric.loops import batches, launched, train
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.load_programs import Base, Counting, Mixing, Renamed, Teacher, Versioned, fresh, whole
from tests.lightning.models import seeded

KINDS = ("ddp", "sharded", "full")
PROGRAMS: dict[str, tuple[Any, Any]] = {
    "override": (functools.partial(seeded, Teacher), functools.partial(fresh, Teacher)),
    "drops and mixes": (functools.partial(seeded, Base), functools.partial(fresh, Mixing)),
    "post hooks": (functools.partial(seeded, Base), functools.partial(fresh, Counting)),
    "pre hooks": (functools.partial(seeded, Renamed, name="classifier"), functools.partial(fresh, Renamed)),
    "older version": (functools.partial(seeded, Versioned, version=1), functools.partial(fresh, Versioned)),
    "same version": (functools.partial(seeded, Versioned), functools.partial(fresh, Versioned)),
}


def kinds_of(program: str) -> tuple[str, ...]:
    """Of its checkpoints: on a push one, and for the next program the other."""
    return KINDS[1:] if NIGHT else (KINDS[1 + list(PROGRAMS).index(program) % 2],)


def fabric_of(kind: str, world: int) -> Fabric:
    if kind == "ddp":
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp_find_unused_parameters_true")
        fabric.launch()
        return fabric
    return launched(world, {"state_dict_type": kind})


def trained(fabric: Fabric, module: Any, rank: int, world: int) -> dict[str, Any]:
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    train(fabric, model, optimizer, batches(rank, world, 2))
    return {"model": model, "optimizer": optimizer}


def loads(rank: int, world: int, folder: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        fabric = fabric_of(kind, world)
        for name, (old, new) in PROGRAMS.items():
            if kind not in ("ddp", *kinds_of(name)):
                continue
            path = Path(folder, f"{name}-{kind}")
            fabric.save(path, {"model": trained(fabric, old(), rank, world)["model"]})
            module = new()
            fabric.load(path, {"model": fabric.setup(module)})
            found.setdefault(name, {})[kind] = {**whole(module), "calls": getattr(module, "calls", None)}
            fabric.barrier()
    return found


@functools.cache
def came_to() -> list[dict[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(loads, 2, folder)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_module_that_takes_part_in_loading_comes_to_the_same_as_under_ddp(program: str) -> None:
    for found in came_to():
        for kind in kinds_of(program):
            actual, expected = found[program][kind], found[program]["ddp"]
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(
                        actual[name],
                        value,
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda text, where=f"{kind} {name}": f"{where}: {text}",
                    )
                else:
                    assert actual[name] == value, name


def translates(rank: int, world: int, folder: str) -> None:
    for kind in ("sharded", "full"):
        fabric, path = fabric_of(kind, world), Path(folder, f"translated-{kind}")
        state = trained(fabric, seeded(Renamed, name="classifier"), rank, world)
        fabric.save(path, state)
        saved = whole(state["model"].module)
        module = fresh(Base)
        own = whole(module)
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        told = "these keep their present values: blocks.1.norm.weight"
        with pytest.warns(UserWarning, match=told) if rank == 0 else nullcontext():
            fabric.strategy.load_checkpoint(
                path,
                {"model": model, "optimizer": optimizer},
                strict=False,
                rename=lambda name: name.replace("classifier", "head"),
                ignore=["blocks.1.*"],
            )
        for name, value in whole(module).items():
            expected = own[name] if name.startswith("blocks.1") else saved[name.replace("head", "classifier")]
            assert torch.equal(value, expected), name
        steps = {name: optimizer.state.get(parameter, {}) for name, parameter in module.named_parameters()}
        by_parameter = [len(one) for one in optimizer.optimizer.state.values()]
        assert len(steps) == 13
        assert sum(map(bool, by_parameter)) == 13 - 4, "what is left out begins afresh"
        plain = Path(folder, f"plain-{kind}.pt")
        if rank == 0:
            torch.save(saved, plain)
        fabric.barrier()
        again = fabric.setup(fresh(Base))
        fabric.strategy.load_checkpoint(plain, again, rename=lambda name: name.replace("classifier", "head"))
        assert torch.equal(whole(again.module)["head.weight"], saved["classifier.weight"])


def test_names_are_translated_and_left_out() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(translates, 2, folder)
