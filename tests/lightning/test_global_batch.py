"""With `global_batch_size` a run makes the same steps of the same samples on any number of ranks, also where that changes in mid-run."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT, rest_at_night
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    dataset,
    full_state,
    make_trainer,
    seeded,
    strict_warnings,
)
from tests.lightning.test_exact_continuation import SaveAt

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

SIZE, BATCH, GLOBAL, EPOCHS = 48, 2, 8, 2  # six steps in an epoch: of two microbatches on two ranks, of four on one


class Noted(Classifier):
    """Notes the samples of each microbatch, and how many steps were made before."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, list[float]]] = []
        self.steps = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch[0], Tensor):
            batch = [batch]  # of one loader
        self.noted.append((self.trainer.global_step, [row for inputs, _ in batch for row in inputs[:, 0].tolist()]))
        losses = [super(Noted, self).training_step(of_loader, batch_idx) for of_loader in batch]
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def data(batch_size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(dataset(SIZE), batch_size, shuffle=True)


def fit(
    world: int,
    path: str | None = None,
    saves: list[Callback] | None = None,
    *,
    size: int | None = GLOBAL,
    loader: Any = None,
    **options: Any,
) -> dict[str, Any]:
    model = seeded(Noted)
    trainer = make_trainer(
        "",
        world,
        strategy=MFSDPStrategy(global_batch_size=size),
        max_epochs=EPOCHS,
        use_distributed_sampler=True,
        callbacks=saves or [],
        **options,
    )
    trainer.fit(model, data() if loader is None else loader, ckpt_path=path)
    accumulates = trainer.accumulate_grad_batches
    return {"noted": model.noted, "steps": model.steps, "weights": full_state(model), "accumulates": accumulates}


SAVES = {1: (1, 4, 5, 6, 8, 30), 2: (3, 4, 16)}  # after so many microbatches: in the middle of a step, and at its end

RESUMED = SAVES if NIGHT else {1: (5, 30), 2: (3, 4)}


def whole(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    return fit(world, None, [SaveAt(save, f"{folder}/{world}-{save}.ckpt") for save in SAVES[world]])


def resumed(rank: int, world: int, folder: str, saved_by: int) -> dict[int, Any]:
    strict_warnings()
    return {save: fit(world, f"{folder}/{saved_by}-{save}.ckpt") for save in RESUMED[saved_by]}


def batches(runs: list[dict[str, Any]]) -> dict[int, list[float]]:
    """By step, the samples of all ranks."""
    read: dict[int, list[float]] = {}
    for run in runs:
        for step, samples in run["noted"]:
            read.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in read.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, list[dict[str, Any]]], str]:
    folder = str(tmp_path_factory.mktemp("runs"))
    return {world: run_distributed(whole, world, folder) for world in (1, 2)}, folder


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_steps_are_the_same_on_any_number_of_ranks(runs: Any) -> None:
    whole_runs, _ = runs
    assert [run[0]["accumulates"] for run in whole_runs.values()] == [4, 2]
    assert [run[0]["steps"] for run in whole_runs.values()] == [12, 12], "known in configure_optimizers"
    assert batches(whole_runs[1]) == batches(whole_runs[2])
    assert {len(samples) for samples in batches(whole_runs[1]).values()} == {GLOBAL}
    assert_equal(whole_runs[1][0]["weights"], whole_runs[2][0]["weights"])


@pytest.mark.parametrize(
    ("saved_by", "world"), rest_at_night([(1, 2), (2, 1), (1, 1), (2, 2)], lambda saved_by, world: saved_by * world > 1)
)
def test_a_run_goes_on_with_the_same_steps(runs: Any, saved_by: int, world: int) -> None:
    whole_runs, folder = runs
    expected = batches(whole_runs[saved_by])
    results = run_distributed(resumed, world, folder, saved_by)
    for save in RESUMED[saved_by]:
        read = batches([result[save] for result in results])
        first, inside = divmod(save * saved_by * BATCH, GLOBAL)
        of_first = read.pop(first)
        if inside and saved_by == world:
            assert len(of_first) == GLOBAL - inside, "goes on inside the step"
            assert set(of_first) < set(expected[first])
        else:
            assert of_first == expected[first], "a step that was begun by other ranks begins again"
        assert read == {step: samples for step, samples in expected.items() if step > first}
        assert_equal(whole_runs[saved_by][0]["weights"], results[0][save]["weights"])


