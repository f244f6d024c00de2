"""ShardedModelSummary: global figures as Lightning counts them, this rank's share beside them, and no effect on training."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy, MixedPrecisionPolicy
from lightning_mfsdp.callbacks import ShardedModelSummary
from lightning_mfsdp.callbacks.model_summary import ShardedSummary
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    CLASSES,
    DIM,
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

# inputs 3 * 12 + 12, two blocks of 12 * 12 + 3 * 12, head 12 * 5 + 5; `scale`, 12 more, is in no layer
LAYERS = {"inputs": 48, "blocks": 360, "head": 65}
TOTAL = 485

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Tied(Classifier):
    """Two heads with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second_head = nn.Linear(DIM, CLASSES)
        self.second_head.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.inputs(x))) * self.scale
        return self.head(x) + self.second_head(x)


class Example(Classifier):
    """The summary runs it once to see shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(4, 3)


class Printed(logging.Handler):
    """Messages of Lightning's loggers while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("lightning.pytorch").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lightning.pytorch").removeHandler(self)


def fit(
    rank: int,
    world_size: int,
    callback: ModelSummary | None,
    *,
    model_class: type[Classifier] = Classifier,
    precision: Any = "32-true",
    **strategy: Any,
) -> tuple[Classifier, list[str]]:
    """The model after two steps, and the tables that were printed."""
    model = seeded(model_class)
    trainer = make_trainer(
        tempfile.gettempdir(),
        world_size,
        strategy=MFSDPStrategy(units=["Block"], **strategy),
        precision=precision,
        callbacks=[callback] if callback else None,
        enable_model_summary=callback is not None,
    )
    with Printed() as messages:
        trainer.fit(model, loader(4, 16, rank, world_size))
    return model, [message for message in messages if "Trainable params" in message]


def figures(model: Classifier, max_depth: int = 1) -> dict[str, Any]:
    summary = ShardedSummary(model, max_depth=max_depth)
    return {
        "layers": dict(zip(summary.layer_names, summary.param_nums, strict=True)),
        "layers here": dict(zip(summary.layer_names, summary.rank_param_nums, strict=True)),
        "total": summary.total_parameters,
        "total here": summary.rank_total_parameters,
        "size": summary.model_size,
        "size here": summary.rank_model_size,
        "columns": dict(summary._get_summary_data()),
    }


