"""Checkpoints as one file: what a sharded training writes, plain PyTorch and a single device read, and the other way round, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.checkpoint.state.on_disk import Reads
from lightning_mfsdp.checkpoint.state.optimizer import finish_optimizer, optimizer_state, plan_optimizer
from lightning_mfsdp.engine import sharded_parameters
from tests.checkpoint.internals import ParameterIndex, Ranks, full_model_state, full_optimizer_state, locate
from tests.engine.worlds import by_world, check
from tests.helpers.distributed import run_distributed
from tests.helpers.models import batch, build
from tests.helpers.nights import NIGHT, rest_at_night
from tests.helpers.other_optimizers import LowBitAdam
from tests.lightning.models import FOREIGN_WARNINGS, full_state, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import EPOCH, STEPS, Scheduled, assert_same, local_state

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

MESHES: dict[str, dict[str, Any]] = {
    "optim_grads_params": {"sharding": "optim_grads_params"},
    "optim_grads": {"sharding": "optim_grads"},
    "no_shard": {"sharding": "no_shard"},
    "hybrid": {"outer_size": 2, "outer_sharding": "optim"},
}


def on_a_push(name: str) -> bool:
    """Others go through DDP's files, below."""
    return name in ("optim_grads_params", "hybrid")


class Hooked(Scheduled):
    """Sees whole tensors on rank 0 and nothing elsewhere when it is saved."""

    seen: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
        checkpoint["note"] = torch.tensor(7)


