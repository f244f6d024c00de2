"""ShardedEMA: the average of one process, in evaluation, in checkpoints, in every precision."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_mfsdp import AveragedWeights, EngineStateError, MFSDPStrategy, load_from_checkpoint, sharded_parameters
from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.checkpoint import export_checkpoint, load_checkpoint
from lightning_mfsdp.commands import main
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

STEPS = 4  # two epochs of two
EPOCH = 8 * STEPS // 2
DECAY = 0.75

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Watched(Classifier):
    """With a frozen weight, tied weights, a parameter with fewer rows than ranks, and batch statistics; notes what validation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((1, 12), 0.5))
        self.statistics = nn.BatchNorm1d(12, affine=False)
        self.alias = self.blocks[0].linear
        self.inputs.bias.requires_grad_(False)
        self.val_losses: list[float] = []
        self.shown: list[dict[str, Tensor]] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        self.statistics(x.detach())  # fills buffers
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale * self.tiny.mean() + self.shift)

    def on_validation_start(self) -> None:
        self.shown.append(rows(self))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.fails:
            raise ZeroDivisionError("in validation")
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))


class Noting(Callback):
    """What training leaves after each optimizer step, on this rank."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.after_validation: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(rows(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after_validation.append(rows(pl_module))


def rows(module: LightningModule) -> dict[str, Tensor]:
    return {view.name: view.main.clone() for view in sharded_parameters(module)}


def averaged_rows(ema: ShardedEMA) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in ema.parameter_state.rows().items()}


def make(folder: str, world_size: int, *, steps: int = STEPS, kind: str = "sharded", **options: Any) -> Any:
    strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind, sharding=options.pop("sharding", 3))  # type: ignore[arg-type]
    return make_trainer(folder, world_size, max_epochs=-1, max_steps=steps, strategy=strategy, **options)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


# -- against one process ---------------------------------------------------------------------------------------------


def averaged_plainly(accumulate: int, steps: int, *, due: dict[int, float]) -> tuple[Watched, dict[str, Tensor]]:
    """`due`: after which optimizer steps the average is updated, and with which decay."""
    model = seeded(Watched)
    optimizer = model.configure_optimizers()
    batches = iter(loader(8, size=8 * accumulate * steps))
    average: AveragedModel | None = None
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (model.loss(next(batches)) / accumulate).backward()
        optimizer.step()
        if step in due:
            if average is None:
                average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
            average.multi_avg_fn = get_ema_multi_avg_fn(due[step])
            average.update_parameters(model)
    assert average is not None
    return model, {name: value.detach().clone() for name, value in average.module.state_dict().items()}


CASES: list[tuple[dict[str, Any], int, dict[int, float]]] = [
    ({"decay": DECAY}, 1, dict.fromkeys(range(1, STEPS + 1), DECAY)),
    ({"decay": DECAY, "start_step": 2, "every_n_steps": 2}, 2, {2: DECAY, 4: DECAY}),
    ({"decay": 0.15, "warmup": True}, 1, {1: 0.1, 2: 0.15, 3: 0.15, 4: 0.15}),
    ({"decay": lambda updates: updates / 8}, 1, {step + 1: step / 8 for step in range(STEPS)}),
    ({"decay": DECAY, "device": "cpu", "dtype": torch.float64}, 1, dict.fromkeys(range(1, STEPS + 1), DECAY)),
]


def averaged(rank: int, world_size: int, numbers: list[int]) -> list[dict[str, Any]]:
    """The average of each case, and that of plain PyTorch on the same threads."""
    found = []
    for options, accumulate, due in [CASES[number] for number in numbers]:
        model, ema = seeded(Watched), ShardedEMA(**options)
        trainer = make("", world_size, callbacks=[ema], accumulate_grad_batches=accumulate)
        trainer.fit(model, loader(8 // world_size, 8 * accumulate * STEPS, rank, world_size))
        plain, expected = averaged_plainly(accumulate, STEPS, due=due)
        found.append(
            {
                "average": ema.averaged_state_dict(keep=rank == 0),
                # Buffers are the model's present ones, also where the last update was earlier.
                "expected": expected | {name: value.clone() for name, value in plain.named_buffers()},
                "weights": full_state(model),
                "plain": {name: value.detach() for name, value in plain.named_parameters()},
                "updates": (ema.updates, len(due)),
            }
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ema")


def on_one_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    cases = list(range(len(CASES)))
    return {"averaged": averaged(rank, world_size, cases), "refused": refused(rank, world_size, folder)}


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    return {
        "averaged": averaged(rank, world_size, [1, 2]),
        "evaluated": evaluated(rank, world_size, folder),
        "precisions": in_precisions(rank, world_size),
        "saved": saved(rank, world_size, folder),
        "resumed": resumed(rank, world_size, folder),
    }


def on_other_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    return {"averaged": averaged(rank, world_size, [1] if NIGHT else []), "loaded": loaded(rank, world_size, folder)}


@pytest.fixture(scope="module")
def on_one(folder: Path) -> dict[str, Any]:
    return run_distributed(on_one_rank, 1, str(folder))[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(on_two_ranks, 2, str(folder))


@pytest.fixture(scope="module")
def on_four(folder: Path, on_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reads what `on_two` saved; on a push on one rank."""
    return run_distributed(on_other_ranks, 4 if NIGHT else 1, str(folder))


