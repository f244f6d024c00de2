"""Milliseconds and peak memory of losses and log-probabilities over large vocabularies, forward and backward, on one device.

    python examples/benchmark/logprobs.py
    python examples/benchmark/logprobs.py --tokens 8192,131072 --vocab 128256 --engines mfsdp,liger,cce --work loss

Two kinds of work: "loss" is the mean cross-entropy; "logprobs" the log-probability of each target and the entropy, both with gradients.
Engines: `mfsdp` and `mfsdp-bf16` (this package, sums in float32 and in bfloat16), `eager` and `compiled` (all logits, float32 softmax),
`torch` (F.linear_cross_entropy, where PyTorch has it), `liger-fp32` and `liger` (fused linear cross-entropy, sums in float32 and in
bfloat16), `cce` and `cce-exact` (cut cross-entropy, which leaves out small gradients, and without that). Each is measured in this process
after the memory of the one before it was given back. What runs out of memory or is not installed is a row as well. Prints a JSON line for
each row, starting with RESULT, then a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp.ops import linear_cross_entropy, linear_logprobs

Call = Callable[[], Tensor]
Maker = Callable[[Tensor, Tensor, Tensor], Call]
ENTROPY_WEIGHT = 0.01


def eager_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As most training code computes it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def eager_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As most training code computes it."""
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    picked = logp.gather(1, target[:, None])[:, 0]
    return objective(picked, -(logp.exp() * logp).sum(-1))


def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A policy-gradient loss: another gradient for every token."""
    advantage = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device)
    return -(advantage * logprobs).mean() - ENTROPY_WEIGHT * entropy.mean()


def mfsdp_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """This package's."""
    return objective(*linear_logprobs(hidden, weight, target, return_entropy=True))


def calling(function: Callable[[Tensor, Tensor, Tensor], Tensor], **options: Any) -> Maker:
    """A maker of what has nothing to prepare."""
    return lambda *inputs: lambda: function(*inputs, **options)


def compiled(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Maker:
    """A maker that compiles for one shape."""

    def make(*inputs: Tensor) -> Call:
        torch.compiler.reset()
        quick = torch.compile(function, dynamic=False)
        return lambda: quick(*inputs)

    return make


def torch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Call:
    """PyTorch's own, from 2.13 on."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    return lambda: F.linear_cross_entropy(hidden, weight, target)


def liger(accumulate_in: torch.dtype | None) -> Maker:
    """Liger's fused linear cross-entropy."""

    def make(hidden: Tensor, weight: Tensor, target: Tensor) -> Call:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulate_in)
        return lambda: loss(weight, hidden, target)

    return make


def cut_cross_entropy(implementation: str) -> Maker:
    """Apple's cut cross-entropy."""

    def make(hidden: Tensor, weight: Tensor, target: Tensor) -> Call:
        from cut_cross_entropy import linear_cross_entropy as cut

        return lambda: cut(hidden, weight, target, impl=implementation)

    return make


ENGINES: dict[str, dict[str, Maker]] = {
    "loss": {
        "mfsdp": calling(linear_cross_entropy),
        "mfsdp-bf16": calling(linear_cross_entropy, sum_dtype=torch.bfloat16),
        "eager": calling(eager_loss),
        "compiled": compiled(eager_loss),
        "torch": torch_loss,
        "liger": liger(None),
        "liger-fp32": liger(torch.float32),
        "cce": cut_cross_entropy("cce"),
        "cce-exact": cut_cross_entropy("cce_exact"),
    },
    "logprobs": {
        "mfsdp": calling(mfsdp_logprobs),
        "eager": calling(eager_logprobs),
        "compiled": compiled(eager_logprobs),
    },
}


class Clock:
    """Milliseconds on a device, whose work goes on while the host prepares more."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.times: list[Any] = []

    def stamp(self) -> None:
        """Note where the device is now."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.times.append(event)
        else:
            self.times.append(time.perf_counter())

    def between(self) -> list[float]:
        """Between one stamp and the next."""
        pairs = zip(self.times, self.times[1:], strict=False)
        if self.on_gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