def trainer_of(folder: str, world: int, strategy: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": STEPS // 2, "strategy": strategy}
    return make_trainer(folder, world, **{**settings, **options})


@contextmanager
def waits() -> Iterator[set[float | None]]:
    """How long ranks would wait for the first one, each time they do."""
    found: set[float | None] = set()
    first = Ranks.first

    def watched(self: Ranks, doing: str, action: Any) -> Any:
        if doing.startswith("writing"):
            found.add(self._tree._limit_s)
        return first(self, doing, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "first", watched)
        yield found


def save(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found = {}
    for name, options in MESHES.items():
        if not (NIGHT or on_a_push(name)):
            continue
        model = seeded(Hooked)
        saver = ModelCheckpoint(
            dirpath=f"{folder}/{name}", filename="one", save_top_k=1, every_n_train_steps=STEPS // 2
        )
        strategy = MFSDPStrategy(units=["Block"], state_dict_type="full", **options)
        trainer = trainer_of(folder, world, strategy, enable_checkpointing=True, callbacks=[saver])
        with waits() as patience:
            trainer.fit(model, loader(8 // world, EPOCH, rank, world))
        found[name] = {
            "patience": patience,
            "weights": full_state(model),
            "seen": model.seen,
            "local": local_state(trainer, model),
        }
        again = seeded(Hooked)
        loading = trainer_of(folder, world, MFSDPStrategy(units=["Block"], **options))
        loading.fit(again, loader(8 // world, EPOCH, rank, world), ckpt_path=f"{folder}/{name}/one.ckpt")
        found[name]["again"] = local_state(loading, again)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("full")
    return folder, run_distributed(save, 4, str(folder))


@pytest.mark.parametrize("name", rest_at_night(MESHES, on_a_push))
class TestAFullCheckpoint:
    def test_is_one_file_that_plain_pytorch_loads(self, saved: Any, name: str) -> None:
        folder, found = saved
        assert [path.name for path in (folder / name).iterdir()] == ["one.ckpt"]
        checkpoint = torch.load(folder / name / "one.ckpt", weights_only=True)
        model = seeded(Scheduled)
        model.load_state_dict(checkpoint["state_dict"])
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, found[0][name]["weights"][key]), key
        state = checkpoint["state_dict"]
        assert state["alias.weight"].data_ptr() == state["blocks.0.linear.weight"].data_ptr(), "stays tied"
        assert checkpoint["note"] == 7

    def test_has_the_optimizer_state_of_one_process(self, saved: Any, name: str) -> None:
        """Same numbering, same shapes, and all ranks' rows put together."""
        folder, found = saved
        checkpoint = torch.load(folder / name / "one.ckpt", weights_only=True)
        model = seeded(Scheduled)
        optimizer = model.configure_optimizers()["optimizer"]
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        assert len(optimizer.state) == sum(parameter.requires_grad for parameter in model.parameters())
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        pieces: dict[str, list[Tensor]] = {}
        ranks = {"no_shard": [0], "hybrid": [0, 2, 1, 3]}.get(name, [0, 1, 2, 3])
        for rank in ranks:  # of a hybrid mesh, sub-shards of one shard lie along the outer axis
            for key, state in found[rank][name]["local"]["optimizer"].items():
                pieces.setdefault(key, []).append(state["exp_avg"])
        for parameter, state in optimizer.state.items():
            assert torch.equal(state["exp_avg"], torch.cat(pieces[names[id(parameter)]])), names[id(parameter)]
            assert state["step"] == STEPS // 2

    def test_loads_back_to_the_bit(self, saved: Any, name: str) -> None:
        for found in saved[1]:
            assert_same(found[name]["again"], found[name]["local"], name)

    def test_is_waited_for_longer_than_collectives_may_take(self, saved: Any, name: str) -> None:
        for found in saved[1]:
            assert found[name]["patience"] == {None}

    def test_shows_hooks_whole_tensors_on_rank_0_only(self, saved: Any, name: str) -> None:
        shapes = {key: tuple(value.shape) for key, value in seeded(Scheduled).state_dict().items()}
        assert [found[name]["seen"] for found in saved[1]] == [shapes, {}, {}, {}]


def test_a_single_device_continues_from_it_and_it_from_a_single_device(saved: Any, tmp_path: Path) -> None:
    folder, found = saved
    model = seeded(Scheduled)
    trainer = trainer_of(str(tmp_path), 1, "auto")
    trainer.fit(model, loader(8, EPOCH), ckpt_path=folder / "optim_grads_params/one.ckpt")
    assert trainer.global_step == STEPS // 2
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, found[0]["optim_grads_params"]["weights"][key]), key
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    theirs, ours = (
        torch.load(path, weights_only=True)
        for path in (tmp_path / "plain.ckpt", folder / "optim_grads_params/one.ckpt")
    )
    assert_same(ours["optimizer_states"], theirs["optimizer_states"])
    assert_same(ours["state_dict"], theirs["state_dict"])


# -- DDP ---------------------------------------------------------------------------------------------------------------


def replicated_state(trainer: Any, model: Any) -> dict[str, Any]:
    """What this rank trains with under DDP, in the form of a file."""
    return {"state_dict": model.state_dict(), "optimizer_states": [trainer.optimizers[0].state_dict()]}


def through_ddp(rank: int, world: int, folder: str) -> dict[str, Any]:
    """DDP trains and saves; each sharding reads that, and saves it again; the last trains on; DDP reads what it saved and trains on."""
    strict_warnings()
    data = loader(8 // world, EPOCH, rank, world)

    def fitted(strategy: Any, epochs: int, *, come_from: str | None = None, save_as: str | None = None) -> Any:
        model = seeded(Scheduled)
        trainer = trainer_of(folder, world, strategy, max_steps=epochs * STEPS // 2)
        trainer.fit(model, data, ckpt_path=come_from and f"{folder}/{come_from}.ckpt")
        if save_as is not None:
            trainer.save_checkpoint(f"{folder}/{save_as}.ckpt")
        return trainer, model

    def sharded(name: str) -> MFSDPStrategy:
        return MFSDPStrategy(units=["Block"], state_dict_type="full", sharding=name)

    trainer, model = fitted("ddp", 1, save_as="ddp")
    found = {"saved": replicated_state(trainer, model)}
    for name in ("no_shard", "optim", "optim_grads_params"):
        fitted(sharded(name), 1, come_from="ddp", save_as=f"ddp in {name}")
    fitted(sharded("optim_grads_params"), 2, come_from="ddp", save_as="mfsdp")
    found["back"] = replicated_state(*fitted("ddp", 2, come_from="mfsdp", save_as="mfsdp in ddp"))
    found["on"] = replicated_state(*fitted("ddp", 3, come_from="mfsdp"))
    fitted("ddp", 2, come_from="ddp", save_as="ddp again")
    found["ddp alone"] = replicated_state(*fitted("ddp", 3, come_from="ddp again"))
    return found


@pytest.fixture(scope="module")
def with_ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run_distributed(through_ddp, 2, str(folder))


# All that both strategies know of a training.
COMMON = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (name, f"{name} in {other}")
        for name, other in (("ddp", "no_shard"), ("ddp", "optim"), ("ddp", "optim_grads_params"), ("mfsdp", "ddp"))
    ],
)
def test_a_file_goes_through_the_other_strategy_to_the_bit(with_ddp: Any, written: str, read: str) -> None:
    before, after = (torch.load(with_ddp[0] / f"{name}.ckpt", weights_only=True) for name in (written, read))
    for key in COMMON:
        assert_same(after[key], before[key], key)


def test_every_rank_of_ddp_holds_what_the_file_holds(with_ddp: Any) -> None:
    folder, ranks = with_ddp
    for name, when in (("ddp", "saved"), ("mfsdp", "back")):
        file = torch.load(folder / f"{name}.ckpt", weights_only=True)
        moments = [state["exp_avg"] for state in file["optimizer_states"][0]["state"].values()]
        assert len(moments) > 10
        assert all(moment.any() for moment in moments), "training was not idle"
        for found in ranks:
            assert_same(found[when], {key: file[key] for key in found[when]}, name)


def test_training_handed_from_ddp_to_us_and_back_is_that_of_ddp(with_ddp: Any) -> None:
    for found in with_ddp[1]:
        for name, value in found["ddp alone"]["state_dict"].items():
            torch.testing.assert_close(found["on"]["state_dict"][name], value, rtol=1e-5, atol=1e-6)


# -- without a Trainer -------------------------------------------------------------------------------------------------


def a_state_that_no_file_can_hold_is_refused_on_all_ranks(rank: int, world: int) -> None:
    model = fully_shard(build())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    held = optimizer.param_groups[0]["params"]
    divided = next(one for one in held if one.dim())
    if rank == 0:
        optimizer.state[divided]["odd"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"odd of parameter .*: \(3,\) where its rows are"):
        full_optimizer_state(optimizer, keep=rank == 0)
    optimizer.state.clear()
    whole = next(one for one in held if not one.dim())
    if rank == 1:
        optimizer.state[whole]["odd"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"odd of parameter .*: on some ranks only"):
        full_optimizer_state(optimizer, keep=rank == 0)


def state_of_rows_in_another_shape_is_refused_by_both_kinds(rank: int, world: int) -> None:
    model = fully_shard(build())
    optimizer = fully_shard_optimizer(LowBitAdam(model.parameters()), elementwise=True)
    model(batch(0, 2)[0]).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"mean_scale of parameter .* where its rows are"):
        full_optimizer_state(optimizer, keep=rank == 0)
    with pytest.raises(ValueError, match=r'mean_scale: .* made of this rank\'s rows .*sharding="no_shard"'):
        optimizer_state(ParameterIndex(model), optimizer)


class Packed(torch.Tensor):
    """Numbers in a class of their own that knows few operators, as torchao's states of 8 bits."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            raise NotImplementedError(f"{func} of Packed")
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


def load_optimizer(state: Any, model: nn.Module, optimizer: Any) -> None:
    """Whole state by number."""
    plan = plan_optimizer(locate("a.ckpt"), state, ParameterIndex(model), optimizer, "optimizer_0", Reads(None))
    finish_optimizer(plan, optimizer)


def packed_state_is_kept_where_it_is_whole_and_refused_elsewhere(rank: int, world: int) -> None:
    def made(sharding: str, value: float) -> tuple[Any, Any]:
        model = fully_shard(build(), sharding=sharding)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for view in sharded_parameters(model):
            one = view.local
            optimizer.state[one]["packed"] = Packed(torch.full_like(one, value))
        return model, optimizer

    state = full_optimizer_state(made("no_shard", 3.0)[1], keep=True)
    model, optimizer = made("no_shard", 0.0)
    load_optimizer(state, model, optimizer)
    assert all(one["packed"].inner.unique().tolist() == [3.0] for one in optimizer.state.values())
    with pytest.raises(ValueError, match=r'packed: a Packed, whose numbers.*state_dict_type="full"'):
        optimizer_state(ParameterIndex(model), optimizer)
    model, optimizer = made("optim", 0.0)
    with pytest.raises(ValueError, match="packed: a Packed"):
        optimizer_state(ParameterIndex(model), optimizer)
    with pytest.raises(ValueError, match=r'packed of parameter .*: a Packed.*sharding="no_shard"'):
        full_optimizer_state(optimizer, keep=True)
    with pytest.raises(RuntimeError, match=r'is a Packed, which cannot be divided; resume with sharding="no_shard"'):
        load_optimizer(state, model, optimizer)


def tied_weights_stay_tied(rank: int, world: int) -> None:
    model = fully_shard(build(tied=True))
    state = full_model_state(model.state_dict(), keep=rank == 0)
    assert (not state) if rank else state["head.weight"] is state["embedding.weight"]


WORLDS = {
    2: [
        a_state_that_no_file_can_hold_is_refused_on_all_ranks,
        state_of_rows_in_another_shape_is_refused_by_both_kinds,
        packed_state_is_kept_where_it_is_whole_and_refused_elsewhere,
        tied_weights_stay_tied,
    ]
}


@by_world(WORLDS)
def test_whole_states(world: Any, case: Any) -> None:
    check(WORLDS, world, case)
