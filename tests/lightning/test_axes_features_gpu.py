"""Each feature with each axis on GPUs: NCCL and bfloat16.

The rows are those of test_context_features and test_tensor_features, and features that need a device. Ranks with axes train as one GPU
without them.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mfsdp import ShardingError
from lightning_mfsdp.callbacks import NaNGradientReporter, ShardedEMA
from lightning_mfsdp.checkpoint import load_checkpoint
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning import test_context_features as of_context
from tests.lightning import test_tensor_features as of_tensor
from tests.lightning.test_context import Generates, OwnLoss, Texts, Trained, fit
from tests.lightning.test_context_features import OF_THE_STEP, WORKS, Measured, Predicting, measure, predict
from tests.lightning.test_expert import Mixtral
from tests.lightning.test_tensor import Wide

BACKEND = "nccl"
ON: dict[str, Any] = {"accelerator": "cuda", "precision": "bf16-mixed"}
MARKS = {2: [pytest.mark.gpus2, needs_gpus(2)], 4: [pytest.mark.gpus4, needs_gpus(4)]}


class Replays(Callback):
    """Every rank replays its steps by the end."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        graphed = trainer.strategy.graphed_step
        assert (graphed is not None) == trainer.strategy.uses_cuda_graph
        assert graphed is None or graphed.is_captured, graphed.failure


class PredictsByExperts(Predicting, Mixtral):
    """With experts on several ranks."""


# Ranks, options and a model.
MESHES: dict[str, tuple[int, dict[str, Any], type[Trained]]] = {
    "context": (2, {"context": 2}, OwnLoss),
    **of_tensor.AXES,
    "data and tensor": (4, {"tensor": 2, "loss_count": "tokens"}, Wide),
    "context and tensor": (4, {"context": 2, "tensor": 2}, Wide),
}
PREDICT: dict[str, type[Trained]] = {"context": of_context.Predicts, "expert": PredictsByExperts}
PREDICT |= {"tensor": of_tensor.Predicts, "context and tensor": of_tensor.Predicts}
# Rows that the tables lack, with their axes, models and options, which are made anew: callbacks have a state. Graphs are recorded last,
# and none of experts that a tensor axis makes too narrow for grouped products.
ADDED: dict[str, tuple[list[str], type[Trained] | None, Callable[[], dict[str, Any]]]] = {
    "generate in a hook": (["context"], Generates, dict),
    "callbacks": (
        ["context", "tensor", "expert", "context and tensor"],
        None,
        lambda: {"callbacks": [ShardedEMA(decay=0.5), NaNGradientReporter("raise")]},
    ),
    "first rank's batches": (["data and tensor"], of_tensor.TakesBatches, lambda: {"shared_batches": "broadcast"}),
    # A tensor axis of all ranks leaves nothing to gather.
    "symmetric memory": (["context", "data and tensor"], None, lambda: {"symmetric_memory": True}),
    "CUDA graph": (
        ["tensor", "data and tensor"],
        None,
        lambda: {"cuda_graph": True, "max_epochs": 2, "callbacks": [Replays()]},
    ),
    "CUDA graph of experts": (
        ["expert"],
        None,
        lambda: {"cuda_graph": True, "expert_dispatcher": "all_gather", "max_epochs": 2, "callbacks": [Replays()]},
    ),
}
# Trained in bfloat16 by test_tensor_gpu, test_context_gpu and test_axes_gpu.
ELSEWHERE = {("tensor", "compile"), ("context", "recompute"), ("expert and tensor", "recompute")}


class Cell(NamedTuple):
    """A training with axes."""

    world: int
    sizes: dict[str, Any]
    kind: type[Trained]
    options: dict[str, Any]

    @property
    def texts(self) -> str:
        return "padded" if self.sizes == {"context": 2} else "whole"

    @property
    def without(self) -> dict[str, Any]:
        """Options of the same training on one GPU."""
        return {name: value for name, value in self.options.items() if name in (*OF_THE_STEP, "callbacks")}

    @property
    def reference(self) -> str:
        """Its name; several cells may be compared with the same one."""
        callbacks = [type(callback).__name__ for callback in self.without.get("callbacks", ())]
        options = {**self.without, "callbacks": callbacks}
        return f"{self.kind.__module__}.{self.kind.__name__}, {self.texts}, {options}"

    @property
    def evaluates_alike(self) -> bool:
        """Each data rank's mean is that of its own tokens."""
        return self.world == math.prod(self.sizes.get(name, 1) for name in ("context", "tensor"))