def scenarios(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    sharded = ShardedModelSummary()
    found: dict[str, Any] = {}
    model, found["table"] = fit(rank, world_size, sharded)
    found["sharded"], found["every depth"] = figures(model), figures(model, -1)
    lightning = Summary(model)
    found["lightning"] = dict(zip(lightning.layer_names, lightning.param_nums, strict=True)), lightning.total_parameters
    found["weights"] = full_state(model)
    _, found["lightning's table"] = fit(rank, world_size, ModelSummary())
    _, found["no table"] = fit(rank, world_size, ShardedModelSummary(max_depth=0))
    found["no_shard"] = figures(fit(rank, world_size, None, sharding="no_shard")[0])
    found["ignored"] = figures(fit(rank, world_size, None, ignored_parameters=["inputs.*"])[0])
    found["tied"] = figures(fit(rank, world_size, sharded, model_class=Tied)[0])
    for precision in ("bf16-mixed", "bf16-true"):
        found[precision] = figures(fit(rank, world_size, sharded, precision=precision)[0])
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    found["own policy"] = figures(fit(rank, world_size, sharded, precision="bf16-true", policy=policy)[0])
    model, found["table with shapes"] = fit(rank, world_size, sharded, model_class=Example)
    found["weights with shapes"] = full_state(model)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(scenarios, 2)


@pytest.mark.parametrize("case", ["sharded", "every depth", "tied", "bf16-mixed", "bf16-true"])
def test_shares_of_all_ranks_add_up_to_the_global_figures(two_ranks: Any, case: str) -> None:
    first, second = (results[case] for results in two_ranks)
    assert first["layers"] == second["layers"]
    assert first["total"] == first["total here"] + second["total here"]
    for layer, size in first["layers"].items():
        assert size == first["layers here"][layer] + second["layers here"][layer]
        assert 0 <= first["layers here"][layer] <= size


def test_global_figures_are_lightnings(two_ranks: Any) -> None:
    for results in two_ranks:
        assert results["lightning"] == (LAYERS, TOTAL)
        assert (results["sharded"]["layers"], results["sharded"]["total"]) == (LAYERS, TOTAL)


def test_replicated_weights_count_whole_on_every_rank(two_ranks: Any) -> None:
    for results in two_ranks:
        assert results["no_shard"]["layers here"] == LAYERS
        assert results["no_shard"]["total here"] == TOTAL


def test_ignored_parameters_count_whole_on_every_rank(two_ranks: Any) -> None:
    first, second = (results["ignored"] for results in two_ranks)
    assert first["layers here"]["inputs"] == second["layers here"]["inputs"] == LAYERS["inputs"]
    assert first["total here"] + second["total here"] == TOTAL + LAYERS["inputs"]


def test_tied_weights_count_in_each_layer_and_once_in_the_total(two_ranks: Any) -> None:
    found = two_ranks[0]["tied"]
    assert found["layers"]["second_head"] == found["layers"]["head"] == LAYERS["head"]
    assert found["total"] == TOTAL + CLASSES


@pytest.mark.parametrize("case", ["sharded", "every depth", "tied"])
def test_what_is_in_no_layer_has_a_row_of_its_own(two_ranks: Any, case: str) -> None:
    shares = []
    for results in two_ranks:
        columns = results[case]["columns"]
        assert columns["Name"][-1] == "other params"
        assert columns["Params"][-1].strip() == str(DIM)
        assert len({len(column) for column in columns.values()}) == 1
        shares.append(int(columns["Params per rank"][-1]))
    assert sum(shares) == DIM


def test_rank_zero_prints_one_table_with_the_column_and_its_totals(two_ranks: Any) -> None:
    assert two_ranks[1]["table"] == []
    (table,) = two_ranks[0]["table"]
    found = two_ranks[0]["sharded"]
    header, _, first_row, *_ = table.strip("\n").splitlines()
    assert [cell.strip() for cell in header.split("|")][3:5] == ["Params", "Params per rank"]
    assert [cell.strip() for cell in first_row.split("|")][3:5] == ["48", str(found["layers here"]["inputs"])]
    assert f"\n{found['total here']:<10}Params on this rank" in table
    assert f"\n{TOTAL:<10}Total params" in table
    assert table.endswith("\n0.001     Size of weights kept on this rank (MB)")


def test_lightnings_own_summary_shows_global_sizes(two_ranks: Any) -> None:
    assert two_ranks[1]["lightning's table"] == []
    (table,) = two_ranks[0]["lightning's table"]
    assert f"\n{TOTAL:<10}Total params" in table
    assert "Params per rank" not in table


def test_depth_zero_prints_nothing(two_ranks: Any) -> None:
    assert two_ranks[0]["no table"] == []


def test_sizes_come_from_the_weights_and_not_from_the_name_of_the_precision(two_ranks: Any) -> None:
    found = two_ranks[0]
    assert found["bf16-mixed"]["size"] == pytest.approx(TOTAL * 4 / 1e6)
    assert found["bf16-true"]["size"] == pytest.approx(TOTAL * 2 / 1e6)
    assert found["own policy"]["size"] == pytest.approx(TOTAL * 4 / 1e6)
    # With mixed precision bf16 weights are kept beside the main ones.
    assert found["bf16-mixed"]["size here"] > found["bf16-mixed"]["total here"] * 4 / 1e6
    assert found["ignored"]["size here"] >= found["ignored"]["total here"] * 4 / 1e6


def test_an_example_input_shows_shapes_and_does_not_change_training(two_ranks: Any) -> None:
    (table,) = two_ranks[0]["table with shapes"]
    assert "[4, 3]" in table
    for results in two_ranks:
        for name, weight in results["weights"].items():
            assert torch.equal(weight, results["weights with shapes"][name])


def test_another_strategy_gets_lightnings_table(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, 1, strategy="auto", callbacks=[ShardedModelSummary()], enable_model_summary=True)
    with Printed() as messages:
        trainer.fit(seeded(), loader(8))
    (table,) = (message for message in messages if "Trainable params" in message)
    assert "Params per rank" not in table
