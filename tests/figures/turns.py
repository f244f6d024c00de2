"""Time programs of the Trainer that take turns: all are started, and one trains some steps while the others wait.

    python tests/figures/turns.py 300m old=../old:mfsdp new=.:mfsdp fsdp=.:fsdp --clip 1.0

A program is NAME=CHECKOUT:STRATEGY, with the checkout's own package and `examples/benchmark/through_trainer.py`. A host that is shared
changes its speed within seconds, by more than commits differ; programs that take turns of half a second see the same host, so ratios are
of times that lie side by side. All must fit into the GPUs' memory together.

For each program: milliseconds of a step on the device and of the processor (all threads of rank 0), peak GiB, and the step's ratio to the
first program's in the same round, as median, first and third quartile of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

LEAD = 3  # steps at the start of a turn that are not timed


def wait_for(paths: list[Path], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            raise TimeoutError(
                f"waited {limit_s:.0f} s for {', '.join(path.name for path in paths if not path.exists())}"
            )
        time.sleep(0.002)


def train(arguments: argparse.Namespace) -> None:
    """One rank of one program."""
    checkout, strategy = arguments.programs[0].rsplit(":", 1)
    sys.path.insert(0, checkout)
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    import examples.benchmark.through_trainer as benchmark
    import lightning_mfsdp
    from examples.benchmark.command import MICROBATCH
    from examples.benchmark.engines import Options
    from examples.decoder import PRESETS

    assert str(lightning_mfsdp.__file__).startswith(checkout), lightning_mfsdp.__file__
    folder, (index, count) = Path(arguments.folder), arguments.place

    class Turns(Callback):
        def __init__(self) -> None:
            self.step = -arguments.warmup
            self.ms: list[float] = []
            self.cpu_ms: list[float] = []

        def stamp(self) -> tuple[torch.cuda.Event, float]:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event, time.process_time()

        def done(self, name: str) -> None:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            if dist.get_rank() == 0:
                (folder / name).touch()

        def on_train_batch_start(self, *_: Any) -> None:
            turn, place = divmod(self.step, LEAD + arguments.steps)
            if self.step == 0:
                self.done(f"ready-{index}")
                wait_for([folder / f"ready-{other}" for other in range(count)], 240)
                torch.cuda.reset_peak_memory_stats()
            if self.step >= 0 and place == 0 and (before := turn * count + index - 1) >= 0:
                wait_for([folder / f"turn-{before}"], 120)
            if self.step >= 0 and place == LEAD:
                self.began = self.stamp()

        def on_train_batch_end(self, *_: Any) -> None:
            turn, place = divmod(self.step, LEAD + arguments.steps)
            if self.step >= 0 and place == LEAD + arguments.steps - 1:
                ended = self.stamp()
                self.done(f"turn-{turn * count + index}")
                self.ms.append(self.began[0].elapsed_time(ended[0]) / arguments.steps)
                self.cpu_ms.append((ended[1] - self.began[1]) * 1e3 / arguments.steps)
            self.step += 1

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    options = Options(size=arguments.size, clip=arguments.clip, reduce_dtype=torch.float32)
    config, rows = PRESETS[arguments.size], MICROBATCH[arguments.size]
    steps = arguments.warmup + arguments.rounds * (LEAD + arguments.steps)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randint(0, config.vocab, (4 * rows, config.seq + 1), generator=generator).repeat(-(-steps // 4), 1)
    turns = Turns()
    trainer = Trainer(
        accelerator="gpu",
        devices=dist.get_world_size(),
        strategy=benchmark.strategy_of(strategy, options, graph=False),
        precision="bf16-mixed" if strategy.startswith("mfsdp") or strategy in ("ddp", "single") else None,
        max_steps=steps,
        gradient_clip_val=arguments.clip or None,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader = DataLoader(TensorDataset(data), batch_size=rows, pin_memory=True)
    trainer.fit(benchmark.TimedDecoder(options, strategy), loader)
    if dist.get_rank() == 0:
        found = {"ms": turns.ms, "cpu_ms": turns.cpu_ms, "peak": torch.cuda.max_memory_allocated() / 2**30}
        (folder / f"result-{index}").write_text(json.dumps(found))
    dist.destroy_process_group()


def own_words(log: str) -> str:
    """The end of what a program has written before torchrun says that it failed."""
    return log[: log.find("torch/distributed/elastic/multiprocessing/api.py")][-1500:]


def start(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Run all programs; returns the text of the table."""
    named = [text.partition("=")[::2] for text in arguments.programs]
    processes = []
    for index, (name, program) in enumerate(named):
        checkout, strategy = program.rsplit(":", 1)
        root = str(Path(checkout).resolve())
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.gpus}", __file__]
        options = [f"--{key}={getattr(arguments, key)}" for key in ("clip", "rounds", "steps", "warmup")]
        place = ["--folder", str(folder), "--place", str(index), str(len(named))]
        command = [sys.executable, *launch, arguments.size, f"{root}:{strategy}", *options, *place]
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
        with open(folder / f"{name}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(2)  # others that fail for the same reason say so too
            for process in processes:
                process.terminate()
        time.sleep(0.1)
    missing = [name for index, (name, _) in enumerate(named) if not (folder / f"result-{index}").exists()]
    if missing:
        raise SystemExit("\n".join(f"{name}: {own_words((folder / f'{name}.log').read_text())}" for name in missing))
    found = [json.loads((folder / f"result-{index}").read_text()) for index in range(len(named))]
    lines = [
        f"| {arguments.size}, clip {arguments.clip} | ms | CPU ms | peak GiB | ratio | quartiles | CPU ratio |",
        "|---|" + "--:|" * 6,
    ]
    for (name, _), one in zip(named, found, strict=True):
        ratios, cpu = ([a / b for a, b in zip(one[key], found[0][key], strict=True)] for key in ("ms", "cpu_ms"))
        low, _, high = quantiles(ratios, n=4)
        lines.append(
            f"| {name} | {median(one['ms']):.2f} | {median(one['cpu_ms']):.2f} | {one['peak']:.2f} "
            f"| {median(ratios):.3f} | {low:.3f} to {high:.3f} | {median(cpu):.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="a preset of examples/decoder.py")
    parser.add_argument("programs", nargs="+", help="NAME=CHECKOUT:STRATEGY")
    parser.add_argument("--gpus", type=int, default=2, help="processes of each program")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: none")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each program")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the first turn")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.place:
        train(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n".join(start(arguments, Path(folder))) + "\n")


if __name__ == "__main__":
    main()