def cell(axes: str, name: str) -> Cell:
    world, sizes, kind = MESHES[axes]
    table = of_context.KINDS if axes == "context" else of_tensor.KINDS
    if name in ADDED:
        _, own, made = ADDED[name]
        return Cell(world, sizes, own or kind, made())
    kind, options = table.get(name) or (kind, WORKS[name])
    return Cell(world, sizes, kind, {"compile": True} if name == "compile" else options)


CELLS = {
    (axes, name): cell(axes, name)
    for axes, name in (
        *(("context", name) for name in (*WORKS, *of_context.KINDS)),
        *((axes, name) for name in (*WORKS, *of_tensor.KINDS) for axes in of_tensor.axes_of(name)),
        *((axes, name) for name, (where, *_) in ADDED.items() for axes in where),
    )
    if (axes, name) not in ELSEWHERE
}


def lacking(axes: str, name: str) -> str:
    """What this machine has not, and the cell needs."""
    if name == "symmetric memory" and torch.cuda.device_count() < MESHES[axes][0]:
        return "symmetric memory needs a GPU for each rank"
    if name == "CUDA graph of experts" and torch.cuda.get_device_capability() < (9, 0):
        return "graphs of experts need grouped products, which need compute capability 9.0"
    if issubclass(cell(axes, name).kind, of_tensor.Adapted) and find_spec("peft") is None:
        return "needs peft"
    return ""


def refuse_symmetric_memory(rank: int, world: int) -> None:
    with pytest.raises(ShardingError, match="symmetric memory belongs to one set of ranks"):
        fit(rank, world, Mixtral, Texts("whole"), expert=2, symmetric_memory=True, **ON)


def jobs(world: int, folder: str) -> Iterator[tuple[str, Callable[[int, int], Any]]]:
    """What so many ranks do, by name; one GPU does what theirs is compared with."""
    meshes = {axes: sizes for axes, (ranks, sizes, _) in MESHES.items() if world in (1, ranks)}
    for axes, kind in PREDICT.items():
        if axes in meshes:
            sizes = meshes[axes] if world > 1 else {}
            yield f"predict, {axes}", partial(predict, kind=kind, options=sizes, **ON)
    for axes in ("context", "tensor"):
        if axes in meshes:
            sizes = meshes[axes] if world > 1 else {}
            yield f"measure, {axes}", partial(measure, kind=Measured, options=sizes, **ON)
    for axes, sizes in meshes.items() if world > 1 else ():
        save = partial(of_context.save_in_the_background, kind=MESHES[axes][2], options=sizes, **ON)
        yield f"save, {axes}", partial(save, folder=f"{folder}/{axes}")
    resume = partial(of_tensor.resume, **ON)
    if world == 1:
        for kind in ("sharded", "full"):
            options = {"state_dict_type": kind}
            yield f"begin, {kind}", partial(resume, folder=f"{folder}/{kind}", steps=2, options=options, path=None)
        yield "go on", partial(resume, folder=folder, steps=3, options={}, path=None)
    if world == 2:
        for kind, axes in (("sharded", "tensor"), ("full", "context")):
            options, place = {"state_dict_type": kind, **meshes[axes]}, f"{folder}/{kind}"
            yield f"go on, {axes}", partial(resume, folder=place, steps=3, options=options, path=f"{place}/saved")
        options, place = meshes["tensor"], f"{folder}/tensor 2"
        yield "begin, tensor", partial(resume, folder=place, steps=2, options=options, path=None)
        yield "refuse", refuse_symmetric_memory
    if world == 4:
        options, place = meshes["context and tensor"], f"{folder}/tensor 2"
        go_on = partial(resume, folder=place, steps=3, options=options, path=f"{place}/saved")
        yield "go on, context and tensor", go_on
        yield "drop", partial(of_tensor.drop, **ON)
    for (axes, name), one in CELLS.items():
        train = partial(fit, kind=one.kind, texts=Texts(one.texts), **ON)
        if lacking(axes, name):
            continue
        if world == 1:
            yield one.reference, partial(train, **one.without)
        elif world == one.world:
            yield f"{axes}, {name}", partial(train, **one.sizes, **one.options)