def without_option(rank: int, world: int, path: str, accumulates: int, saves: int | None) -> dict[str, Any]:
    strict_warnings()
    callbacks: list[Callback] = [] if saves is None else [SaveAt(saves, path)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fit(world, path if saves is None else None, callbacks, size=None, accumulate_grad_batches=accumulates)
    result["said"] = [str(warning.message) for warning in said if "do not begin there" in str(warning.message)]
    return result


def test_without_the_option_a_step_that_other_ranks_began_begins_again(tmp_path: Path) -> None:
    path = str(tmp_path / "inside.ckpt")
    whole_run = run_distributed(without_option, 1, path, 4, 5)
    results = run_distributed(without_option, 2, path, 2, None)
    assert not results[0]["said"]
    assert batches(results) == {step: samples for step, samples in batches(whole_run).items() if step > 0}
    assert_equal(whole_run[0]["weights"], results[0]["weights"])

    results = run_distributed(without_option, 2, path, 4, None)
    (said,) = results[0]["said"]
    assert "began after 8 samples of an epoch. Steps of 16 samples do not begin there" in said
    assert "the first one has 2 of 4 batches" in said
    assert batches(results)[1] == batches(whole_run)[1], "no sample is lost"


@pytest.mark.parametrize(
    ("world", "accumulates", "batches_of_first"),
    [pytest.param(1, 8, "4 of 8", marks=pytest.mark.nightly), (2, 4, "2 of 4"), (2, 2, "")],
)
def test_a_smaller_first_step_after_one_that_was_complete_is_told(
    tmp_path: Path, world: int, accumulates: int, batches_of_first: str
) -> None:
    """With another number of accumulated batches, or of ranks, where steps of the new size do not begin at that place."""
    path = str(tmp_path / "between.ckpt")
    whole_run = run_distributed(without_option, 1, path, 4, 4)
    results = run_distributed(without_option, world, path, accumulates, None)
    if batches_of_first:
        (said,) = results[0]["said"]
        assert (
            f"saved between two steps, after 8 samples of an epoch. Steps of {BATCH * accumulates * world} samples do"
            in said
        )
        assert f"the first one has {batches_of_first} batches" in said
    else:
        assert not results[0]["said"]
    assert batches(results)[1] == batches(whole_run)[1]


def other_sizes(rank: int, world: int, folder: str) -> dict[int, Any]:
    strict_warnings()
    return {size: fit(world, f"{folder}/1-{save}.ckpt", size=size) for size, save in ((16, 1), (4, 6))}


def test_a_step_that_was_begun_with_another_size_begins_again(runs: Any) -> None:
    whole_runs, folder = runs
    (found,) = run_distributed(other_sizes, 1, folder)
    expected = batches(whole_runs[1])
    larger, smaller = (batches([found[size]]) for size in (16, 4))
    assert larger == {step: sorted(expected[2 * step] + expected[2 * step + 1]) for step in range(6)}
    assert sorted(smaller[1] + smaller[2]) == expected[1], "microbatch 6 is the second of the second step"
    assert {len(samples) for samples in smaller.values()} == {4}


def of_two_loaders(rank: int, world: int, folder: str, saving: bool) -> dict[int, Any]:
    strict_warnings()
    saves = {save: f"{folder}/two-{save}.ckpt" for save in (4, 5, 8)}  # the short loader has three batches on two ranks

    def loaders() -> list[Any]:
        return [DataLoader(dataset(40), BATCH, shuffle=True), DataLoader(dataset(12), BATCH, shuffle=True)]

    if saving:
        return {0: fit(world, None, [SaveAt(save, path) for save, path in saves.items()], loader=loaders())}
    return {save: fit(world, path, loader=loaders()) for save, path in saves.items()}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_loaders_of_several_lengths_go_on(tmp_path: Path, world: int) -> None:
    whole_runs = [result[0] for result in run_distributed(of_two_loaders, 2, str(tmp_path), True)]
    results = run_distributed(of_two_loaders, world, str(tmp_path), False)
    expected = batches(whole_runs)
    for save in results[0]:
        first, inside = divmod(save, 2)
        read = batches([result[save] for result in results])
        if inside and world == 2:
            assert set(read.pop(first)) < set(expected[first])
        assert read == {step: expected[step] for step in expected if step >= first + (inside and world == 2)}
        assert_equal(whole_runs[0]["weights"], results[0][save]["weights"])


def from_earlier_version(rank: int, world: int, path: str) -> Any:
    strict_warnings()
    return error_of(lambda: fit(world, path))


def test_a_checkpoint_that_does_not_say_where_a_step_began(runs: Any, tmp_path: Path) -> None:
    path = tmp_path / "earlier.ckpt"
    shutil.copytree(f"{runs[1]}/2-3.ckpt", path)
    content = torch.load(path / "meta.pt", weights_only=False)
    for position in content["data_positions"]:
        for name in ("seen_of_step", "samples_at_a_time", "samples_of_step"):
            del position[name]
    torch.save(content, path / "meta.pt")
    assert run_distributed(from_earlier_version, 2, str(path)) == ["", ""]
    (error,) = run_distributed(from_earlier_version, 1, str(path))
    assert "after 12 of its samples, by a version that does not note where a step began. Resume on the number" in error


def with_axes(rank: int, world: int) -> tuple[Any, Any]:
    strict_warnings()
    first = seeded(Noted)
    strategy = MFSDPStrategy(global_batch_size=GLOBAL, tensor=2, tensor_plan={"blocks.*.linear": "colwise_rep"})
    trainer = make_trainer("", world, strategy=strategy, use_distributed_sampler=True)
    trainer.fit(first, data())
    accumulates = trainer.accumulate_grad_batches
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, data(4))
    return accumulates, trainer.accumulate_grad_batches


