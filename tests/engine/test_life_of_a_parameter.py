"""docs/life_of_a_parameter.md names the files that a parameter comes through, all of them and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.programs import run_forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/life_of_a_parameter.md"

# Over a fake process group of two ranks: what is sharded in one file is gathered and reduced in others.
WALK = """
import json, sys
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from lightning_mfsdp import fully_shard, fully_shard_optimizer

folder = sys.argv[1]
dist.init_process_group("fake", rank=0, world_size=2)

def walk(through):
    seen = set()
    def see(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and code.co_name != "<module>":
            seen.add(code.co_filename[len(folder):].removesuffix(".py"))
    sys.setprofile(see)
    try:
        result = through()
    finally:
        sys.setprofile(None)
    return sorted(seen), result

model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

def shard():
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

def step():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

before, optimizer = walk(shard)
for _ in range(3):
    in_step, _ = walk(step)
print(json.dumps([before, in_step]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Files of the engine that run before the first step, and in a step."""
    program = tmp_path_factory.mktemp("walk") / "walk.py"
    program.write_text(WALK)
    output = run_forked(program, f"{ROOT / 'lightning_mfsdp/engine'}/", expected=(".*",))
    before, in_step = json.loads(output.splitlines()[-1])
    return set(before), set(in_step)


def named() -> tuple[set[str], set[str], set[str]]:
    """Files that the page names: where state changes, and what only carries the call, in a step and before the first."""
    text = PAGE.read_text()
    (changes,) = re.findall(r"(?s)in this order:\n\n(.*?)\n\n", text)
    (in_step,) = re.findall(r"In a step: (.*)\n", text)
    (before,) = re.findall(r"Before the first step also: (.*)\n", text)
    return (
        set(re.findall(r"\[([a-z_/]+)\]", changes)),
        set(re.findall("`(.*?)`", in_step)),
        set(re.findall("`(.*?)`", before)),
    )


def test_five_files_change_a_parameter() -> None:
    changes, _, _ = named()
    assert changes == {"core/group", "layout/layout", "core/weights", "core/gradients", "optimizer/adopt"}


def test_every_file_that_a_step_visits_is_named_and_no_other(visited: tuple[set[str], set[str]]) -> None:
    changes, in_step, _ = named()
    assert visited[1] - changes == in_step


def test_every_file_that_sharding_visits_is_named_and_no_other(visited: tuple[set[str], set[str]]) -> None:
    changes, in_step, before = named()
    assert visited[0] - changes - in_step == before
    assert not changes - visited[0] - visited[1]
