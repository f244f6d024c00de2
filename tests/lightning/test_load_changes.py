"""What `on_load_checkpoint` sees of a checkpoint is not read until it is asked for, and what cannot be loaded is said with a way out."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.checkpoint.io.directory import Directory
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.load_programs import Base, Converted, Loading, Queued, Side, Teacher, Versioned, adam, fresh, whole
from tests.lightning.models import DIM, loader, seeded

KINDS = ("sharded", "full")
Change = Callable[[Any, dict[str, Any]], None]


def sides(rank: int, world: int, folder: str) -> Iterator[tuple[str, Side]]:
    """One for each kind of checkpoint."""
    warnings.simplefilter("ignore")  # Lightning's advice
    for kind in KINDS:
        own = Path(folder, kind)
        own.mkdir(parents=True, exist_ok=True)
        yield kind, Side(name=f"optim_grads_params {kind}", rank=rank, world_size=world, folder=own)


def in_world(action: Callable[..., Any], world: int = 2) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(action, world, folder)


class Bare(Base):
    """Without any hook, but with a module whose library has one."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        if batch_norm:
            self.norm = nn.BatchNorm1d(3)


class Reads:
    """What was read by one rank alone, and calls of `load_state_dict` of whole models."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.loads: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        values, load = Directory.values, nn.Module.load_state_dict

        def noting(directory: Directory, names: Any) -> Any:
            self.names += names
            return values(directory, names)

        def loading(module: nn.Module, *args: Any, **options: Any) -> Any:
            self.loads.append(type(module).__name__)
            return load(module, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Directory, "values", noting)
            patch.setattr(nn.Module, "load_state_dict", loading)
            yield


def what_is_read(rank: int, world: int, folder: str) -> None:
    for kind, side in sides(rank, world, folder):
        path, reads = side.saved(seeded(Bare)), Reads()
        with reads.watched():
            state = side.validated(fresh(Bare), path)
        assert reads.loads == reads.names == [], f"{kind}: nothing of the program takes part"

        def move(model: Any, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            model.shapes = {name: (value.shape, value.dtype, value.device) for name, value in state.items()}
            model.alike = torch.empty_like(state["head.weight"])
            state["kept"] = state.pop("scale")
            state["scale"] = state.pop("kept")
            checkpoint["state_dict"] = {name: value for name, value in state.items() if not name.startswith("head")}

        model, reads = fresh(Loading, change=move, strict=False), Reads()
        with reads.watched():
            side.validated(model, path)
        assert reads.names == [], "names and shapes are known, and entries move unread"
        assert model.shapes["head.weight"] == ((5, DIM), torch.float32, torch.device("cpu"))
        assert (model.alike.shape, type(model.alike)) == ((5, DIM), Tensor)

        def look(model: Any, checkpoint: dict[str, Any]) -> None:
            model.seen = float(checkpoint["state_dict"]["scale"].sum()), checkpoint["state_dict"]["scale"].tolist()

        model, reads = fresh(Loading, change=look), Reads()
        with reads.watched():
            state = side.validated(model, path)
        assert reads.names == (["model.scale"] if kind == "sharded" else []), "once"
        assert model.seen == (pytest.approx(state["scale"].sum().item()), state["scale"].tolist())

        class Normed(Bare):
            def __init__(self) -> None:
                super().__init__(batch_norm=True)

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(self.norm(x))

        path, model, reads = side.saved(seeded(Normed)), fresh(Normed), Reads()
        with reads.watched():
            side.validated(model, path)
        assert (reads.loads, reads.names) == (["Normed"], [])


def test_nothing_is_read_or_called_that_no_one_asked_for() -> None:
    in_world(what_is_read)


def refusals(rank: int, world: int, folder: str) -> dict[str, dict[str, str]]:
    """What each change is answered with."""

    def other_name(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["head.weights"]

    def popped(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("blocks.0.linear")

    def deleted(model: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["optimizer_states"][0]["state"]["heads"]

    def by_number(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["state"][0]

    def on_one_rank(model: Any, checkpoint: dict[str, Any]) -> None:
        if model.global_rank == 1:
            del checkpoint["state_dict"]["head.bias"]

    def no_weights(model: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]

    def dropped(model: Any, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["head.bias"]

    def other_groups(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["param_groups"][0]["params"] = []

    def more_states(model: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = [*checkpoint["optimizer_states"]] * 2

    changes: tuple[Change, ...] = (
        *(other_name, popped, deleted, by_number, on_one_rank, no_weights, dropped, other_groups, more_states),
    )
    found: dict[str, dict[str, str]] = {}
    for kind, side in sides(rank, world, folder):
        path = side.saved(seeded(Base))
        said = found[kind] = {}
        for change in changes:
            model = fresh(Loading, change=change)
            try:
                side.fit(model, path=path, max_steps=4)
            except (RuntimeError, KeyError) as error:
                said[change.__name__] = f"{type(error).__name__}: {error}"
        path = side.saved(seeded(Queued, length=7))
        for name, model in (("queue", fresh(Base)), ("queue in a hook", fresh(Queued))):
            if name == "queue":
                model.register_buffer("queue", torch.zeros(4, 3))
            with pytest.raises(RuntimeError) as info:
                side.validated(model, path)
            said[name] = str(info.value)
    return found


@pytest.fixture(scope="module")
def refused() -> list[dict[str, dict[str, str]]]:
    return in_world(refusals)


def test_names_that_are_not_there_are_answered_with_those_that_are(refused: list[dict[str, dict[str, str]]]) -> None:
    for found in refused:
        said = found["sharded"]
        assert "its model has no 'head.weights'; use one of its 14 names, such as head.weight" in said["other_name"]
        assert "has no 'blocks.0.linear'; use one of" in said["popped"]
        assert "blocks.0.linear." in said["popped"]
        assert "the state of optimizer_0 has no 'heads'" in said["deleted"]
        assert (
            "the state of optimizer_0 goes by parameter name, not by number; use one of its 13 names, such as scale, inputs.weight"
            in said["by_number"]
        )
        assert "by_number" not in found["full"], "as the optimizer's own state_dict"


@pytest.mark.parametrize("kind", KINDS)
def test_changes_that_cannot_be_loaded_are_refused(refused: list[dict[str, dict[str, str]]], kind: str) -> None:
    for found in refused:
        said = found[kind]
        assert 'left other entries in checkpoint["state_dict"] on ranks [1] than on rank 0' in said["on_one_rank"]
        assert 'checkpoint["state_dict"] is NoneType after on_load_checkpoint; leave a mapping' in said["no_weights"]
        assert "missing in the checkpoint: head.bias" in said["dropped"]
        assert "strict_loading=False" in said["dropped"]
        assert "parameter group" in said["other_groups"]
        assert 'checkpoint["optimizer_states"] = [] in on_load_checkpoint' in said["other_groups"]
        assert "holds 2 states of optimizers, but 1 optimizers are there" in said["more_states"]
        assert all(len(message) < 1000 for message in said.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_another_size_is_refused_where_the_program_does_not_resize_it(
    refused: list[dict[str, dict[str, str]]], kind: str
) -> None:
    for found in refused:
        assert "shape of queue: (7, 3) in the checkpoint, (4, 3) in the model" in found[kind]["queue"]
        assert "size mismatch for queue" in found[kind]["queue in a hook"]
        assert "does not fit the model, of which a part may be loaded already" in found[kind]["queue in a hook"]


class Unsetting(Callback):
    """Takes states out, which Lightning requires of every strategy."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"].clear()