def forget(device: torch.device) -> None:
    """Give back what the row before has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(make: Maker, tokens: int, vocab: int, options: argparse.Namespace) -> dict[str, float]:
    """Best forward and backward of several, and the peak of one pass: of all memory, inputs and gradients among it."""
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(tokens, options.width, device=device, generator=generator).to(dtype).requires_grad_()
    weight = torch.empty(vocab, options.width, device=device, dtype=dtype).normal_(std=0.02, generator=generator)
    weight.requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device, generator=generator)
    call = make(hidden, weight, target)
    found: list[tuple[float, float]] = []
    loss = torch.zeros(())
    for repeat in range(1 + options.repeats):
        if repeat == 1:
            forget(device)  # the first pass compiles and tunes
        hidden.grad = weight.grad = None
        clock = Clock(device)
        clock.stamp()
        loss = call()
        clock.stamp()
        loss.backward()
        clock.stamp()
        forward_ms, backward_ms = clock.between()
        found.append((forward_ms, backward_ms))
    timed = found[1:]
    result = {
        "forward_ms": min(forward for forward, _ in timed),
        "backward_ms": min(backward for _, backward in timed),
        "step_ms": min(map(sum, timed)),
        "loss": float(loss.detach()),
    }
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: round(value, 4) for name, value in result.items()}


def row(work: str, engine: str, tokens: int, vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, or why it was not."""
    found: dict[str, Any] = {"work": work, "engine": engine, "tokens": tokens, "vocab": vocab, "width": options.width}
    forget(torch.device(options.device))
    try:
        found.update(measure(ENGINES[work][engine], tokens, vocab, options))
    except torch.OutOfMemoryError:
        found["failed"] = "out of memory"
    except ImportError as error:
        found["failed"] = f"not installed: {error}"
    except Exception as error:  # another library's mistake must not cost the rows that follow
        found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ratios are to eager's peak, which where it does not fit is estimated from fewer tokens, in proportion."""
    lines = [
        "| work | tokens | vocabulary | engine | forward ms | backward ms | both ms | peak GiB | of eager's | loss |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        head = f"| {each['work']} | {each['tokens']:,} | {each['vocab']:,} | {each['engine']} |"
        eager, is_estimate = eager_peak_gib(rows, each)
        if "failed" in each:
            wanted = f" (about {eager:.0f} GiB)" if each["engine"] == "eager" and eager and is_estimate else ""
            lines.append(f"{head} {each['failed']}{wanted} | | | | | |")
            continue
        peak = each.get("peak_gib")
        share = f"{'~' if is_estimate else ''}{peak / eager:.1%}" if peak and eager else ""
        figures = [f"{each[name]:.1f}" for name in ("forward_ms", "backward_ms", "step_ms")]
        figures += [f"{peak:.2f}" if peak else "", share, f"{each['loss']:.4f}"]
        lines.append(f"{head} {' | '.join(figures)} |")
    return "\n".join(lines)


def eager_peak_gib(rows: list[dict[str, Any]], like: dict[str, Any]) -> tuple[float | None, bool]:
    """Eager's peak for the same work and sizes, and whether it is an estimate."""
    fits = {
        each["tokens"]: each["peak_gib"]
        for each in rows
        if each["engine"] == "eager"
        and "peak_gib" in each
        and (each["work"], each["vocab"]) == (like["work"], like["vocab"])
    }
    if like["tokens"] in fits:
        return fits[like["tokens"]], False
    if not fits:
        return None, True
    most = max(fits)
    return fits[most] * like["tokens"] / most, True


def main() -> None:
    """Measure all rows, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768,131072", help="numbers of tokens, separated by commas")
    parser.add_argument("--vocab", default="32000,128256", help="sizes of the vocabulary")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden states (default: 4096)")
    parser.add_argument("--work", default="loss,logprobs")
    parser.add_argument("--engines", help="default: all that there are for the work")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for work in options.work.split(","):
        for vocab in map(int, options.vocab.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                for engine in options.engines.split(",") if options.engines else ENGINES[work]:
                    if engine in ENGINES[work]:
                        rows.append(row(work, engine, tokens, vocab, options))
                        print("RESULT " + json.dumps(rows[-1]), flush=True)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
