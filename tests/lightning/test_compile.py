"""Compiled units: the same training, no break at the engine's hooks, and no recompilation once a step has been seen."""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, dataset, make_trainer, seeded

GRAPHS: Counter[str] = Counter()


def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
    """A backend that compiles nothing and counts."""
    GRAPHS["graphs"] += 1
    return graph.forward


class Counted(Classifier):
    """Notes how many graphs there are after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        GRAPHS.update({f"after {self.trainer.global_step}": GRAPHS["graphs"]})


def fit(compile: Any) -> tuple[list[Tensor], Classifier]:
    model = seeded(Counted)
    trainer = make_trainer(
        tempfile.gettempdir(),
        2,
        strategy=MFSDPStrategy(compile=compile),
        max_epochs=2,
    )
    trainer.fit(model, torch.utils.data.DataLoader(dataset(), batch_size=4))
    return [parameter.full_tensor() for parameter in model.parameters()], model


def both(rank: int, world: int) -> tuple[bool, dict[str, int], list[str]]:
    plain, _ = fit(False)
    GRAPHS.clear()
    compiled, model = fit({"backend": counting, "fullgraph": True})
    own = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return all(torch.equal(*pair) for pair in zip(plain, compiled, strict=True)), dict(GRAPHS), own


def test_compiled_units_train_alike_without_breaks_and_recompilations() -> None:
    for equal, graphs, compiled in run_distributed(both, 2):
        assert equal
        assert compiled == ["blocks.0", "blocks.1"]
        assert graphs["graphs"] > 0
        # fullgraph raises at a break; nothing is compiled after the second step
        assert graphs["after 8"] == graphs["after 2"], graphs


@pytest.mark.parametrize("wrong", ["yes", 1.0, {1: 2}])
def test_other_values_of_compile_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected True, False or a mapping of options for torch\.compile"):
        MFSDPStrategy(compile=wrong)
