"""What a multi-token predictor costs in a step, with its layers kept or computed again, in bfloat16 and FP8.

    python examples/benchmark/multi_token.py --size 1b --batch 4
    torchrun --standalone --nproc_per_node=2 examples/benchmark/multi_token.py --size 8b --precisions bf16 fp8

Trains the reference decoder without a predictor and with the ones of `PREDICTORS`, each in turn on the same random tokens. Prints, for
each, milliseconds of a step, peak memory, and both relative to the decoder without. FP8 is Transformer Engine's, current scaling, with
layers replaced, embedding and head in bfloat16. On the CPU, which counts no memory, only that every line runs means something.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.benchmark.engines import adamw
from examples.benchmark.processes import print_table, process_group
from examples.benchmark.recompute import measured
from examples.decoder import PRESETS, Decoder, next_token_loss
from examples.multi_token import MultiTokenDecoder, MultiTokenOptions
from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.te import Fp8Compute, Fp8Options

PREDICTORS: dict[str, MultiTokenOptions | None] = {
    "none": None,
    "1 token": MultiTokenOptions(),
    "1 token, computed again": MultiTokenOptions(recompute=True),
    "2 tokens, one layer": MultiTokenOptions(depth=2, shared=True),
    "2 tokens, one layer, computed again": MultiTokenOptions(depth=2, shared=True, recompute=True),
    "2 tokens": MultiTokenOptions(depth=2),
}
PRECISIONS = ("bf16", "fp8")


class Objective(nn.Module):
    """A decoder and its loss in one module, so that one forward is one step's: `[B, S + 1]` token ids to a loss, 0-D."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of the next token, and those of later ones with their weight."""
        tokens, targets = ids[:, :-1], ids[:, 1:]
        if not isinstance(self.decoder, MultiTokenDecoder):
            return next_token_loss(self.decoder(tokens), targets)
        own, ahead = self.decoder.losses(tokens, targets)
        return own + self.decoder.predictor.weighted(ahead)


def step_of(
    size: str, predictor: MultiTokenOptions | None, precision: str, batch: int, device: torch.device
) -> Callable[[], None]:
    """One step of training."""
    config = PRESETS[size]
    torch.manual_seed(0)
    with torch.device(device):
        decoder = Decoder(config) if predictor is None else MultiTokenDecoder(config, predictor)
    model = Objective(decoder)
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    compute: Fp8Compute | None = None
    if precision == "fp8":
        options = Fp8Options(replace_layers=True, keep_high_precision=("decoder.head",))
        compute = Fp8Compute(options)
        compute.prepare(model, dist.group.WORLD)
        policy = compute.policy(policy)
    ahead = decoder.predictor.layers if isinstance(decoder, MultiTokenDecoder) else ()
    for unit in (decoder.embedding, *decoder.blocks, *ahead, decoder.head, model):
        fully_shard(unit, policy=policy)
    optimizer = fully_shard_optimizer(adamw(model.parameters()))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    ids = torch.randint(0, config.vocab, (batch, config.seq + 1), generator=generator, device=device)

    def step() -> None:
        if compute is None:
            model(ids).backward()
        else:
            with compute.forward():
                loss = model(ids)
            with compute.backward():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(size: str, precisions: list[str], batch: int, steps: int, device: torch.device) -> Iterator[list[str]]:
    """Cells of the table. Every row's model is gone before the next one's is made."""
    for precision in precisions:
        alone: tuple[float, int] | None = None
        for name, predictor in PREDICTORS.items():
            ms, peak = measured(step_of(size, predictor, precision, batch, device), device, steps)
            gc.collect()
            alone = alone or (ms, peak)
            memory = [f"{peak / 2**30:.2f}", f"{peak / alone[1]:.3f}"] if peak else ["-", "-"]
            yield [precision, name, f"{ms:.1f}", f"{ms / alone[0]:.3f}", *memory]


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(PRESETS), default="300m")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    with process_group(options.device) as device:
        found = rows(options.size, options.precisions, options.batch, options.steps, device)
        print_table(["precision", "predictor", "step ms", "/ none", "peak GiB", "/ none"], 2, found)


if __name__ == "__main__":
    main()
