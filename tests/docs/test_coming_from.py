"""docs/coming_from.md names options that the other strategies have, and the strategy answers each that it lacks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.options.foreign_options import FOREIGN_OPTIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs/coming_from.md").read_text()


@pytest.mark.parametrize("strategy", ["DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy"])
def test_each_option_in_the_table_is_answered_or_known(strategy):
    table = PAGE.split(f"| {strategy} | MFSDPStrategy |\n")[1].split("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[1:]]
    theirs = {name for cells in rows for name in re.findall(r"`([a-z_]{3,})", cells[0])}
    known = set(inspect.signature(MFSDPStrategy).parameters)
    assert len(theirs) > 6
    assert theirs <= known | FOREIGN_OPTIONS.keys()
    ours = {name for cells in rows for name in re.findall(r"`([a-z_]{3,})=", cells[1])}
    assert ours <= known