def work(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All jobs in one process a rank; what failed is told by its name."""
    found: dict[str, Any] = {}
    for name, job in jobs(world, folder):
        if name in found:
            continue
        torch.manual_seed(0)
        try:
            found[name] = job(rank, world)
        except Exception:  # the test of this job raises it
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("axes"))


@pytest.fixture(scope="module")
def one(folder: str) -> list[dict[str, Any]]:
    return run_distributed(work, 1, folder, backend=BACKEND)


@pytest.fixture(scope="module")
def two(one: Any, folder: str) -> list[dict[str, Any]]:
    return run_distributed(work, 2, folder, backend=BACKEND)


@pytest.fixture(scope="module")
def four(two: Any, folder: str) -> list[dict[str, Any]]:
    return run_distributed(work, 4, folder, backend=BACKEND)


class Found:
    """What ranks have found, by their number and the name of a job."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def __call__(self, world: int, name: str) -> list[Any]:
        ranks = self._request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])
        for own in ranks:
            assert not isinstance(own[name], str), own[name]
        return [own[name] for own in ranks]


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Found:
    return Found(request)


def marked(*cases: tuple[str, ...]) -> list[Any]:
    """Cases, of which the first value names axes."""
    return [pytest.param(*case, marks=MARKS[MESHES[case[0]][0]], id=", ".join(case)) for case in cases]


@pytest.mark.parametrize(("axes", "name"), marked(*CELLS))
def test_a_feature_works(found: Found, axes: str, name: str) -> None:
    if reason := lacking(axes, name):
        pytest.skip(reason)
    training = CELLS[axes, name]
    (expected,) = found(1, training.reference)
    ranks = found(training.world, f"{axes}, {name}")
    tolerance = 2e-2 if issubclass(training.kind, Mixtral) else 1e-2  # roundings decide between experts, too
    for own in ranks:
        assert len(own["norms"]) == len(expected["norms"]) > 1
        for step, (norm, other) in enumerate(zip(own["norms"], expected["norms"], strict=True)):
            # Adam divides roundings by each other, in every step more of them.
            assert norm == pytest.approx(other, rel=tolerance * min(2**step, 15)), (own["norms"], expected["norms"])
        assert own["logged"].keys() >= expected["logged"].keys()
        for key, value in expected["logged"].items():
            if key == "generated":  # tokens, and roundings decide between some
                assert own["logged"][key] == ranks[0]["logged"][key]
            elif key == "train" or training.evaluates_alike:
                assert own["logged"][key] == pytest.approx(value, rel=tolerance), key


@pytest.mark.parametrize("axes", marked(*((axes,) for axes in PREDICT)))
def test_predictions_are_those_of_one_gpu(found: Found, axes: str) -> None:
    (expected,) = found(1, f"predict, {axes}")
    ranks: list[dict[int, Tensor]] = found(MESHES[axes][0], f"predict, {axes}")
    assert {index for own in ranks for index in own} == set(expected)
    for own in ranks:
        for index, row in own.items():
            error = (row.float() - expected[index].float()).norm() / expected[index].float().norm()
            assert error < 5e-2, index


@pytest.mark.parametrize("axes", marked(("context",), ("tensor",)))
def test_metrics_are_those_of_one_gpu(found: Found, axes: str) -> None:
    (expected,) = found(1, f"measure, {axes}")
    for own in found(2, f"measure, {axes}"):
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, msg=name)


@pytest.mark.parametrize("axes", marked(*((axes,) for axes in MESHES)))
def test_a_save_in_the_background_has_the_weights_that_were_trained(found: Found, folder: str, axes: str) -> None:
    trained = found(MESHES[axes][0], f"save, {axes}")[0]
    saved = load_checkpoint(Path(folder, axes, "saved"), weights_only=False)["state_dict"]
    for name, value in trained.items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize("axes", marked(("tensor",), ("context",), ("context and tensor",)))
def test_a_run_goes_on_from_a_checkpoint_of_another_mesh(found: Found, axes: str) -> None:
    (expected,) = found(1, "go on")
    for own in found(MESHES[axes][0], f"go on, {axes}"):
        assert own["norms"] == pytest.approx(expected["norms"][2:], rel=4e-2)


@pytest.mark.parametrize("axes", marked(("expert",)))
def test_symmetric_memory_of_several_meshes_is_refused(found: Found, axes: str) -> None:
    found(2, "refuse")


@pytest.mark.parametrize("axes", marked(("data and tensor",)))
def test_ranks_of_a_tensor_group_draw_equal_random_numbers_and_others_do_not(found: Found, axes: str) -> None:
    ranks = found(4, "drop")
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0] != ranks[2]
