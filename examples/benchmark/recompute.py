"""What activation recompute saves and costs, and whether the planner foresees it, on one device.

    python examples/benchmark/recompute.py --size 1b --batch 4
    torchrun --standalone --nproc_per_node=2 examples/benchmark/recompute.py --size 8b

Records one step of the reference decoder, plans, and then trains with the first 0, 1/4, 1/2, 3/4 and all layers computed again, and in
the other ways of `WAYS`. Prints, for each, peak memory and milliseconds of a step, and what the plan said. On the CPU, which counts no
memory, times alone mean something.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.benchmark.engines import adamw
from examples.benchmark.logprobs import Clock, forget
from examples.benchmark.processes import print_table, process_group
from examples.decoder import PRESETS, Decoder, next_token_loss
from lightning_mfsdp import MixedPrecisionPolicy, Recompute, apply_recompute, fully_shard, fully_shard_optimizer
from lightning_mfsdp.recompute import Plan, plan_recompute, record_step, remove_recompute

WAYS = {
    "pairs": Recompute(num_layers=2),
    "all, inputs on the host": Recompute(offload=True),
    "matrix products kept": Recompute(method="selective", save_ops=["matmul"]),
    "attention kept": Recompute(method="selective", save_ops=["attention"]),
    "feed-forward only": Recompute(method="selective", modules=["*.feed_forward"]),
}
NOBODY = "-"


def built(size: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder, sharded, with its optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(PRESETS[size])
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, policy=policy)
    return model, fully_shard_optimizer(adamw(model.parameters()))


def measured(step: Callable[[], None], device: torch.device, steps: int) -> tuple[float, int]:
    """Median milliseconds of a step, and the most memory allocated, after three steps that settle everything."""
    for _ in range(3):
        step()
    forget(device)
    clock = Clock(device)
    clock.stamp()
    for _ in range(steps):
        step()
        clock.stamp()
    return median(clock.between()), torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def planned(model: nn.Module, loss: Callable[[], Tensor]) -> Plan:
    """From one recorded step."""
    with record_step(model) as recorder:
        loss().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return plan_recompute(recorder.record, 2**62)


def rows(size: str, batch: int, steps: int, device: torch.device) -> Iterator[list[str]]:
    """Cells of the table."""
    model, optimizer = built(size, device)
    config = PRESETS[size]
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    ids = torch.randint(0, config.vocab, (batch, config.seq + 1), generator=generator, device=device)

    def loss() -> Tensor:
        return next_token_loss(model(ids[:, :-1]), ids[:, 1:])

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain_ms, _ = measured(step, device, steps)
    plan = planned(model, loss)
    quarters = dict.fromkeys(round(part * config.layers / 4) for part in range(5))
    for count in quarters:
        remove_recompute(model)
        if count:
            apply_recompute(model, Recompute(method="block", num_layers=count))
        ms, peak = measured(step, device, steps)
        foreseen = plan.rows[count]
        foreseen_ms = plain_ms + 1e3 * foreseen.extra_seconds
        memory = foreseen.peak_bytes if peak else 0
        yield [f"first {count}", *cells(peak, memory, 2**-30, 2), *cells(ms, foreseen_ms, 1, 1)]
    for name, choice in WAYS.items():
        remove_recompute(model)
        apply_recompute(model, choice)
        ms, peak = measured(step, device, steps)
        yield [name, *cells(peak, 0, 2**-30, 2), *cells(ms, 0, 1, 1)]


def cells(found: float, foreseen: float, scale: float, digits: int) -> list[str]:
    """Found, foreseen, and what the latter is of the former."""
    known = [f"{value * scale:.{digits}f}" if value else NOBODY for value in (found, foreseen)]
    return [*known, f"{foreseen / found:.3f}" if found and foreseen else NOBODY]


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(PRESETS), default="300m")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    with process_group(options.device) as device:
        head = ["computed again", "peak GiB", "planned", "ratio", "step ms", "planned", "ratio"]
        print_table(head, 1, rows(options.size, options.batch, options.steps, device))


if __name__ == "__main__":
    main()
