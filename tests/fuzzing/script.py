"""A case as a script of its own: it needs torch, Lightning and this package, and nothing of the tests."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from tests.fuzzing.description import Description, features, to_json

_FUZZING = ("description", "joining", "model", "running", "plain", "sharded", "trainer", "comparing")
_PARTS = ("tests.helpers.gpus", *(f"tests.fuzzing.{name}" for name in _FUZZING))
_HEAD = '''"""{title}

Run it with python. What differs from plain PyTorch on one process is printed. It uses {features}.
"""

from __future__ import annotations
'''
_TAIL = """

# -- the case ----------------------------------------------------------------------------------------------------------

CASE = from_json({text!r})


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    ranks, device = CASE.configuration.ranks, CASE.configuration.device
    join(rank, ranks, device, folder)
    mesh = make_mesh(CASE.configuration.outer, ranks, device)
    raw = CASE.program.loop == "raw"
    events = run_loop(EngineRun(CASE, rank, mesh)) if raw else run_trainer(CASE, rank, mesh)
    outcome = Outcome([[]] * rank + [events])
    for problem in problems(CASE, run_plainly(CASE), outcome)[-20:]:
        if problem.startswith(f"rank {{rank}}"):
            print(problem)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder,), CASE.configuration.ranks)
"""
_OUTCOME = """

class Outcome:
    def __init__(self, events: Any) -> None:
        self.events, self.left = events, []

"""


def as_script(case: Description, title: str = "A case in which the engine and plain PyTorch do not agree.") -> str:
    """Source text."""
    imports: list[str] = [
        "import os",
        "import tempfile",
        "import torch.distributed as dist",
        "import torch.multiprocessing",
        "from lightning_mfsdp.engine.core.group import ParameterGroup",
        "from lightning_mfsdp.engine.core.inspect import context_of",
    ]
    bodies: list[str] = []
    for part in _PARTS:
        path = importlib.import_module(part).__file__
        assert path is not None
        found, body = _split(Path(path).read_text())
        imports += [line for line in found if line not in imports]
        bodies.append(body)
        if part.endswith(".trainer"):
            bodies.append(_OUTCOME)
    head = _HEAD.format(title=title, features=", ".join(sorted(features(case))))
    return "\n".join([head, *imports, *bodies]) + _TAIL.format(text=to_json(case))


def _split(source: str) -> tuple[list[str], str]:
    """Imports of other packages, and what follows the imports."""
    found = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = [ast.unparse(node) for node in found]
    ours = ("from tests.", "from __future__")
    return [line for line in lines if not line.startswith(ours)], "\n".join(source.splitlines()[found[-1].end_lineno :])
