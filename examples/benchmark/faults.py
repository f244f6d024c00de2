"""What becomes of a job when one of its ranks fails: torchrun, two ranks, faults in step 17 of 30.

    python examples/benchmark/faults.py --runs 3 --limit 90                      # two GPUs, or one, on which NCCL takes ranks for hosts
    python examples/benchmark/faults.py --accelerator cpu --strategies mfsdp,ddp # gloo

Prints a line of JSON for each run and a table at the end. Seconds count from the fault until no process is left, or, where torchrun starts
the job again, until its first step is done, without starting processes and imports. What is left after the limit is killed.
"""

from __future__ import annotations

import time

BORN = time.time()

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STRATEGIES = ("mfsdp", "fsdp", "ddp")
# Kind of fault, and how often torchrun may start again.
FAULTS = {
    "exception": 0,
    "out of memory": 0,
    "out of memory after backward": 0,
    "SIGKILL": 2,
    "SIGTERM": 0,
}
STEPS, FAULT_AT, SAVE_EVERY = 30, 17, 5


def train(folder: Path, strategy: str, fault: str, rank_of_fault: int, accelerator: str, timeout_s: int) -> None:
    """What each rank runs."""
    from datetime import timedelta

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
    from torch import Tensor, nn

    from lightning_mfsdp import MFSDPStrategy

    devices = {"num_nodes": 1, "devices": 2}
    if accelerator == "cuda" and torch.cuda.device_count() == 1:
        devices = as_two_hosts()
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def event(what: str, **more: Any) -> None:
        with (folder / f"events-{rank}").open("a") as file:
            file.write(json.dumps({"what": what, "start": start, "time": time.time(), **more}) + "\n")

    def happen() -> None:
        event("fault")
        if fault == "exception":
            raise ZeroDivisionError("in training_step")
        if fault.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault))
        elif accelerator == "cuda":
            torch.empty(2**44, device="cuda")
        else:
            raise torch.OutOfMemoryError("pretended")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(256), nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.linear(self.norm(x)))

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(8)))

        def due(self) -> bool:
            return start == 0 and rank == rank_of_fault and self.global_step == FAULT_AT

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.due() and "after" not in fault:
                happen()
            return self.blocks(batch).square().mean()

        def on_after_backward(self) -> None:
            if self.due() and "after" in fault:
                happen()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            event("step", step=trainer.global_step)

    timeout = timedelta(seconds=timeout_s)
    strategies: dict[str, Any] = {
        "mfsdp": lambda: MFSDPStrategy(timeout=timeout, units=[Block]),
        "fsdp": lambda: FSDPStrategy(timeout=timeout, auto_wrap_policy={Block}, state_dict_type="sharded"),
        "ddp": lambda: DDPStrategy(timeout=timeout),
    }
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator=accelerator,
        **devices,
        strategy=strategies[strategy](),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_on_exception=True),
            Watch(),
        ],
    )
    data = torch.utils.data.DataLoader(torch.randn(STEPS * 2 * 4, 256), batch_size=4)
    event("ready", born=BORN)
    try:
        trainer.fit(Model(), data, ckpt_path="last")
    except BaseException as error:
        event("error", error=f"{type(error).__name__}: {str(error)[:200]}")
        raise
    event("done", step=trainer.global_step)


