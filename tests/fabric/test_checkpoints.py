"""fabric.save and fabric.load: directories and files, filters, other ranks, the Trainer's checkpoints, and what is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import nn

from lightning_mfsdp import MFSDPStrategy
from tests.fabric.loops import assert_same, batches, launched, rows, train, whole
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded

STEPS = 2


def fresh(fabric: Any, *, shift: float = 0.0) -> dict[str, Any]:
    """A state as a script has it: a model, its optimizer, a schedule, a loss without weights, a number."""
    module = seeded()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(shift)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "loss": nn.CrossEntropyLoss(), "step": 0}


def advance(fabric: Any, state: dict[str, Any], data: list[Any]) -> None:
    for batch in data:
        train(fabric, state["model"], state["optimizer"], [batch])
        state["schedule"].step()
        state["step"] += 1


def seen(state: dict[str, Any]) -> dict[str, Any]:
    options = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"].param_groups]
    return {
        "rows": rows(state["model"].module, state["optimizer"].optimizer),
        "options": options,
        "step": state["step"],
    }


def save_and_resume(rank: int, world_size: int, folder: str, kind: str) -> dict[str, Any]:
    """Save half-way, go on; then resume with a fresh state that was something else before."""
    fabric = launched(world_size, {"state_dict_type": kind})
    data = batches(rank, world_size, 2 * STEPS)
    state = fresh(fabric)
    advance(fabric, state, data[:STEPS])
    half, weights = seen(state), whole(state["model"])
    buffer = state["model"].module.shift
    buffer.fill_(3.0 + rank)  # every rank has its own, and that of rank 0 is saved
    fabric.save(f"{folder}/{kind}", state)
    fabric.save(f"{folder}/{kind}", state)  # a checkpoint is replaced
    buffer.fill_(3.0)
    advance(fabric, state, data[STEPS:])
    resumed = fresh(fabric, shift=1.0)
    objects = dict(resumed)
    rest = fabric.load(f"{folder}/{kind}", resumed)
    assert rest == {}
    assert all(resumed[key] is objects[key] for key in ("model", "optimizer", "schedule", "loss"))
    assert_same(seen(resumed), half, "half-way")
    assert resumed["model"].module.shift.eq(3.0).all()
    advance(fabric, resumed, data[STEPS:])
    assert_same(seen(resumed), seen(state), "end")
    only = {"model": fresh(fabric, shift=1.0)["model"]}
    rest = fabric.load(f"{folder}/{kind}", only)
    assert_same(whole(only["model"]), weights)
    assert rest["step"] == STEPS
    return weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fabric")
    first = run_distributed(save_both, 2, str(folder))[0]
    return folder, first


def save_both(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = [save_and_resume(rank, world_size, folder, kind) for kind in ("sharded", "full")]
    assert_same(found[0], found[1])
    several(rank, world_size, folder)
    filters(rank, world_size, folder)
    with_the_trainer(rank, world_size, folder)
    return found[0]


def several(rank: int, world_size: int, folder: str) -> None:
    """Two models with their optimizers, and one that is not sharded, in one checkpoint."""
    fabric = launched(world_size)
    one, two = fresh(fabric), fresh(fabric, shift=0.5)
    plain = nn.Linear(2, 2)
    for state, count in ((one, 1), (two, 2)):
        train(fabric, state["model"], state["optimizer"], batches(rank, world_size, count))
    both = {"a": one["model"], "b": two["model"], "oa": one["optimizer"], "ob": two["optimizer"], "plain": plain}
    fabric.save(f"{folder}/several", both)
    other, another, again = fresh(fabric), fresh(fabric), nn.Linear(2, 2)
    fabric.load(
        f"{folder}/several",
        {
            "b": another["model"],
            "a": other["model"],
            "oa": other["optimizer"],
            "ob": another["optimizer"],
            "plain": again,
        },
    )
    for before, after in ((one, other), (two, another)):
        assert_same(seen(after)["rows"], seen(before)["rows"])
    # Rank 0 writes what all ranks hold alike.
    for name, value in fabric.broadcast(dict(plain.state_dict())).items():
        assert torch.equal(again.state_dict()[name], value)


def filters(rank: int, world_size: int, folder: str) -> None:
    for kind in ("sharded", "full"):
        fabric = launched(world_size, {"state_dict_type": kind})
        state = fresh(fabric)
        path = f"{folder}/filtered-{kind}"
        fabric.save(path, {"model": state["model"]}, filter={"model": lambda name, _: not name.startswith("head")})
        target = fresh(fabric, shift=1.0)["model"]
        before = whole(target)
        with pytest.raises(RuntimeError, match=r"missing in the checkpoint: head.weight"):
            fabric.load(path, {"model": target})
        assert_same(whole(target), before)
        if rank == 0:
            with pytest.warns(UserWarning, match=r"keep their present values: head.weight, head.bias"):
                fabric.load(path, {"model": target}, strict=False)
        else:
            fabric.load(path, {"model": target}, strict=False)
        expected = {
            name: before[name] if name.startswith("head") else value for name, value in whole(state["model"]).items()
        }
        assert_same(whole(target), expected)


def with_the_trainer(rank: int, world_size: int, folder: str) -> None:
    """One layout: Fabric goes on where the Trainer stopped, and the Trainer validates what Fabric saved."""
    module = seeded()
    strategy = MFSDPStrategy(units=["Block"])
    trainer = make_trainer(tempfile.gettempdir(), world_size, strategy=strategy, max_epochs=-1, max_steps=STEPS)
    data = loader(8 // world_size, 8 * STEPS, rank, world_size)
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{folder}/trainer.ckpt")
    fabric = launched(world_size)
    state = fresh(fabric, shift=1.0)
    rest = fabric.load(
        f"{folder}/trainer.ckpt", {"model": state["model"], "optimizer_0": state["optimizer"]}, weights_only=True
    )
    assert rest["global_step"] == STEPS
    assert_same(whole(state["model"]), full_state(module))
    assert_same(seen(state)["rows"], rows(module, trainer.optimizers[0]))
    meta = {"pytorch-lightning_version": rest["pytorch-lightning_version"], "global_step": 0, "epoch": 0}
    train(fabric, state["model"], state["optimizer"], batches(rank, world_size, 1))
    fabric.save(f"{folder}/fabric.ckpt", {"model": state["model"], "optimizer_0": state["optimizer"], **meta})
    again = seeded()
    validator = make_trainer(tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]))
    validator.validate(again, data, ckpt_path=f"{folder}/fabric.ckpt", verbose=False)
    assert_same(full_state(again), whole(state["model"]))


def test_a_directory_has_lightnings_layout_with_the_users_keys(saved: Any) -> None:
    folder, weights = saved
    files = sorted(path.name for path in (folder / "sharded").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    checkpoint = _load_distributed_checkpoint(folder / "sharded")
    assert checkpoint.keys() == {"model", "optimizer", "schedule", "step", "module_versions"}
    assert_same({name: checkpoint["model"][name] for name in weights}, weights)
    assert checkpoint["optimizer"]["state"]["head.weight"]["exp_avg"].shape == (5, 12)
    assert "head.bias" in checkpoint["optimizer"]["param_groups"][0]["params"]
    assert checkpoint["step"] == STEPS


def test_a_full_checkpoint_is_what_plain_pytorch_saves(saved: Any) -> None:
    folder, weights = saved
    checkpoint = torch.load(folder / "full", weights_only=True)
    model = Classifier()
    model.load_state_dict(checkpoint["model"])
    assert_same({name: parameter.detach() for name, parameter in model.named_parameters()}, weights)
    optimizer = model.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert optimizer.state[model.head.weight]["exp_avg"].shape == (5, 12)


def alone(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What two ranks wrote, on one; then everything that is refused."""
    fabric = launched(world_size)
    found = {}
    for path in ("sharded", "full"):
        state = fresh(fabric, shift=1.0)
        fabric.load(f"{folder}/{path}", state)
        found[path] = whole(state["model"])
        advance(fabric, state, batches(rank, world_size, 1))
    state = fresh(fabric, shift=1.0)
    fabric.load_raw(f"{folder}/raw.pt", state["model"])
    found["raw"] = whole(state["model"])
    model, optimizer = state["model"], state["optimizer"]

    def says(kind: type[Exception], match: str, call: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            call(*arguments, **options)

    load, sharded = fabric.load, f"{folder}/sharded"
    says(KeyError, r"holds nothing for \['epoch'\], only \['model', 'optimizer'", load, sharded, {"epoch": 1})
    says(KeyError, r"holds nothing for \['other'\]", load, f"{folder}/full", {"other": model})
    values = {"model": model, "epoch": 7}
    with pytest.warns(UserWarning, match=r"holds nothing for \['epoch'\], which keep their present values"):
        load(sharded, values, strict=False)
    assert values["epoch"] == 7
    says(ValueError, "nothing to load into", load, sharded)
    says(ValueError, "there is nothing at that path", load, f"{folder}/none", {"model": model})
    says(ValueError, "there is nothing at that path", fabric.load_raw, f"{folder}/none", model)
    says(TypeError, "an optimizer alone cannot be loaded", fabric.load_raw, sharded, optimizer)
    says(
        ValueError,
        "'optimizer' is an optimizer, but no single module",
        fabric.save,
        f"{folder}/x",
        {"optimizer": optimizer},
    )
    says(ValueError, "no single module of the state", load, sharded, {"optimizer": optimizer})
    says(TypeError, "storage_options are for", fabric.strategy.save_checkpoint, f"{folder}/x", {}, storage_options={})
    Path(folder, "foreign").mkdir()
    Path(folder, "foreign", "notes.txt").write_text("mine")
    says(RuntimeError, "other content", fabric.save, f"{folder}/foreign", {"model": model})
    other = fabric.setup(Wider())
    says(RuntimeError, r"shape of head.weight: \(5, 12\) in the checkpoint, \(7, 12\)", load, sharded, {"model": other})
    return found


class Wider(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)


def test_another_number_of_ranks_reads_it_and_what_does_not_fit_is_refused(saved: Any) -> None:
    folder, weights = saved
    torch.save(torch.load(folder / "full", weights_only=True)["model"], folder / "raw.pt")
    (found,) = run_distributed(alone, 1, str(folder))
    for path in ("sharded", "full", "raw"):
        assert_same(found[path], weights, path)
