"""Prints how much memory sharded layouts lose to padding on real model shapes, as a Markdown table.

Needs no GPU and no weights: only shapes. The tables in docs/design/layout.md are this script's output:

    python examples/benchmark/padding_table.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_mfsdp.engine.layout.layout import padding_advice, plan_layout

Shapes = list[tuple[int, ...]]
WORLD_SIZES = (8, 64, 256, 512, 1024, 2048, 4096, 8192)


def decoder_block(hidden: int, kv: int, intermediate: int, *, qkv_bias: bool = False) -> Shapes:
    """Parameters of a Llama or Qwen decoder block in module order; `kv` is the width of the keys."""
    biases: Shapes = [(hidden,), (kv,), (kv,)] if qkv_bias else []
    attention: Shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    mlp: Shapes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    return attention + biases + mlp + [(hidden,), (hidden,)]


def gpt2_block(hidden: int = 768) -> Shapes:
    """GPT-2 block with `[in, out]` weights, as its Conv1D stores them."""
    norms: Shapes = [(hidden,), (hidden,)]
    attention: Shapes = [(hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    return norms + attention + norms + [(hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]


def gpt2_model() -> Shapes:
    """GPT-2 small with its head tied to the embedding: 124.4 M parameters."""
    return [(50257, 768), (1024, 768)] + 12 * gpt2_block() + [(768,), (768,)]


def resnet50() -> Shapes:
    """ResNet-50: 161 tensors, 25.6 M parameters."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs: Shapes = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convs.append((4 * width, inputs, 1, 1))
            for conv in convs:
                shapes += [conv, (conv[0],), (conv[0],)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def latent_attention(hidden: int, heads: int, rank: int) -> Shapes:
    """Multi-head latent attention without query compression: 128 + 64 wide queries, 128 wide values."""
    keys_values: Shapes = [(rank + 64, hidden), (rank,), (heads * 256, rank)]
    return [(heads * 192, hidden), *keys_values, (hidden, heads * 128), (hidden,), (hidden,)]


def moe_layer(hidden: int, intermediate: int, experts: int, shared: int, heads: int, *, stack: int = 0) -> Shapes:
    """DeepSeek-style layer: latent attention, router, shared experts, and routed experts.

    Those are `[intermediate, hidden]` apart (`stack=0`), stacked to `[experts, intermediate, hidden]` (`stack=3`), or the
    same memory seen as `[experts * intermediate, hidden]` (`stack=2`).
    """
    shapes = [*latent_attention(hidden, heads, 512), (experts, hidden)]
    width = shared * intermediate
    shapes += [(width, hidden), (width, hidden), (hidden, width)]
    if stack == 3:
        return [*shapes, (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)]
    if stack == 2:
        return [*shapes, (experts * 2 * intermediate, hidden), (experts * hidden, intermediate)]
    return shapes + experts * [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


UNITS: dict[str, Callable[[], Shapes]] = {
    "Llama-3-8B block": lambda: decoder_block(4096, 1024, 14336),
    "Llama-3-8B embedding, head": lambda: [(128256, 4096)],
    "Llama-2-13B block": lambda: decoder_block(5120, 5120, 13824),
    "Llama-2-13B embedding, head": lambda: [(32000, 5120)],
    "Qwen2.5-7B block": lambda: decoder_block(3584, 512, 18944, qkv_bias=True),
    "Qwen2.5-7B embedding, head": lambda: [(152064, 3584)],
    "Qwen2.5-1.5B block": lambda: decoder_block(1536, 256, 8960, qkv_bias=True),
    "Qwen2.5-1.5B embedding": lambda: [(151936, 1536)],
    "GPT-2 block": gpt2_block,
    "GPT-2 embeddings": lambda: [(50257, 768), (1024, 768)],
    "GPT-2 whole": gpt2_model,
    "ResNet-50 whole": resnet50,
    "DeepSeek-V2-Lite layer": lambda: moe_layer(2048, 1408, 64, 2, 16),
    "the same, experts stacked to 2-D": lambda: moe_layer(2048, 1408, 64, 2, 16, stack=2),
    "the same, experts stacked to 3-D": lambda: moe_layer(2048, 1408, 64, 2, 16, stack=3),
    "DeepSeek-V3 layer": lambda: moe_layer(7168, 2048, 256, 1, 128),
    "Llama-3-8B block x 2": lambda: 2 * decoder_block(4096, 1024, 14336),
    "Llama-2-13B block x 2": lambda: 2 * decoder_block(5120, 5120, 13824),
    "Qwen2.5-7B block x 2": lambda: 2 * decoder_block(3584, 512, 18944, qkv_bias=True),
    "one norm of 4096": lambda: [(4096,)],
}


def set_partitions(count: int) -> Iterator[list[list[int]]]:
    """Every way to divide the numbers below `count` into sets."""
    if count == 0:
        yield []
        return
    for smaller in set_partitions(count - 1):
        for index in range(len(smaller)):
            yield [part + [count - 1] * (place == index) for place, part in enumerate(smaller)]
        yield [*smaller, [count - 1]]


def least_shard_numel(shapes: Shapes, num_shards: int, unit: int = 64) -> int:
    """A lower bound on the shard length, over all segments, of any layout that keeps the rules.

    Looks only at tensors longer than two shards of the layout we have. In a shorter layout they would be so too, and
    each would span two boundaries, so the shard length of its segment is a multiple of its row. For every division of
    these tensors into segments that gives a least length; no layout that beats ours can be below the smallest.
    """
    planned = plan_layout(shapes, num_shards).shard_numel
    long = [(math.prod(shape), math.prod(shape[1:])) for shape in shapes if math.prod(shape) > 2 * planned]
    total = -(-sum(math.prod(shape) for shape in shapes) // num_shards)
    bound = planned
    for parts in set_partitions(len(long)):
        length = 0
        for part in parts:
            base = math.lcm(unit, *(long[tensor][1] for tensor in part))
            length += -(-sum(long[tensor][0] for tensor in part) // (base * num_shards)) * base
        bound = min(bound, max(length, total))
    return bound


def percent_table(units: list[str], figure: Callable[[str, int], str]) -> str:
    """Markdown: a row for each unit, a column for each number of shards."""
    lines = ["| unit | " + " | ".join(map(str, WORLD_SIZES)) + " |", "|---|" + "--:|" * len(WORLD_SIZES)]
    lines += [f"| {unit} | " + " | ".join(figure(unit, world) for world in WORLD_SIZES) + " |" for unit in units]
    return "\n".join(lines)


def padding_cell(unit: str, world: int) -> str:
    """Padding in percent of the parameters, and the number of segments."""
    layout = plan_layout(UNITS[unit](), world)
    return f"{100 * layout.padding_fraction:.2f} ({len(layout.segments)})"


def bytes_cell(unit: str, world: int) -> str:
    """Padding of one rank's shard of a two-byte buffer in KiB."""
    layout = plan_layout(UNITS[unit](), world)
    return f"{layout.padding_bytes / world / 1024:.2f}"


def bound_cell(unit: str, world: int) -> str:
    """The least padding in percent that any layout could have."""
    shapes = UNITS[unit]()
    return f"{100 * (least_shard_numel(shapes, world) * world / sum(map(math.prod, shapes)) - 1):.2f}"


def report() -> tuple[str, str, str, str]:
    """Padding in percent, its lower bound, padding in KiB of a rank's shard, and one example of the advice."""
    units = list(UNITS)
    blocks = [unit for unit in units if unit.endswith(("block", "3-D"))]
    return (
        percent_table(units, padding_cell),
        percent_table(blocks, bound_cell),
        percent_table(units, bytes_cell),
        padding_advice(plan_layout(UNITS["Qwen2.5-7B block"](), 8192)),
    )


def main() -> None:
    """Prints the report."""
    sys.stdout.write("\n\n".join(report()) + "\n")


if __name__ == "__main__":
    main()
