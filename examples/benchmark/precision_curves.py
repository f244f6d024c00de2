"""Loss curves of several precisions, of products or of AdamW's moments, on the same real text, from the same start.

    torchrun --standalone --nproc_per_node=2 examples/benchmark/precision_curves.py --size 300m --steps 500 --out curves

Trains through Trainer once for each precision. Two more runs in bfloat16, with the text in another order and from other weights, show
how far apart curves are that differ by chance. So does `-nudged` at the end of any name: the same run with a learning rate that is larger
by one millionth. A difference between precisions counts for something where it is larger than that between runs and nudged ones.
"fp8" is this package's own, and others that begin so are Transformer Engine's. "bf16-moments" computes in bfloat16 and keeps AdamW's
moments in it, too, "8bit-moments" in 8 bits, and "lean" has weights in bfloat16 besides, with remainders. Names with `-start-1` and so on
have other weights.

Rank 0 prints a table of the means of the last steps and of the loss on held-out text, and leaves curves.json and curves.png in the
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from lightning.pytorch import Trainer, seed_everything

from examples.decoder import PRESETS
from examples.lightning_decoder import LightningDecoder, TextDataModule
from examples.reporting import Curve, hide_spurious_warnings
from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy

LAST = 50  # steps whose mean is compared
FP8: dict[str, dict[str, Any]] = {
    "fp8-current": {"recipe": "current"},
    "fp8-block": {"recipe": "block"},
    "fp8-delayed": {"recipe": "delayed"},
    "fp8-weights": {"recipe": "current", "fp8_weights": True},
    "fp8-block-weights": {"recipe": "block", "fp8_weights": True},
    "fp8-fused": {"recipe": "current", "fp8_weights": True, "fuse_weight_gradients": True},
}
NUDGED = "-nudged"
MOMENTS = {"bf16-moments": "bfloat16", "8bit-moments": "8bit", "lean": "8bit"}
NAMES = ("bf16", "bf16-other-order", "bf16-other-start", *MOMENTS, "fp8", *FP8)
START = re.compile(r"-start-(\d+)$")


def kind_of(name: str) -> str:
    """What a row is, wherever it starts: one of `NAMES`."""
    return START.sub("", name.removesuffix(NUDGED))


def precision_of(name: str) -> MFSDPPrecision:
    """The plugin of a row."""
    name = kind_of(name)
    if name == "lean":
        return MFSDPPrecision("bf16-true")
    if name.startswith("bf16") or name in MOMENTS:
        return MFSDPPrecision("bf16-mixed")
    if name == "fp8":
        return MFSDPPrecision("fp8", keep_high_precision=["decoder.head"])
    return MFSDPPrecision("transformer-engine", replace_layers=True, keep_high_precision=["decoder.head"], **FP8[name])


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run: its training loss by step and its loss on held-out text, in bits per byte."""
    # Weights follow the seed; the order of the text follows the one that is set after they were drawn.
    what, start = kind_of(name), START.search(name.removesuffix(NUDGED))
    seed_everything(int(start[1]) if start else int(what == "bf16-other-start"), verbose=False)
    on_cpu = args.accelerator == "cpu"
    rate = args.learning_rate * (1 + 1e-6 * name.endswith(NUDGED))
    moments = MOMENTS.get(what, "float32")
    options = {"learning_rate": rate, "total_steps": args.steps, "betas": (0.9, args.beta2), "moments": moments}
    module = LightningDecoder(args.size, **options, meta=not on_cpu)
    if on_cpu:
        module.configure_model()
    os.environ["PL_GLOBAL_SEED"] = "1" if what == "bf16-other-order" else "0"  # what Lightning's sampler shuffles by
    data = TextDataModule(PRESETS[args.size].seq, args.micro_batch, held_out_windows=args.held_out)
    curve = Curve()
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=MFSDPStrategy(),
        plugins=[precision_of(name)],
        max_epochs=1,
        limit_train_batches=args.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[curve],
    )
    trainer.fit(module, data)
    return {"name": name, "training": [loss for _, loss in curve.training], "held_out": curve.validation[-1][1]}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: means of the last steps and held-out losses, beside those of the first run."""

    def end(run: dict[str, Any]) -> float:
        last = run["training"][-LAST:]
        return float(sum(last) / len(last))

    first = runs[0]
    lines = [
        f"| run | bits per byte, mean of the last {LAST} steps | / {first['name']} | held-out text | / {first['name']} |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {run['name']} | {end(run):.4f} | {end(run) / end(first):.4f} | {run['held_out']:.4f} | "
        f"{run['held_out'] / first['held_out']:.4f} |"
        for run in runs
    ]
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Running means over ten steps, and below them the distance from the mean of the first kind; a color for each kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    window = 10
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    kinds = [kind_of(run["name"]) + NUDGED * run["name"].endswith(NUDGED) for run in runs]
    smooth = [torch.tensor(run["training"]).unfold(0, window, 1).mean(-1) for run in runs]
    first = torch.stack([curve for curve, kind in zip(smooth, kinds, strict=True) if kind == kinds[0]]).mean(0)
    colors = {kind: f"C{number}" for number, kind in enumerate(dict.fromkeys(kinds))}
    for number, (curve, kind) in enumerate(zip(smooth, kinds, strict=True)):
        label = kind if kinds.index(kind) == number else None
        steps = range(window, window + len(curve))
        above.plot(steps, curve, linewidth=0.8, color=colors[kind], label=label)
        below.plot(steps, curve / first - 1, linewidth=0.8, color=colors[kind])
    above.set(ylabel="bits per byte", yscale="log")
    above.legend()
    below.set(xlabel="optimizer step", ylabel=f"relative to {kinds[0]}")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train every row and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=PRESETS, default="300m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=64, help="windows of held-out text")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--beta2", type=float, default=0.95, help="of AdamW")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--runs", default="bf16,bf16-other-order,fp8-current,fp8-block,fp8-weights")
    parser.add_argument("--out", type=Path, default=Path("mfsdp-runs/precision"))
    args = parser.parse_args()
    names = args.runs.split(",")
    if unknown := {name for name in names if kind_of(name) not in NAMES}:
        parser.error(
            f"unknown runs {sorted(unknown)}; there are {', '.join(NAMES)}, each with or without -start-1 and {NUDGED}"
        )
    hide_spurious_warnings()
    runs = []
    for name in names:
        runs.append(train(name, args))
        if os.environ.get("RANK", "0") == "0":
            ends = {"held_out": round(runs[-1]["held_out"], 4), "last": round(runs[-1]["training"][-1], 4)}
            print(name, json.dumps(ends), flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "curves.json").write_text(json.dumps(runs))
    if os.environ.get("RANK", "0") == "0":
        plot(runs, args.out / "curves.png")
        print(table(runs))


if __name__ == "__main__":
    main()
