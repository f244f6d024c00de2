"""Sharded checkpoints through ModelCheckpoint and ckpt_path."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from lightning_mfsdp.checkpoint.state.index import plain_name
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizer_state import state_of_rows
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

STEPS = 4  # two epochs of two: Lightning resumes plain loaders at the start of an epoch
EPOCH = 8 * STEPS // 2

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Scheduled(Classifier):
    """With a frozen layer, a tied weight, a parameter with fewer rows than ranks, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((1, 12), 0.5))
        self.alias = self.blocks[0].linear
        self.inputs.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.tiny.mean()

    def configure_optimizers(self) -> Any:
        decay = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        rest = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


def local_state(trainer: Any, model: LightningModule) -> dict[str, Any]:
    """Rows this rank owns: weights and optimizer state, by name."""
    optimizer = trainer.optimizers[0]
    names = {id(view.local): view.name for view in sharded_parameters(model)}
    return {
        "weights": {view.name: view.main.clone() for view in sharded_parameters(model)},
        "optimizer": {
            names[id(parameter)]: {key: value.clone() for key, value in state.items()}
            for parameter, state in state_of_rows(optimizer).items()
            if id(parameter) in names
        },
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "step": trainer.global_step,
    }


def trainer_for(
    folder: str, world_size: int, *, max_steps: int = STEPS, sharding: str = "optim_grads_params", **options: Any
) -> Any:
    return make_trainer(
        folder,
        world_size,
        max_epochs=-1,
        max_steps=max_steps,
        strategy=MFSDPStrategy(units=["Block"], sharding=sharding),
        **options,
    )