def test_ranks_with_the_same_data_count_once_and_a_second_fit_sets_it_again() -> None:
    assert run_distributed(with_axes, 2) == [(4, 2)] * 2


class OwnSteps(Classifier):
    automatic_optimization = False


class Sized:
    """A loader of its own kind."""

    batch_size = 3

    def __iter__(self) -> Any:
        return iter(DataLoader(dataset(SIZE), self.batch_size))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(rank: int, world: int, folder: str) -> dict[str, str]:
    strict_warnings()

    def run(
        size: int = GLOBAL, loader: Any = None, kind: Any = Classifier, path: str | None = None, **options: Any
    ) -> str:
        trainer = make_trainer(
            folder, world, strategy=MFSDPStrategy(global_batch_size=size), use_distributed_sampler=True, **options
        )
        return error_of(lambda: trainer.fit(kind(), data() if loader is None else loader, ckpt_path=path))

    batch_sampler = BatchSampler(SequentialSampler(dataset(SIZE)), BATCH, drop_last=False)
    del batch_sampler.batch_size
    return {
        "batch": run(10),
        "trainer": run(accumulate_grad_batches=2),
        "scheduler": run(callbacks=[GradientAccumulationScheduler({4: 2})]),
        "manual": run(kind=OwnSteps),
        "unknown": run(loader=DataLoader(dataset(SIZE), batch_sampler=batch_sampler)),
        "none": run(loader=DataLoader(dataset(SIZE), batch_size=None)),
        "two": run(loader=[data(), data(4)]),
        "other": run(loader=Sized()),
        "changed": run(12, path=f"{folder}/1-8.ckpt"),
    }


def test_what_cannot_be_is_said(runs: Any) -> None:
    folder = runs[1]
    (found,) = run_distributed(refused, 1, folder)
    assert found["batch"] == ""
    assert found["trainer"].startswith(
        "ValueError: global_batch_size=8 and accumulate_grad_batches=2 both say how many"
    )
    assert found["scheduler"].startswith("ValueError: global_batch_size=8 and GradientAccumulationScheduler both say")
    assert "automatic_optimization=False" in found["manual"]
    assert "the training loader DataLoader does not say how many samples a batch has" in found["unknown"]
    assert "does not say how many samples a batch has" in found["none"]
    assert "would need 4, 2 batches for a step, because their batch sizes differ" in found["two"]
    assert found["other"] == (
        "ValueError: global_batch_size=8 is no multiple of 3 samples, which 1 data ranks with batch_size=3 compute at a time. Choose a "
        "batch_size that divides 8, such as 2, or a multiple of 3"
    )
    assert found["changed"].startswith(
        "ValueError: global_batch_size=12, and the checkpoint was saved inside an epoch, after 16 of its samples, where no step of 12"
    )


def divided(rank: int, world: int, folder: str) -> str:
    strict_warnings()
    trainer = make_trainer(folder, world, strategy=MFSDPStrategy(global_batch_size=9), use_distributed_sampler=True)
    return error_of(lambda: trainer.fit(Classifier(), data()))


def test_ranks_that_do_not_divide_it_are_named() -> None:
    for found in run_distributed(divided, 2, ""):
        assert found == (
            "ValueError: global_batch_size=9 is no multiple of 4 samples, which 2 data ranks with batch_size=2 compute at a time. Choose a "
            "number of data ranks that divides it, such as 1, or a multiple of 4"
        )


class Place:
    """A loader that knows its place by itself."""

    batch_size = BATCH

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return SIZE // BATCH

    def __iter__(self) -> Any:
        while self.place < len(self):
            self.place += 1
            yield [torch.zeros(BATCH, 3), torch.zeros(BATCH, dtype=torch.long)]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def own_place(rank: int, world: int, folder: str, path: str | None) -> list[str]:
    strict_warnings()
    callbacks = [SaveAt(3, f"{folder}/place.ckpt")] if path is None else []
    strategy = MFSDPStrategy(global_batch_size=GLOBAL)
    trainer = make_trainer(folder, world, strategy=strategy, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(seeded(Classifier), Place(), ckpt_path=path)
    return [str(warning.message) for warning in said if "global_batch_size" in str(warning.message)]


def test_where_samples_are_not_known_it_warns(tmp_path: Path) -> None:
    run_distributed(own_place, 2, str(tmp_path), None)
    (same,) = run_distributed(own_place, 1, str(tmp_path), f"{tmp_path}/place.ckpt")
    assert len(same) == 1
    assert same[0].startswith("global_batch_size=8: training goes on inside an epoch on another number of ranks")
