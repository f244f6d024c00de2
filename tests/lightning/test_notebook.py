"""Training in forked processes, as in notebooks; and all that a run says, held against DDP."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.trainer.known_warnings import KnownWarnings
from tests.helpers.forked import run
from tests.lightning.test_launch import ROOT, environment

LEAF_SPEC = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and treespec.is_leaf()` instead."
PYTREE = "lightning.pytorch.utilities._pytree"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notebook")
    command = [str(Path(__file__).with_name("notebook_script.py")), str(path)]
    code, output = run(command, environment(), path / "output", ROOT, timeout=100)
    assert code == 0, output
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return result


def test_forked_processes_train_as_ddp_does_and_the_program_has_the_weights(found: dict[str, dict[str, Any]]) -> None:
    ours, theirs = found["mfsdp_notebook-2"], found["ddp_notebook-2"]
    assert ours["is plain"]
    assert ours["checkpoint"]
    torch.testing.assert_close(torch.tensor(ours["weight"]), torch.tensor(theirs["weight"]), rtol=0.02, atol=0.002)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)


def test_one_process_trains_in_the_program_itself(found: dict[str, dict[str, Any]]) -> None:
    assert not found["mfsdp_notebook-1"]["is plain"], "sharded, ready for the next entry point"
    assert found["mfsdp_notebook-1"]["loss"] == pytest.approx(found["ddp_notebook-1"]["loss"], rel=0.02)


def test_a_model_on_the_meta_device_gets_memory_and_keeps_its_ties(found: dict[str, dict[str, Any]]) -> None:
    assert found["tied"] == {"tied": True, "scale": [2.0], "finite": True}


def test_layers_that_only_the_forks_have_are_named(folder: Path) -> None:
    said = (folder / "late.txt").read_text()
    assert "trained a model with other parameters (inner.weight, inner.bias)" in said
    assert "trainer.checkpoint_callback.best_model_path" in said


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_says_what_it_says_under_ddp_and_one_table_and_less(folder: Path, devices: int) -> None:
    def lines(strategy: str) -> Counter[str]:
        said = (folder / f"{strategy}-{devices}.txt").read_text()
        shown = re.split(r"[\r\n]+", said)  # without progress bars, tips that change, and numbers of versions
        return Counter(
            re.sub(r"^/\S+?:\d+: |\s+$", "", line)
            for line in shown
            if "it/s" not in line and "Tip:" not in line and "…" not in line
        )

    ours, theirs = lines("mfsdp_notebook"), lines("ddp_notebook")
    table = list((ours - theirs).elements())
    assert table[0].startswith("mfsdp: 1 unit, 66 parameters; this rank keeps ")
    assert [line.split() for line in table[1:]] == [
        ["unit", "class", "count", "parameters", "sharded", "MiB", "unsharded", "MiB"],
        ["Model", "Model", "1", "66", "<0.1", "-" if devices == 1 else "<0.1"],
    ]
    left_out = set((theirs - ours).elements())
    assert left_out == {
        LEAF_SPEC,
        "Precision bf16-mixed is not supported by the model summary.  "
        "Estimated model size in MB will not be accurate. Using 32 bits instead.",
    }


def test_filters_are_as_before_after_a_run(found: dict[str, dict[str, Any]]) -> None:
    assert all(one["filters"] for name, one in found.items() if name not in ("refused", "tied"))


def test_forks_of_a_process_that_has_a_process_group_are_refused(found: dict[str, dict[str, Any]]) -> None:
    assert "this process already has a process group of 1" in found["refused"]["error"]
    assert "torch.distributed.destroy_process_group()" in found["refused"]["error"]


def test_known_warnings_are_hidden_where_they_come_from_and_nowhere_else() -> None:
    def shown(text: str, module: str, *, first: str = "") -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            if first:
                warnings.simplefilter(first)  # type: ignore[arg-type]
            known = KnownWarnings()
            known.begin()
            warnings.warn_explicit(text, FutureWarning, "file.py", 1, module=module)
            known.end()
            assert not [one for one in warnings.filters if one[0] == "ignore"]
        return bool(caught)

    assert not shown(LEAF_SPEC, PYTREE)
    assert shown(LEAF_SPEC, "program")
    assert shown(f"{LEAF_SPEC} More.", PYTREE)
    assert shown("Another.", PYTREE)
    assert shown(LEAF_SPEC, PYTREE, first="always"), "a user's filter decides"


def test_the_way_to_start_processes_is_checked() -> None:
    for strategy in (MFSDPStrategy, MFSDPFabricStrategy):
        with pytest.raises(ValueError, match="start_method='spawn': expected one of 'popen', 'fork'"):
            strategy(start_method="spawn")  # type: ignore[arg-type]


def test_lightning_takes_forked_processes_for_interactive_ones() -> None:
    trainer = Trainer(strategy="mfsdp_notebook", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert trainer.strategy.launcher is not None
    assert trainer.strategy.launcher.is_interactive_compatible