def test_one_rank_averages_to_the_bit_like_plain_pytorch(on_one: dict[str, Any]) -> None:
    cases = on_one["averaged"]
    for case in cases:
        assert case["updates"][0] == case["updates"][1]
        assert_same(case["weights"], case["plain"])
        assert any(not torch.equal(case["average"][name], value) for name, value in case["weights"].items())
        trained = {name: value.dtype for name, value in case["average"].items() if name == "scale"}
        if trained["scale"] == torch.float64:
            for name, value in case["expected"].items():
                torch.testing.assert_close(case["average"][name], value, check_dtype=False)
        else:
            assert_same(case["average"], case["expected"])
    assert cases[-1]["average"]["scale"].dtype == torch.float64


@pytest.mark.parametrize("ranks", ["on_two", pytest.param("on_four", marks=pytest.mark.nightly)])
def test_several_ranks_average_what_one_process_does(ranks: str, request: pytest.FixtureRequest) -> None:
    cases, *others = (found["averaged"] for found in request.getfixturevalue(ranks))
    for case in cases:
        for name, value in case["expected"].items():
            if "statistics" not in name:  # each rank has its own
                torch.testing.assert_close(case["average"][name], value, rtol=1e-4, atol=1e-5)
    assert all(case["average"] == {} for other in others for case in other)


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluated(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model, ema, noting = seeded(Watched), ShardedEMA(DECAY), Noting()
    data = loader(8 // world_size, EPOCH, rank, world_size)
    trainer = make(folder, world_size, callbacks=[ema, noting])
    trainer.fit(model, data, data)
    found: dict[str, Any] = {
        "steps": noting.steps,
        "shown": list(model.shown),
        "after": noting.after_validation,
        "averaged": averaged_rows(ema),
        "val_losses": list(model.val_losses),
        "average": ema.averaged_state_dict(keep=True),
    }
    trainer.test(model, data, verbose=False)
    found["test_loss"] = float(trainer.callback_metrics["test_loss"])
    found["predictions"] = trainer.predict(model, data)
    found["own_loss"] = make(folder, world_size).validate(model, data, verbose=False)[0]["val_loss"]
    with pytest.warns(UserWarning, match="there is no average of this model") if rank == 0 else nullcontext():
        make(folder, world_size, callbacks=[ema]).validate(seeded(Watched), data, verbose=False)

    failing = seeded(Watched)
    failing.fails = True
    noting = Noting()
    with pytest.raises(ZeroDivisionError, match="in validation"):
        make(folder, world_size, callbacks=[ShardedEMA(DECAY), noting]).fit(failing, data, data)
    found["failed"] = noting.steps[-1], failing.shown[-1], rows(failing)
    failing.fails = False
    failing.train()
    trainer = make(folder, world_size, callbacks=[ema := ShardedEMA(DECAY)])
    trainer.fit(failing, data)  # goes on, with an average of its own
    ema.parameter_state.show()
    with pytest.raises(RuntimeError, match="averaged weights stand in for the model's"):
        trainer.save_checkpoint(f"{folder}/shown.ckpt")
    ema.parameter_state.hide()
    return found


def test_validation_test_and_prediction_use_averaged_weights(on_two: list[dict[str, Any]]) -> None:
    found = on_two[0]["evaluated"]
    model = seeded(Watched).eval()
    model.load_state_dict(found["average"])
    with torch.no_grad():
        loss = float(torch.stack([model.loss(batch) for batch in loader(8, EPOCH)]).mean())
        predictions = [model(batch[0]) for batch in loader(4, EPOCH, 0, 2)]
    assert found["val_losses"][-1] == pytest.approx(loss, rel=1e-6)
    assert found["test_loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found["predictions"], predictions)
    assert abs(found["own_loss"] - loss) > 1e-3


def test_validation_shows_the_average_and_training_gets_its_own_weights_back_to_the_bit(
    on_two: list[dict[str, Any]],
) -> None:
    for found in (results["evaluated"] for results in on_two):
        average: dict[str, Tensor] = {}
        for number, step in enumerate(found["steps"]):
            for name, value in step.items():
                average[name] = value.clone() if not number else average[name].lerp_(value, 1 - DECAY)
            if number in (1, 3):
                for name, value in average.items():
                    torch.testing.assert_close(found["shown"][number // 2][name], value)
                assert_same(found["after"][number // 2], step)
        # Frozen parameters have no average: nothing is kept for them.
        assert sorted(set(found["steps"][0]) - set(found["averaged"])) == ["inputs.bias"]
        assert all(torch.equal(found["shown"][-1][name], value) for name, value in found["averaged"].items())


def test_weights_come_back_after_an_exception(on_two: list[dict[str, Any]]) -> None:
    for found in (results["evaluated"] for results in on_two):
        before, shown, after = found["failed"]
        assert_same(after, before)
        assert any(not torch.equal(shown[name], value) for name, value in before.items())


# -- precisions --------------------------------------------------------------------------------------------------------


class Following(Callback):
    """Averages main weights by itself, in float32."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.dtypes: list[torch.dtype] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for view in sharded_parameters(pl_module):
            self.dtypes.append(view.main.dtype)
            if view.requires_grad:
                known = self.average.setdefault(view.name, view.main.float().clone())
                known.lerp_(view.main.float(), 1 - DECAY)


PRECISIONS = [("bf16-mixed", "cpu"), ("bf16-true", None), *([("bf16-mixed", None)] if NIGHT else [])]


def in_precisions(rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for precision, device in PRECISIONS:
        model, ema, following = seeded(Classifier), ShardedEMA(DECAY, device=device), Following()  # type: ignore[arg-type]
        trainer = make("", world_size, callbacks=[ema, following], precision=precision, sharding="optim")
        data = loader(8 // world_size, EPOCH, rank, world_size)
        trainer.fit(model, data, data)
        found.append({"average": averaged_rows(ema), "expected": following.average, "dtypes": following.dtypes})
    return found


def test_the_average_is_of_main_weights_and_in_float32_whatever_computes(on_two: list[dict[str, Any]]) -> None:
    for cases in (results["precisions"] for results in on_two):
        for case, (precision, _) in zip(cases, PRECISIONS, strict=True):
            assert set(case["dtypes"]) == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
            assert all(value.dtype is torch.float32 for value in case["average"].values())
            assert_same(case["average"], case["expected"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Half-way and to the end, with both kinds of checkpoints."""
    data = loader(8 // world_size, EPOCH, rank, world_size)
    found: dict[str, Any] = {}
    for kind in ("sharded", "full"):
        saver = ModelCheckpoint(dirpath=f"{folder}/{kind}", filename="half", every_n_train_steps=STEPS // 2)
        model, ema = seeded(Watched), ShardedEMA(DECAY, warmup=True, every_n_steps=2)
        make(folder, world_size, steps=STEPS // 2, kind=kind, callbacks=[saver, ema], enable_checkpointing=True).fit(
            model, data
        )
        found["half"] = ema.averaged_state_dict(keep=True)
    model, ema = seeded(Watched), ShardedEMA(DECAY, warmup=True, every_n_steps=2)
    make(folder, world_size, callbacks=[ema]).fit(model, data, data)
    found["end"] = averaged_rows(ema)
    found["val_loss"] = model.val_losses[-1]
    return found


def resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    data = loader(8 // world_size, EPOCH, rank, world_size)
    found: dict[str, Any] = {}
    for kind in ("sharded", "full"):
        model, ema = seeded(Watched), ShardedEMA(DECAY, warmup=True, every_n_steps=2)
        trainer = make(folder, world_size, callbacks=[ema])
        trainer.fit(model, data, ckpt_path=f"{folder}/{kind}/half.ckpt")
        found[kind] = {"end": averaged_rows(ema), "updates": ema.updates}
        trainer.save_checkpoint(f"{folder}/{kind}-end.ckpt")
        fresh = make(folder, world_size, callbacks=[ShardedEMA(DECAY)])
        found[kind]["val_loss"] = fresh.validate(
            seeded(Watched), data, ckpt_path=f"{folder}/{kind}-end.ckpt", verbose=False
        )[0]["val_loss"]
    return found


def loaded(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind in ("sharded", "full"):
        ema = ShardedEMA(DECAY)
        trainer = make(folder, world_size, callbacks=[ema])
        data = loader(1, world_size, rank, world_size)
        trainer.validate(seeded(Watched), data, ckpt_path=f"{folder}/{kind}/half.ckpt", verbose=False)
        found[kind] = ema.averaged_state_dict(keep=True)
    return found


def test_a_resumed_average_is_that_of_a_straight_run_to_the_bit(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        for kind in ("sharded", "full"):
            assert_same(found["resumed"][kind]["end"], found["saved"]["end"])
            assert found["resumed"][kind]["updates"] == 2
            assert found["resumed"][kind]["val_loss"] == pytest.approx(found["saved"]["val_loss"], rel=1e-6)


def test_an_average_is_read_on_another_number_of_ranks(on_two: Any, on_four: Any) -> None:
    for found in on_four:
        for kind in ("sharded", "full"):
            for name, value in on_two[0]["saved"]["half"].items():
                if "statistics" not in name:  # each rank has its own
                    assert torch.equal(found["loaded"][kind][name], value), name


def test_the_average_lies_in_checkpoints_by_parameter_name(folder: Path, on_two: list[dict[str, Any]]) -> None:
    of_directory = _load_distributed_checkpoint(folder / "sharded/half.ckpt")["ema"]
    of_file = torch.load(folder / "full/half.ckpt")["parameter_states"]["ema"]
    assert of_directory.keys() == of_file.keys()
    assert "inputs.bias" not in of_file
    for name, value in of_file.items():
        assert torch.equal(value, on_two[0]["saved"]["half"][name])
        assert torch.equal(of_directory[name], value)


def test_programs_that_read_checkpoints_find_the_average(
    folder: Path, on_two: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of a directory, a file, and the file that was made of the directory."""
    expected = on_two[0]["saved"]["half"]
    whole = tmp_path / "whole.ckpt"
    assert main(["checkpoint", "consolidate", str(folder / "sharded/half.ckpt"), str(whole)]) == 0
    of_file = torch.load(folder / "full/half.ckpt")["parameter_states"]["ema"]
    for place in (folder / "sharded/half.ckpt", folder / "full/half.ckpt", whole):
        assert_same(load_checkpoint(place)["parameter_states"]["ema"], of_file)
        assert_same(load_checkpoint(place, averaged=True, optimizers=False)["state_dict"], expected)
        own = load_checkpoint(place, optimizers=False)
        assert "parameter_states" not in own
        assert not torch.equal(own["state_dict"]["head.weight"], expected["head.weight"])
        assert_same(load_from_checkpoint(Watched, place, averaged=True).state_dict(), expected)
        exported = tmp_path / f"exported-{place.parent.name}"
        assert main(["checkpoint", "export", str(place), str(exported), "--averaged"]) == 0
        tensors = safetensors.torch.load_file(exported / "model.safetensors")
        assert_same(tensors, {name: value for name, value in expected.items() if name in tensors})
        assert expected.keys() - tensors.keys() == {"alias.weight", "alias.bias"}, "tied"


class Wrapped(nn.Module):
    """As `torch.compile(module)` wraps it: names of a state dict have the wrapper in them, and the average's have not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Wrapped(self.blocks[0])


def test_averages_of_compiled_blocks_are_found(tmp_path: Path) -> None:
    ema = ShardedEMA(DECAY)
    strategy = MFSDPStrategy(units=["Block"])
    trainer = make_trainer("", 1, max_steps=3, strategy=strategy, callbacks=[ema])
    trainer.fit(seeded(Compiled), loader(4, 12))
    expected = ema.averaged_state_dict(keep=True)
    assert any("_orig_mod" in name for name in expected)
    for kind in ("sharded", "full"):
        strategy.state_dict_type = kind  # type: ignore[assignment]
        trainer.save_checkpoint(tmp_path / kind)
        state = load_checkpoint(tmp_path / kind, averaged=True)["state_dict"]
        assert_same(state, expected)
        export_checkpoint(tmp_path / kind, tmp_path / f"exported-{kind}", averaged=True)
        tensors = safetensors.torch.load_file(tmp_path / f"exported-{kind}/model.safetensors")
        assert_same(tensors, {name.replace("_orig_mod.", ""): value for name, value in expected.items()})
    assert main(["checkpoint", "consolidate", str(tmp_path / "sharded"), str(tmp_path / "whole")]) == 0
    of_file, of_directory = (torch.load(tmp_path / name)["optimizer_states"][0] for name in ("full", "whole"))
    assert of_directory["state"].keys() == of_file["state"].keys()
    for number, values in of_file["state"].items():
        assert_same(of_directory["state"][number], values)


def test_a_checkpoint_without_an_average_is_not_taken_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("", 1, max_steps=1, strategy=MFSDPStrategy(units=["Block"]))
    trainer.fit(seeded(Classifier), loader(4, 4))
    trainer.save_checkpoint(tmp_path / "directory")
    trainer.strategy.state_dict_type = "full"
    trainer.save_checkpoint(tmp_path / "file")
    for place in (tmp_path / "directory", tmp_path / "file"):
        with pytest.raises(RuntimeError, match="has no average of the weights: it was saved without ShardedEMA"):
            load_checkpoint(place, averaged=True)
        assert main(["checkpoint", "export", str(place), str(tmp_path / "exported"), "--averaged"]) == 2
        assert "has no average of the weights" in capsys.readouterr().err


# -- messages ----------------------------------------------------------------------------------------------------------


class Wider(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)


class Another(ShardedEMA):
    """Lightning takes it for another callback; its average would be saved in the other's place."""


def refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    data = loader(8, EPOCH)
    found: dict[str, str] = {}

    model, ema = seeded(Watched), ShardedEMA(DECAY)
    trainer = make(folder, world_size, steps=2, callbacks=[ema])
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{folder}/ema.ckpt")
    bare = make(folder, world_size, steps=2)
    bare.fit(seeded(Watched), data)
    bare.save_checkpoint(f"{folder}/bare.ckpt")
    with pytest.warns(UserWarning, match="at step 2 without an average, which starts again"):
        make(folder, world_size, steps=3, callbacks=[ema]).fit(seeded(Watched), data, ckpt_path=f"{folder}/bare.ckpt")
    wider = seeded(Wider)
    with pytest.raises(RuntimeError) as info:
        make(folder, world_size, callbacks=[ema]).fit(wider, data, ckpt_path=f"{folder}/ema.ckpt")
    found["wider"] = str(info.value)
    with pytest.raises(RuntimeError) as info:
        ShardedEMA().averaged_state_dict(keep=True)
    found["nothing"] = str(info.value)
    late = ShardedEMA(start_step=9)
    make(folder, world_size, steps=1, callbacks=[late]).fit(model, data)
    with pytest.raises(RuntimeError) as info:
        late.averaged_state_dict(keep=True)
    found["early"] = str(info.value)
    with pytest.raises(ValueError, match="is taken") as info:
        make(folder, world_size, callbacks=[ShardedEMA(), Another()]).fit(seeded(Watched), data)
    found["twice"] = str(info.value)
    gone = AveragedWeights(nn.Linear(2, 2))
    with pytest.raises(EngineStateError) as info:
        gone.update(0.5)
    found["gone"] = str(info.value)
    return found


def test_what_makes_no_sense_is_refused(on_one: dict[str, Any]) -> None:
    found = on_one["refused"]
    assert "shape of head.weight: (5, 12) in the checkpoint, (7, 12) in the model" in found["wider"]
    assert "before trainer.fit, validate, test or predict has begun" in found["nothing"]
    assert "there is no average before optimizer step 9" in found["early"]
    assert "the module was deleted" in found["gone"]
    assert "Another: checkpoint_key='ema' is taken, by another callback" in found["twice"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "expected a number from 0 to 1"),
        ({"decay": float, "warmup": True}, "with a function as decay"),
        ({"start_step": 0}, r"start_step=0\): expected a number of optimizer steps"),
        ({"every_n_steps": True}, r"every_n_steps=True\): expected a number of optimizer steps"),
        ({"dtype": torch.bfloat16}, "the average stops changing"),
        ({"device": "cuda"}, "expected None"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedEMA(**options)


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, strategy="auto", callbacks=[ShardedEMA()])
    with pytest.raises(TypeError, match="needs MFSDPStrategy, got SingleDeviceStrategy"):
        trainer.fit(Classifier(), loader(8))