def as_two_hosts() -> dict[str, int]:
    """Let two ranks share a GPU, which NCCL refuses on one host. Returns what the Trainer is told."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return {"num_nodes": 2, "devices": 1}


def one_run(options: argparse.Namespace, strategy: str, fault: str) -> dict[str, Any]:
    """Start a job, and say what became of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--max-restarts={FAULTS[fault]}", __file__, "--train", name, strategy, fault]
        command += ["--accelerator", options.accelerator, "--timeout", str(options.timeout)]
        command += ["--rank", str(options.rank)]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            ended, fault_at = None, None
            begun = time.time()
            while ended is None:
                time.sleep(0.05)
                if job.poll() is not None:
                    ended = time.time()
                if fault_at is None:
                    fault_at = next((seen["time"] for seen in events(folder, options.rank, "fault")), None)
                if time.time() > (begun + 3 * options.limit if fault_at is None else fault_at + options.limit):
                    break
            if ended is None:
                os.killpg(job.pid, signal.SIGKILL)  # torchrun and the ranks that it started
                job.wait()
        if options.keep:
            Path(options.keep, f"{strategy}-{fault}-{time.time_ns()}.txt").write_text((folder / "output").read_text())
        found: dict[str, Any] = {"strategy": strategy, "fault": fault, "code": job.returncode}
        if fault_at is None:
            return {**found, "outcome": "no fault came", "seconds": None}
        again = [
            (ready, after_ready(folder, rank, ready)) for rank in (0, 1) for ready in events(folder, rank, "ready", 1)
        ]
        steps = [step for _, step in again if step is not None]
        found["errors"] = [seen["error"] for rank in (0, 1) for seen in events(folder, rank, "error")]
        found["saved"] = sorted(path.name for path in folder.glob("*.ckpt"))
        if len(steps) == 2:
            ready = max(again, key=lambda pair: pair[0]["time"])[0]
            waited = (ready["born"] - fault_at) + (max(step["time"] for step in steps) - ready["time"])
            return {**found, "outcome": f"trains again from step {steps[0]['step'] - 1}", "seconds": round(waited, 1)}
        if ended is None:
            return {**found, "outcome": f"still there after {options.limit} s", "seconds": None}
        return {**found, "outcome": "ended", "seconds": round(ended - fault_at, 1)}


def events(folder: Path, rank: int, what: str, least_start: int = 0) -> list[dict[str, Any]]:
    """What a rank wrote."""
    path = folder / f"events-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    seen = [json.loads(line) for line in lines if line.endswith("}")]
    return [one for one in seen if one["what"] == what and one["start"] >= least_start]


def after_ready(folder: Path, rank: int, ready: dict[str, Any]) -> dict[str, Any] | None:
    """The first step of a start."""
    steps = (step for step in events(folder, rank, "step", 1) if step["start"] == ready["start"])
    return next(steps, None)


def table(results: list[dict[str, Any]], strategies: list[str], faults: list[str]) -> str:
    """A row for each fault, a column for each strategy; median and all seconds."""
    lines = [f"| fault | {' | '.join(strategies)} |", "|---" * (len(strategies) + 1) + "|"]
    for fault in faults:
        cells = []
        for strategy in strategies:
            runs = [one for one in results if (one["strategy"], one["fault"]) == (strategy, fault)]
            kinds = " / ".join(dict.fromkeys(one["outcome"] for one in runs))
            seconds = [one["seconds"] for one in runs if one["seconds"] is not None]
            median = f": {statistics.median(seconds):.1f} s ({', '.join(map(str, seconds))})" if seconds else ""
            cells.append(kinds + median)
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=90, help="seconds after the fault")
    parser.add_argument("--timeout", type=int, default=30, help="of collectives, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="side by side")
    parser.add_argument("--rank", type=int, default=1, help="on which the fault comes")
    parser.add_argument("--keep", help="a folder for what the jobs print")
    options = parser.parse_args()
    if options.train:
        folder, strategy, fault = options.train
        train(Path(folder), strategy, fault, options.rank, options.accelerator, options.timeout)
        return
    strategies, faults = options.strategies.split(","), options.faults.split(",")
    results = []
    with ThreadPoolExecutor(options.jobs) as jobs:
        cells = [(strategy, fault) for _ in range(options.runs) for fault in faults for strategy in strategies]
        for result in jobs.map(lambda cell: one_run(options, *cell), cells):
            results.append(result)
            print(json.dumps(result), flush=True)
    print(table(results, strategies, faults))


if __name__ == "__main__":
    main()