def save_at(rank: int, world_size: int, folder: str, sharding: str) -> dict[str, Any]:
    """Train STEPS steps with a checkpoint half-way; returns the states at both points."""
    strict_warnings()
    model = seeded(Scheduled)
    saver = ModelCheckpoint(
        dirpath=folder, filename="half", every_n_train_steps=STEPS // 2, save_top_k=1, save_last=True
    )
    data = loader(8 // world_size, EPOCH, rank, world_size)
    half = trainer_for(
        folder, world_size, max_steps=STEPS // 2, sharding=sharding, enable_checkpointing=True, callbacks=[saver]
    )
    half.fit(model, data)
    at_half = local_state(half, model)
    straight_model = seeded(Scheduled)
    straight = trainer_for(folder, world_size, sharding=sharding)
    straight.fit(straight_model, data)
    return {
        "half": at_half,
        "end": local_state(straight, straight_model),
        "full_half": full_state(model),
        "full_end": full_state(straight_model),
    }


def resume(rank: int, world_size: int, path: str, sharding: str) -> dict[str, Any]:
    """Load without a step, validate from the file, and continue to the end."""
    strict_warnings()
    data = loader(8 // world_size, EPOCH, rank, world_size)
    still_model = seeded(Scheduled)
    with torch.no_grad():
        for parameter in still_model.parameters():
            parameter.add_(1.0)
    still = trainer_for("", world_size, max_steps=STEPS // 2, sharding=sharding)
    still.fit(still_model, data, ckpt_path=path)
    result = {"half": local_state(still, still_model), "full_half": full_state(still_model)}
    model = seeded(Scheduled)
    trainer = trainer_for("", world_size, sharding=sharding)
    result["val_loss"] = trainer.validate(model, data, ckpt_path=path, verbose=False)[0]["val_loss"]
    trainer.fit(model, data, ckpt_path=path)
    result["end"] = local_state(trainer, model)
    result["full_end"] = full_state(model)
    return result


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_distributed(save_at, 2, str(folder), "optim_grads_params")


@pytest.fixture(scope="module")
def resumed(saved: Any) -> list[Any]:
    return run_distributed(resume, 2, str(saved[0] / "last.ckpt"), "optim_grads_params")


def test_model_checkpoint_writes_lightnings_directory_layout(saved: Any) -> None:
    folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == ["half.ckpt", "last.ckpt"]
    files = sorted(path.name for path in (folder / "last.ckpt").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    meta = torch.load(folder / "last.ckpt" / "meta.pt", weights_only=True)
    assert meta["global_step"] == STEPS // 2
    assert {"loops", "callbacks", "lr_schedulers"} <= meta.keys()
    assert "state_dict" not in meta
    assert "optimizer_states" not in meta


def test_resume_on_the_same_ranks_is_bit_equal_at_the_checkpoint_and_at_the_end(saved: Any, resumed: list[Any]) -> None:
    for rank, (before, after) in enumerate(zip(saved[1], resumed, strict=True)):
        assert_same(after["half"], before["half"], f"rank {rank}, half-way")
        assert_same(after["end"], before["end"], f"rank {rank}, end")


def test_validate_from_a_checkpoint_gives_the_loss_of_its_weights(saved: Any, resumed: list[Any]) -> None:
    model = seeded(Scheduled)
    model.load_state_dict(saved[1][0]["full_half"] | dict(model.named_buffers()), strict=False)
    with torch.no_grad():
        loss = torch.stack([model.loss(batch) for batch in loader(8, EPOCH)]).mean()
    assert resumed[0]["val_loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(("world_size", "sharding"), [(1, "optim_grads_params"), (3, "optim")])
def test_a_checkpoint_loads_on_another_number_of_ranks_and_another_strategy(
    saved: Any, world_size: int, sharding: str
) -> None:
    found = run_distributed(load_only, world_size, str(saved[0] / "last.ckpt"), sharding)
    for result in found:
        assert_same(result["weights"], saved[1][0]["full_half"])
    merged: dict[str, dict[str, Tensor]] = {}
    for result in found[:1] if sharding == "no_shard" else found:
        for name, state in result["local"]["optimizer"].items():
            merged.setdefault(name, {}).setdefault("exp_avg", []).append(state["exp_avg"])  # type: ignore[union-attr, arg-type, call-overload]
    expected: dict[str, list[Tensor]] = {}
    for before in saved[1]:
        for name, state in before["half"]["optimizer"].items():
            expected.setdefault(name, []).append(state["exp_avg"])
    assert merged.keys() == expected.keys()
    for name, pieces in expected.items():
        assert torch.equal(torch.cat(list(merged[name]["exp_avg"])), torch.cat(pieces)), name


def load_only(rank: int, world_size: int, path: str, sharding: str) -> dict[str, Any]:
    strict_warnings()
    model = seeded(Scheduled)
    trainer = trainer_for("", world_size, max_steps=STEPS // 2, sharding=sharding)
    trainer.fit(model, loader(1, 2 * world_size, rank, world_size), ckpt_path=path)
    return {"local": local_state(trainer, model), "weights": full_state(model)}


def test_lightnings_consolidation_reads_the_directory(saved: Any) -> None:
    folder, results = saved
    checkpoint = _load_distributed_checkpoint(folder / "last.ckpt")
    for name, tensor in results[0]["full_half"].items():
        assert torch.equal(checkpoint["model"][name], tensor)
    assert torch.equal(checkpoint["model"]["shift"], torch.full((12,), 0.25))
    assert torch.equal(checkpoint["model"]["alias.weight"], checkpoint["model"]["blocks.0.linear.weight"])
    group = checkpoint["optimizer_0"]["param_groups"][1]
    assert group["lr"] == pytest.approx(0.001)
    assert "head.bias" in group["params"]
    assert checkpoint["optimizer_0"]["state"]["tiny"]["exp_avg"].shape == (1, 12)
    assert checkpoint["global_step"] == STEPS // 2


# -- other files and errors ------------------------------------------------------------------------------------------


def single_file(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Load a checkpoint that Lightning wrote without sharding, in one process."""
    strict_warnings()
    data = loader(8 // world_size, EPOCH, rank, world_size)
    model = seeded(Scheduled)
    trainer = trainer_for("", world_size)
    trainer.fit(model, data, ckpt_path=f"{folder}/plain.ckpt")
    return full_state(model)


def test_a_single_file_checkpoint_resumes_sharded(tmp_path: Path) -> None:
    strict_plain = make_trainer(tmp_path, 1, strategy="auto", max_epochs=-1, max_steps=STEPS // 2)
    data = loader(8, EPOCH)
    model = seeded(Scheduled)
    strict_plain.fit(model, data)
    strict_plain.save_checkpoint(tmp_path / "plain.ckpt")
    rest = make_trainer(tmp_path, 1, strategy="auto", max_epochs=-1, max_steps=STEPS)
    rest.fit(model, data, ckpt_path=tmp_path / "plain.ckpt")
    states = run_distributed(single_file, 2, str(tmp_path))
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(states[0][name], tensor.detach(), rtol=1e-5, atol=1e-6)


class Wider(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)
        self.extra = nn.Linear(2, 2)


class OtherGroups(Scheduled):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Stranger(Scheduled):
    """Its optimizer also trains a parameter that nobody else knows."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        configured["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(4, 3))], "weight_decay": 0.0})
        configured["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(configured["optimizer"], 2)
        return configured


class Loose(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)
        self.strict_loading = False


def problems(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    data = loader(8, EPOCH)
    found: dict[str, Any] = {}
    saver = seeded(Scheduled)
    first = trainer_for(folder, world_size, max_steps=2)
    first.fit(saver, data)
    first.save_checkpoint(f"{folder}/good.ckpt")
    first.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)

    def message(model: LightningModule, path: str, **options: Any) -> str:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as info:
            trainer_for(folder, world_size, **options).fit(model, data, ckpt_path=path)
        return str(info.value)

    found["wider"] = message(seeded(Wider), f"{folder}/good.ckpt")
    found["groups"] = message(seeded(OtherGroups), f"{folder}/good.ckpt")
    found["missing"] = message(seeded(Scheduled), f"{folder}/nothing.ckpt")
    Path(folder, "empty").mkdir()
    found["empty"] = message(seeded(Scheduled), f"{folder}/empty")
    strange = trainer_for(folder, world_size, max_steps=2)
    strange.fit(seeded(Stranger), data)
    with pytest.raises(ValueError, match="that is not in the module") as unknown:
        strange.save_checkpoint(f"{folder}/strange.ckpt")
    found["strange"] = str(unknown.value), Path(folder, "strange.ckpt").exists()
    loose = seeded(Loose)
    with pytest.warns(UserWarning, match="these keep their present values: extra.weight, extra.bias"):
        trainer_for(folder, world_size).validate(loose, data, ckpt_path=f"{folder}/good.ckpt", verbose=False)
    found["loose"] = full_state(loose)["tiny"], full_state(saver)["tiny"]
    again = trainer_for(folder, world_size, max_steps=3)
    with pytest.warns(UserWarning, match="holds no state for 1 of 1 optimizers"):
        again.fit(seeded(Scheduled), data, ckpt_path=f"{folder}/weights.ckpt")
    found["steps"] = again.global_step
    Path(folder, "foreign").mkdir()
    Path(folder, "foreign", "notes.txt").write_text("mine")
    with pytest.raises(RuntimeError) as info:
        first.save_checkpoint(f"{folder}/foreign")
    found["foreign"] = str(info.value)
    Path(folder, "file.ckpt").write_text("old")
    first.save_checkpoint(f"{folder}/file.ckpt")
    found["replaced"] = Path(folder, "file.ckpt", "meta.pt").is_file()
    with pytest.raises(TypeError) as storage:
        first.save_checkpoint(f"{folder}/x.ckpt", storage_options={"a": 1})
    found["storage_options"] = str(storage.value)
    return found


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_distributed(problems, 1, str(tmp_path_factory.mktemp("problems")))[0]  # type: ignore[no-any-return]


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(messages: dict[str, Any]) -> None:
    assert "shape of head.weight: (5, 12) in the checkpoint, (7, 12) in the model" in messages["wider"]
    assert "missing in the checkpoint: extra.bias" in messages["wider"]
    assert "strict_loading=False" in messages["wider"]


def test_other_parameter_groups_are_refused_by_name(messages: dict[str, Any]) -> None:
    assert "parameter group 0 differs" in messages["groups"]
    assert "head.bias" in messages["groups"]


def test_an_optimizer_may_train_what_is_not_in_the_module_but_its_state_is_not_lost_silently(
    messages: dict[str, Any],
) -> None:
    said, written = messages["strange"]
    assert "an optimizer holds a parameter of shape (4, 3)" in said
    assert not written


def test_a_path_without_a_checkpoint_says_what_is_expected_there(messages: dict[str, Any]) -> None:
    assert "there is nothing at that path" in messages["missing"]
    assert "meta.pt" in messages["empty"]


def test_names_may_be_missing_when_loading_is_not_strict(messages: dict[str, Any]) -> None:
    loaded, expected = messages["loose"]
    assert torch.equal(loaded, expected)


def test_fit_continues_from_a_checkpoint_of_weights_only_with_a_warning(messages: dict[str, Any]) -> None:
    assert messages["steps"] == 3


def test_a_directory_with_other_content_is_not_written_into_but_a_file_is_replaced(messages: dict[str, Any]) -> None:
    assert "other content" in messages["foreign"]
    assert messages["replaced"]
    assert "storage_options" in messages["storage_options"]


def test_training_is_what_one_process_does(saved: Any) -> None:
    model = seeded(Scheduled)
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch in [*loader(8, EPOCH), *loader(8, EPOCH)]:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
        schedule.step()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(saved[1][0]["full_end"][name], tensor.detach(), rtol=1e-5, atol=1e-6)


# -- nothing is lost silently ----------------------------------------------------------------------------------------


class Renaming(Classifier):
    """Puts a prefix before every name it saves, or casts what it saves, or the whole of it."""

    def __init__(self, *, cast: bool = False, whole: bool = False) -> None:
        super().__init__()
        self.cast, self.whole = cast, whole

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if self.whole:
            state = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
        checkpoint["state_dict"] = {
            f"ema.{name}": value.double() if self.cast else value for name, value in state.items()
        }


class Checkpointed(Classifier):
    """Blocks inside PyTorch's wrapper, whose names differ between parameters() and state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)


class Compiled(Classifier):
    """Blocks inside torch.compile's wrapper, which changes names too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)


def losses_avoided(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    data = loader(8 // world_size, 8, rank, world_size)
    found: dict[str, Any] = {}

    def fitted(model: LightningModule, **options: Any) -> Any:
        trainer = make_trainer(folder, world_size, strategy=MFSDPStrategy(units=["Block"]), **options)
        trainer.fit(model, data)
        return trainer

    renaming = seeded(Renaming)
    fitted(renaming).save_checkpoint(f"{folder}/renamed.ckpt")
    found["renamed"] = full_state(renaming)
    with pytest.raises(RuntimeError) as cast:
        fitted(seeded(Renaming, cast=True)).save_checkpoint(f"{folder}/cast.ckpt")
    found["cast"] = str(cast.value)
    fitted(seeded(Renaming, cast=True, whole=True)).save_checkpoint(f"{folder}/whole.ckpt")

    wrapped = seeded(Checkpointed)
    trainer = fitted(wrapped)
    trainer.save_checkpoint(f"{folder}/wrapped.ckpt")
    found["wrapped"] = full_state(wrapped)
    # The compiler looks at inputs of a graph, which have no gradient of their own.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    compiled = fitted(seeded(Compiled))
    compiled.save_checkpoint(f"{folder}/compiled.ckpt")
    found["trained compiled"] = full_state(compiled.lightning_module)
    for path in ("wrapped", "compiled"):
        for kind in (Checkpointed, Classifier, Compiled):
            model = seeded(kind)
            make_trainer(
                folder, world_size, max_epochs=2, strategy=MFSDPStrategy(units=["Block"]), limit_train_batches=0
            ).fit(model, data, ckpt_path=f"{folder}/{path}.ckpt")
            found[f"{path} into {kind.__name__}"] = full_state(model)

    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(1.0)
    write = FileSystemWriter.write_data
    with pytest.MonkeyPatch.context() as patch:

        def fail_on_one(self: Any, *args: Any) -> Any:
            if rank == world_size - 1:
                raise OSError("disk full")
            return write(self, *args)

        patch.setattr(FileSystemWriter, "write_data", fail_on_one)
        with pytest.raises(RuntimeError, match=r"an earlier checkpoint there is unchanged: rank 1: OSError: disk full"):
            trainer.save_checkpoint(f"{folder}/wrapped.ckpt")
    after = seeded(Checkpointed)
    make_trainer(folder, world_size, strategy=MFSDPStrategy(units=["Block"])).validate(
        after, data, ckpt_path=f"{folder}/wrapped.ckpt", verbose=False
    )
    found["after a failed save"] = full_state(after)
    trainer.save_checkpoint(f"{folder}/wrapped.ckpt")
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kept")
    return folder, run_distributed(losses_avoided, 2, str(folder))[0]


def test_names_changed_by_a_hook_are_saved_with_the_right_rows(kept: Any) -> None:
    folder, found = kept
    saved_model = _load_distributed_checkpoint(folder / "renamed.ckpt")["model"]
    for name, tensor in found["renamed"].items():
        assert torch.equal(saved_model[f"ema.{name}"], tensor)


def test_values_computed_from_sharded_parameters_are_refused_by_name(kept: Any) -> None:
    assert "ema.blocks.0.linear.weight" in kept[1]["cast"]
    assert "value.full_tensor()" in kept[1]["cast"]


def test_the_cure_of_that_message_works(kept: Any) -> None:
    folder, found = kept
    saved_model = _load_distributed_checkpoint(folder / "whole.ckpt")["model"]
    for name, tensor in found["renamed"].items():
        assert torch.equal(saved_model[f"ema.{name}"], tensor.double()), name


@pytest.mark.parametrize("model", ["Checkpointed", "Classifier", "Compiled"])
@pytest.mark.parametrize("path", ["wrapped", "compiled"])
def test_weights_under_a_wrapper_are_restored_with_and_without_it(kept: Any, path: str, model: str) -> None:
    found = kept[1]
    expected = found["wrapped" if path == "wrapped" else "trained compiled"]
    loaded = {plain_name(name): tensor for name, tensor in found[f"{path} into {model}"].items()}
    assert any(name != plain_name(name) for name in expected)
    assert_same(loaded, {plain_name(name): tensor for name, tensor in expected.items()})


def test_a_save_that_fails_half_way_leaves_the_old_checkpoint(kept: Any) -> None:
    folder, found = kept
    assert_same(found["after a failed save"], found["wrapped"])
    assert sorted(path.name for path in folder.iterdir() if "wrapped" in path.name) == ["wrapped.ckpt"]
    saved_model = _load_distributed_checkpoint(folder / "wrapped.ckpt")["model"]
    assert torch.equal(saved_model["head.weight"], found["wrapped"]["head.weight"] + 1.0)
