"""Pickles in checkpoints run nothing unless the user says so, wherever in a checkpoint they lie and whatever reads it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_mfsdp.checkpoint import export_checkpoint
from lightning_mfsdp.checkpoint.io.trust import read_table
from lightning_mfsdp.commands import main
from tests.fabric.loops import launched
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

MARK = "MFSDP_TEST_MARK"
NAME = f"{__name__}.leave_mark"


def leave_mark() -> str:
    """What a hostile pickle calls."""
    Path(os.environ[MARK]).touch()
    return "ran"


class Hostile:
    """Runs `leave_mark` when it is unpickled."""

    def __reduce__(self) -> Any:
        return leave_mark, ()


class WithNote(torch.nn.Module):
    """Keeps something in the state dict that is no tensor."""

    note: Any = "plain"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Noted(Classifier):
    """Keeps hyperparameters, options of the optimizer and extra state, of any kind."""

    def __init__(self, hyper: Any = "plain", option: Any = "plain", extra: Any = None) -> None:
        super().__init__()
        self.hyper, self.option = hyper, option
        if extra is not None:
            self.noted = WithNote()
            self.noted.note = extra

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(self.parameters()), "option": self.option}], lr=self.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["notes"] = {"first": [1, 2], "hyper": self.hyper}


def rewrite_table(path: Path, change: Callable[[Any], None]) -> None:
    table = pickle.loads((path / ".metadata").read_bytes())
    change(table)
    (path / ".metadata").write_bytes(pickle.dumps(table))


def spoil_table(table: Any) -> None:
    table.storage_meta.modules.append(Hostile())


def spoil_piece(path: Path) -> None:
    """Put a hostile pickle where a piece of a tensor is."""
    torch.save(Hostile(), path / "piece")

    def change(table: Any) -> None:
        key = next(
            key
            for key in table.storage_data
            if key.fqn == "model.head.weight"
            and not isinstance(table.state_dict_metadata[key.fqn], BytesStorageMetadata)
        )
        file = path / table.storage_data[key].relative_path
        size, added = file.stat().st_size, (path / "piece").read_bytes()
        file.write_bytes(file.read_bytes() + added)
        table.storage_data[key].offset, table.storage_data[key].length = size, len(added)

    rewrite_table(path, change)
    (path / "piece").unlink()


# Where the pickle lies, and what the refusal names beside the class.
PLACES = {
    "meta": "meta.pt: notes.hyper",
    "option": "optimizer_0.param_groups.0.option",
    "extra": "model.noted._extra_state",
    "table": ".metadata",
    "file": "file.ckpt: notes.hyper",
}


@contextmanager
def marked(folder: str, rank: int) -> Iterator[Path]:
    """A file that a hostile pickle would leave."""
    os.environ[MARK] = f"{folder}/mark-{rank}"
    path = Path(os.environ[MARK])
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def outcome(folder: str, rank: int, action: Callable[[], Any]) -> tuple[str, bool]:
    """The message of an action's error, or nothing; and whether code ran."""
    with marked(folder, rank) as mark:
        try:
            action()
        except RuntimeError as error:
            return str(error), mark.exists()
        return "", mark.exists()


