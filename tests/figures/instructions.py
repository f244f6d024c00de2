"""Instructions of a settled step, by phase: `python tests/figures/instructions.py [CHECKOUT ...] [--fsdp2]`.

Calls say little about time: what one call of C does differs by a hundred times. Time itself differs on shared machines by more than
commits do. Instructions that the processor executes do not: counts of one checkout repeat within a percent. They are counted by
callgrind (`apt-get install valgrind`; a minute for each checkout) in a process of its own for each checkout, two at a time.

The model is 24 blocks of nine parameters, an embedding, a norm and a head, so small that a step is host time alone; the group is of two
ranks, in which every collective is called and none moves a byte ("fake"). Float32, clipped by its norm, torch's AdamW with `foreach`, which
it takes by itself on GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PHASES = ("nothing", "forward", "backward", "clip", "step", "zero_grad")
BLOCKS, WIDTH, ROWS, VOCABULARY = 24, 16, 8, 64
SETTLED, COUNTED = 12, 3


def train(checkout: Path, engine: str) -> None:
    """The counted process."""
    sys.path.insert(0, str(checkout))
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import torch.testing._internal.distributed.fake_pg
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norms[0](x)
            x = x + self.o(self.q(normed) + self.k(normed) + self.v(normed))
            normed = self.norms[1](x)
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    def clip_plainly(model: nn.Module, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=2)
    model = Model()
    clip: Callable[[nn.Module, float], Tensor] = clip_plainly
    adopt: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer  # noqa: E731
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard as shard
    else:
        import lightning_mfsdp

        assert str(lightning_mfsdp.__file__).startswith(str(checkout)), lightning_mfsdp.__file__
        shard, adopt = lightning_mfsdp.fully_shard, lightning_mfsdp.fully_shard_optimizer
        clip = lightning_mfsdp.clip_grad_norm_
    for module in (*model.blocks, model):
        shard(module)
    optimizer = adopt(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    ids, targets = (torch.randint(VOCABULARY, (2, ROWS)) for _ in range(2))

    def counting(on: str) -> None:
        subprocess.run(["callgrind_control", "-i", on, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)

    def dump(phase: str) -> None:
        subprocess.run(
            ["callgrind_control", f"--dump={phase}", str(os.getpid())], stdout=subprocess.DEVNULL, check=True
        )

    loss: list[Tensor] = []
    works: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "forward": lambda: loss.append(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())),
        "backward": lambda: loss.pop().backward(),
        "clip": lambda: clip(model, 1.0),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }
    for step in range(SETTLED + COUNTED):
        for phase, work in works.items():
            if step < SETTLED:
                work()
                continue
            counting("on")
            work()
            counting("off")
            dump(phase)
    os._exit(0)  # what ends the interpreter is not counted, and takes long here


def count(checkout: Path, engine: str) -> dict[str, float]:
    """Millions of instructions of a step by phase, less those of beginning and ending to count."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command += [sys.executable, __file__, str(checkout), "--worker", engine]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{checkout} {engine}: exit code {ran.returncode}\n{ran.stderr[-1500:]}")
        found = dict.fromkeys(PHASES, 0.0)
        for path in Path(folder).glob("out.*"):
            text = path.read_text()
            phase = re.search(r"^desc: Trigger: dump (\w+)$", text, re.M)
            total = re.search(r"^totals: (\d+)$", text, re.M)
            if phase and total and phase[1] in found:
                found[phase[1]] += int(total[1]) / COUNTED / 1e6
    nothing = found.pop("nothing")
    return {phase: value - nothing for phase, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="repositories' roots (this one)")
    parser.add_argument("--fsdp2", action="store_true", help="beside them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.checkouts] or [HERE]
    if arguments.worker:
        train(paths[0], arguments.worker)
    jobs = [(path, "mfsdp") for path in paths] + [(HERE, "fsdp2")] * arguments.fsdp2
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: count(*job), jobs))
    print("| millions of instructions | " + " | ".join(PHASES[1:]) + " | all | of the first |")
    print("|---|" + "--:|" * (len(PHASES) + 1))
    first = sum(results[0].values())
    for (path, engine), found in zip(jobs, results, strict=True):
        cells = [*found.values(), sum(found.values())]
        name = engine if engine == "fsdp2" else path.name
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {cells[-1] / first:.3f} |")


if __name__ == "__main__":
    main()