def more_programs(rank: int, world: int, folder: str) -> None:
    for kind, side in sides(rank, world, folder):
        path = side.saved(seeded(Base))

        # Reading on one rank alone waits for no one, even if that reads everything.
        def look(model: Any, checkpoint: dict[str, Any]) -> None:
            if model.global_rank == 0:
                model.sums = [float(value.sum()) for value in checkpoint["state_dict"].values()]
                copy.deepcopy(checkpoint["optimizer_states"])

        straight = fresh(Base)
        side.fit(straight, path=path, max_steps=4)
        model = fresh(Loading, change=look)
        trainer = side.fit(model, path=path, max_steps=4)
        assert adam(trainer)["steps"][0] == 4.0
        for name, value in whole(straight).items():
            assert torch.equal(whole(model)[name], value), name

        def forget(model: Any, checkpoint: dict[str, Any]) -> None:
            del checkpoint["optimizer_states"], checkpoint["lr_schedulers"]

        for options in ({"model": fresh(Loading, change=forget)}, {"model": fresh(Base), "callbacks": [Unsetting()]}):
            trainer = side.fit(path=path, max_steps=4, **options)
            assert adam(trainer)["steps"][0] == 2.0, "begun afresh"

        if kind == "full" and not NIGHT:  # read as above
            continue

        # With an average, and with wrappers whose names are not in checkpoints.
        class Averaged(Teacher):
            def __init__(self) -> None:
                super().__init__()
                self.blocks[1] = checkpoint_wrapper(self.blocks[1])

        averaged = seeded(Averaged)
        path = side.folder / "averaged.ckpt"
        side.fit(averaged, callbacks=[ShardedEMA()]).save_checkpoint(path)
        model = fresh(Averaged)
        side.fit(model, path=path, callbacks=[ShardedEMA()], limit_train_batches=0)
        expected = whole(averaged)
        for name, value in whole(model).items():
            other = name.replace("teacher", "head")
            assert torch.equal(value, expected[other]), name
        plain = fresh(Teacher)
        assert torch.equal(side.validated(plain, path)["head.weight"], expected["head.weight"])

        # Other precisions, and main weights in host memory.
        for precision in (
            ("bf16-mixed", "bf16-true") if NIGHT else ("bf16-mixed" if kind == "sharded" else "bf16-true",)
        ):
            old = seeded(Converted, version=1)
            saved = side.folder / f"{precision}.ckpt"
            side.fit(old, precision=precision).save_checkpoint(saved)
            new = fresh(Converted)
            side.trainer(precision=precision).validate(new, loader(2, 8, rank, world), ckpt_path=saved, verbose=False)
            assert torch.equal(whole(new)["scaled.weight"], whole(old)["scaled.weight"].t())