def load_all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Write hostile checkpoints, and load each by the Trainer and by Fabric, with all values of weights_only."""
    strict_warnings()
    data = loader(4, 8, rank, world_size)

    def trainer(**options: Any) -> Any:
        strategy = {"strategy": options.pop("strategy", "mfsdp")}
        return make_trainer(folder, world_size, max_epochs=-1, max_steps=1, **strategy, **options)

    def save(name: str, model: Any, kind: str = "sharded") -> None:
        from lightning_mfsdp import MFSDPStrategy

        run = trainer(strategy=MFSDPStrategy(state_dict_type=kind))  # type: ignore[arg-type]
        run.fit(model, data)
        run.save_checkpoint(f"{folder}/{name}.ckpt")

    hostile = Hostile()
    save("meta", seeded(Noted, hyper=hostile))
    save("option", seeded(Noted, option=hostile))
    save("extra", seeded(Noted, extra=hostile))
    save("file", seeded(Noted, hyper=hostile), "full")
    save("plain", seeded(Noted))
    if rank == 0:
        for name in ("table", "piece"):
            shutil.copytree(f"{folder}/plain.ckpt", f"{folder}/{name}.ckpt")
        rewrite_table(Path(folder, "table.ckpt"), spoil_table)
        spoil_piece(Path(folder, "piece.ckpt"))
    torch.distributed.barrier()

    found: dict[str, Any] = {}
    for place in (*PLACES, "piece", "plain"):
        path = f"{folder}/{place}.ckpt"
        extra = "plain" if place == "extra" else None
        for weights_only in (None, True, False):

            def fit(path: str = path, weights_only: bool | None = weights_only, extra: Any = extra) -> None:
                trainer().fit(seeded(Noted, extra=extra), data, ckpt_path=path, weights_only=weights_only)

            def validate(path: str = path, weights_only: bool | None = weights_only, extra: Any = extra) -> None:
                model = seeded(Noted, extra=extra)
                trainer().validate(model, data, ckpt_path=path, weights_only=weights_only, verbose=False)

            def load(path: str = path, weights_only: bool | None = weights_only, extra: Any = extra) -> None:
                fabric = launched(world_size)
                module = seeded(Noted, extra=extra)
                model, optimizer = fabric.setup(module, module.configure_optimizers())
                state = {"model": model, "optimizer_0": optimizer}
                if path.endswith("file.ckpt"):
                    state = {"state_dict": model}
                fabric.load(path, state, weights_only=weights_only)

            for name, action in (("fit", fit), ("validate", validate), ("fabric", load)):
                found[f"{place} {name} {weights_only}"] = outcome(folder, rank, action)
        with torch.serialization.safe_globals([leave_mark]):
            found[f"{place} allowed"] = outcome(folder, rank, fit_default(trainer, data, path, extra))
    found["unharmed"] = unharmed(trainer, data, f"{folder}/extra.ckpt")
    return found


def fit_default(trainer: Any, data: Any, path: str, extra: Any) -> Callable[[], None]:
    return lambda: trainer().fit(seeded(Noted, extra=extra), data, ckpt_path=path)


def unharmed(trainer: Any, data: Any, path: str) -> bool:
    """A refusal comes before anything is written into the model."""
    model = seeded(Noted, extra="plain")
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(RuntimeError, match="is not loaded by default"):
        trainer().validate(model, data, ckpt_path=path, verbose=False)
    return all(value.full_tensor().equal(before[name]) for name, value in model.named_parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(load_all, 2, str(folder))


@pytest.mark.parametrize("entry", ["fit", "validate", "fabric"])
@pytest.mark.parametrize("place", PLACES)
def test_a_class_from_a_checkpoint_is_refused_by_name_unless_the_user_trusts_it(
    loaded: list[dict[str, Any]], place: str, entry: str
) -> None:
    reads_it = not (place == "option" and entry == "validate")
    for rank, found in enumerate(loaded):
        for weights_only in (None, True):
            message, ran = found[f"{place} {entry} {weights_only}"]
            assert not ran
            if not reads_it:
                assert message == ""
                continue
            for part in (NAME, PLACES[place], f"add_safe_globals([{NAME}])", "weights_only=False"):
                assert part in message, (weights_only, message)
        # Rank 0 reads the table of contents for all.
        assert found[f"{place} {entry} False"] == ("", reads_it and (place != "table" or rank == 0))


@pytest.mark.parametrize("place", PLACES)
def test_a_class_that_the_user_has_allowed_is_loaded(loaded: list[dict[str, Any]], place: str) -> None:
    for rank, found in enumerate(loaded):
        assert found[f"{place} allowed"] == ("", place != "table" or rank == 0)


def test_pieces_of_tensors_run_nothing_even_where_the_user_trusts_a_checkpoint(loaded: list[dict[str, Any]]) -> None:
    for found in loaded:
        for entry in ("fit", "validate", "fabric"):
            for weights_only in (None, True, False):
                message, ran = found[f"piece {entry} {weights_only}"]
                assert not ran
                assert "is a tensor, and a piece of it holds" in message
                assert NAME in message


def test_plain_checkpoints_load_and_a_refusal_leaves_the_model_alone(loaded: list[dict[str, Any]]) -> None:
    for found in loaded:
        assert all(
            found[f"plain {entry} {trust}"] == ("", False) for entry in ("fit", "fabric") for trust in (None, True)
        )
        assert found["unharmed"]


@pytest.mark.parametrize("place", [*PLACES, "piece"])
def test_commands_run_nothing_without_trust(
    folder: Path, loaded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = folder / f"{place}.ckpt"
    commands = [
        ["info"],
        ["verify"],
        ["consolidate", "whole.ckpt"],
        ["convert", "converted.ckpt"],
        ["export", "weights"],
    ]
    ran, refused = {}, {}
    for trusting in ([], ["--trust"]):
        for name, *output in commands:
            out = [str(tmp_path / "-".join((*trusting, *output)))] if output else []
            with marked(str(tmp_path), 0) as mark:
                code = main(["checkpoint", name, str(path), *out, *trusting])
                ran[name, bool(trusting)] = mark.exists()
            said = "".join(capsys.readouterr())
            refused[name, bool(trusting)] = (code, said)
    assert not any(happened for (_, trusting), happened in ran.items() if not trusting)
    code, said = refused["verify", False]
    assert code == 1
    assert NAME in said
    if place == "piece":
        assert not any(ran.values())
        return
    for part in (PLACES[place], f"add_safe_globals([{NAME}])", "--trust"):
        assert part in said
    if place in ("option", "extra"):
        return
    assert ran["verify", True]
    if place in ("meta", "table", "file"):
        assert refused["info", False][0] == 2
        assert NAME in refused["export", False][1]
        assert refused["info", True][0] == 0
        assert ran["export", True]


def test_exports_from_python_run_nothing_without_the_users_word(folder: Path, loaded: Any, tmp_path: Path) -> None:
    for place in ("meta", "table", "file"):
        for weights_only in (None, True):
            with marked(str(tmp_path), 0) as mark:
                with pytest.raises(RuntimeError, match="weights_only=False"):
                    export_checkpoint(folder / f"{place}.ckpt", tmp_path / "out", weights_only=weights_only)
                assert not mark.exists()
        with marked(str(tmp_path), 0) as mark:
            export_checkpoint(folder / f"{place}.ckpt", tmp_path / place, weights_only=False)
            assert mark.exists()


# -- the table of contents ---------------------------------------------------------------------------------------------


def test_tables_of_contents_read_as_they_were_written(folder: Path, loaded: Any) -> None:
    path = folder / "plain.ckpt" / ".metadata"
    with path.open("rb") as file:
        read = read_table(file, "table", trusted=False)
    assert read == pickle.loads(path.read_bytes())
    kinds = {type(value) for value in (read, *read.storage_data, *read.state_dict_metadata.values())}
    assert all(kind.__module__.startswith("torch.distributed.checkpoint") for kind in kinds)


def test_a_table_of_contents_can_change_no_class(folder: Path, loaded: Any, tmp_path: Path) -> None:
    """`BUILD` of a class itself sets attributes of it."""
    from torch.distributed.checkpoint.metadata import Metadata

    code = (  # Metadata, (None, {"version": "other"}), BUILD
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x07\x00\x00\x00versionX\x05\x00\x00\x00others\x86b."
    )
    (tmp_path / ".metadata").write_bytes(code)
    with (
        (tmp_path / ".metadata").open("rb") as file,
        pytest.raises(RuntimeError, match="would set version of the class"),
    ):
        read_table(file, "table", trusted=False)
    assert Metadata.version is None


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/hostname", "a/b.distcp", "..", "C:\\x.distcp", "a\\..\\b"])
def test_a_table_of_contents_names_files_beside_it_alone(
    folder: Path, loaded: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(folder / "plain.ckpt", tmp_path / "copy.ckpt")

    def change(table: Any) -> None:
        table.storage_data[MetadataIndex("optimizer_0.param_groups.0.lr")].relative_path = name

    rewrite_table(path, change)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "expected the name of a file of the directory" in capsys.readouterr().out