def test_other_programs_load_what_they_leave_of_a_checkpoint() -> None:
    in_world(more_programs)


class Drawn(Base):
    """Has random numbers of each rank's own in place of some weights."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.manual_seed(self.global_rank)
        if self.where == "checkpoint":
            checkpoint["state_dict"]["head.weight"] = torch.randn(5, DIM)
        elif self.where == "model":
            self.head.reset_parameters()
            del checkpoint["state_dict"]["head.weight"]

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        state = {**state_dict, "head.weight": torch.randn(5, DIM)} if self.where == "load" else state_dict
        return super().load_state_dict(state, *args, **options)


def replicas(rank: int, world: int, folder: str) -> dict[str, tuple[Tensor, Tensor]]:
    warnings.simplefilter("ignore")  # Lightning's advice
    own, found = Path(folder), {}
    for sharding in ("no_shard sharded", "no_shard full"):
        side = Side(name=sharding, rank=rank, world_size=world, folder=own)
        path = side.saved(seeded(Base))
        for where in ("checkpoint", "load", "model"):
            model = fresh(Drawn, where=where)
            read = side.validated(model, path)["head.weight"]
            torch.manual_seed(rank)
            found[f"{sharding} {where}"] = read, torch.randn(5, DIM)
    return found


def test_replicas_take_the_weights_of_the_first_where_code_of_the_program_draws_random_numbers_as_under_ddp() -> None:
    first, second = in_world(replicas)
    for where, (read, drawn) in first.items():
        assert torch.equal(second[where][0], read), where
        assert torch.equal(read, drawn) or where.endswith("model"), where
        assert not torch.equal(second[where][1], drawn), "ranks draw other numbers"


def versions_in(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {kind: str(side.saved(seeded(Versioned))) for kind, side in sides(rank, world, folder)}


def test_versions_of_modules_are_in_every_form_of_a_checkpoint(tmp_path: Path) -> None:
    from lightning_mfsdp.checkpoint import convert_checkpoint, load_checkpoint
    from tests.checkpoint.internals import consolidate_checkpoint

    paths = {kind: Path(path) for kind, path in run_distributed(versions_in, 2, str(tmp_path))[0].items()}
    expected = dict(seeded(Versioned).state_dict()._metadata)
    assert expected["scaled"] == {"version": 2}
    consolidate_checkpoint(paths["sharded"], tmp_path / "whole.ckpt")
    names = [name for name, _ in seeded(Versioned).named_parameters()]
    convert_checkpoint(paths["full"], tmp_path / "again", parameters=names)
    for path in (*paths.values(), tmp_path / "whole.ckpt", tmp_path / "again"):
        found = load_checkpoint(path)
        assert dict(found["state_dict"]._metadata) == expected, path
        assert "module_versions" not in found
    model = Versioned.load_from_checkpoint(paths["full"])
    assert torch.equal(model.scaled.weight, load_checkpoint(paths["sharded"])["state_dict"]["scaled.weight"])


def test_names_are_translated_and_left_out_when_a_checkpoint_is_read(tmp_path: Path) -> None:
    from lightning_mfsdp.checkpoint import load_checkpoint

    for path in run_distributed(versions_in, 2, str(tmp_path))[0].values():
        plain = load_checkpoint(path)["state_dict"]
        found = load_checkpoint(
            path,
            rename=lambda name: None if name == "shift" else name.replace("head", "classifier"),
            ignore=["blocks.1.*", "scale"],
        )["state_dict"]
        assert "classifier.weight" in found
        assert not [name for name in found if name.startswith(("blocks.1", "head")) or name in ("shift", "scale")]
        assert torch.equal(found["classifier.weight"], plain["head.weight"])
        assert len(found) == len(plain) - len([name for name in plain if name.startswith("blocks.1")]) - 2
        with pytest.raises(
            ValueError, match=r"ignore=\['heads'\] fits none of the 15 names in the checkpoint, such as"
        ):
            load_checkpoint(path, ignore=["heads"])
        with pytest.raises(ValueError, match=r"rename turns .* into the same name, one"):
            load_checkpoint(path, rename=lambda name: "one")
        with pytest.raises(TypeError, match=r"expected a list of names or patterns; write ignore=\['heads'\]"):
            load_checkpoint(path, ignore="heads")
