"""Train a sharded transformer on real text with `Trainer(strategy="mfsdp")`.

Without arguments: two processes on the CPU, about two minutes on two cores. It trains half of the steps, saves a
sharded checkpoint, starts a second Trainer that resumes from it and continues the same curve, prints a sample of
generated text, and leaves the checkpoints and a picture of the loss in `mfsdp-runs/pretrain`. The same script trains
the larger presets on GPUs:

    python examples/pretrain.py
    python examples/pretrain.py --config 1b --accelerator gpu --devices 4 --no-resume-demo
    python examples/pretrain.py --config 1b --accelerator gpu --devices 4 --precision transformer-engine
    python examples/pretrain.py --devices 4 --context 2
    python examples/pretrain.py --devices 4 --context 2 --tensor 2

With `--context 2` every two processes divide each window between them. With `--tensor 2` every two divide the weights of each
layer and compute the same windows.

With `--multi-token 1` it also learns to predict the byte after the next one, and says how many of these drafts its own next
prediction would accept.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only

from examples.decoder import PRESETS, TENSOR_PLAN
from examples.lightning_decoder import LightningDecoder, TextDataModule, generate
from examples.multi_token import MultiTokenOptions
from examples.reporting import Curve, Speed, hide_spurious_warnings, plot, save
from examples.text import decode, encode, unigram_bits_per_byte
from lightning_mfsdp import MFSDPStrategy


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What suits one preset: windows per microbatch and process, peak learning rate, optimizer steps."""

    micro_batch: int
    learning_rate: float
    steps: int


RECIPES = {
    "tiny": Recipe(micro_batch=8, learning_rate=2e-3, steps=240),
    "300m": Recipe(micro_batch=4, learning_rate=4e-4, steps=400),
    "1b": Recipe(micro_batch=2, learning_rate=3e-4, steps=400),
    "8b": Recipe(micro_batch=1, learning_rate=2e-4, steps=400),
}


class Sample(Callback):
    """Generates a continuation of one prompt at the end of training, on all ranks together."""

    def __init__(self, prompt: str, length: int, temperature: float) -> None:
        self.prompt, self.length, self.temperature = prompt, length, temperature
        self.text = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate while the strategy still holds the model."""
        prompt = encode(self.prompt).to(pl_module.device)
        context = pl_module.config.seq
        pl_module.eval()
        options = {"context": context, "temperature": self.temperature, "multiple": 16}
        tokens = generate(pl_module, prompt, self.length, **options)
        pl_module.train()
        self.text = decode(tokens.cpu())


def parse_args() -> argparse.Namespace:
    """Command line, with the defaults that depend on other arguments filled in."""
    parser = argparse.ArgumentParser(
        description="Train a decoder on the Python standard library's source, sharded by lightning-mfsdp."
    )
    parser.add_argument("--config", choices=PRESETS, default="tiny", help="model size (default: tiny)")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto (default: cpu)")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node (default: 2)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--strategy", default="mfsdp", help='any name Lightning knows (default: "mfsdp")')
    parser.add_argument("--context", type=int, default=1, help="processes that divide each window (default: 1)")
    parser.add_argument("--tensor", type=int, default=1, help="processes that divide each layer (default: 1)")
    parser.add_argument(
        "--precision", help="default: 32-true on the CPU, bf16-mixed elsewhere; transformer-engine for FP8"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps in all, both phases; rounded up to pairs of intervals"
    )
    parser.add_argument(
        "--interval", type=int, help="optimizer steps between validations (default: a sixth of --steps)"
    )
    parser.add_argument("--micro-batch", type=int, help="windows per microbatch and process")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per optimizer step (default: 1)")
    parser.add_argument("--learning-rate", type=float, help="peak learning rate")
    parser.add_argument(
        "--multi-token", type=int, default=0, metavar="DEPTH", help="bytes after the next one that are predicted too"
    )
    parser.add_argument("--recompute-multi-token", action="store_true", help="compute their blocks again in backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="def read_lines(path):\n", help="text that the sample continues")
    parser.add_argument("--sample-bytes", type=int, default=160, help="length of the sample; 0 makes none")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte (default: 0.8)")
    parser.add_argument("--output", type=Path, default=Path("mfsdp-runs/pretrain"))
    parser.add_argument("--resume", metavar="CHECKPOINT", help="continue a run from this checkpoint, in one phase")
    parser.add_argument("--no-resume-demo", action="store_true", help="train in one phase")
    parser.add_argument("--no-checkpoint", action="store_true", help="save nothing; implies --no-resume-demo")
    args = parser.parse_args()
    recipe = RECIPES[args.config]
    if args.recompute_multi_token and not args.multi_token:
        parser.error("--recompute-multi-token has nothing to compute again without --multi-token")
    if (args.context > 1 or args.tensor > 1) and args.strategy != "mfsdp":
        parser.error(f"--context and --tensor are options of the strategy mfsdp, not of {args.strategy}")
    args.steps = args.steps or recipe.steps
    args.interval = args.interval or max(1, args.steps // 6)
    args.epochs = 2 * -(-args.steps // (2 * args.interval))
    args.steps = args.epochs * args.interval
    args.micro_batch = args.micro_batch or recipe.micro_batch
    args.learning_rate = args.learning_rate or recipe.learning_rate
    args.precision = args.precision or ("32-true" if args.accelerator == "cpu" else "bf16-mixed")
    return args


def build_module(args: argparse.Namespace) -> LightningDecoder:
    """A fresh module; the schedule spans all phases, so that a resumed one continues it."""
    multi_token = MultiTokenOptions(depth=args.multi_token, recompute=args.recompute_multi_token)
    return LightningDecoder(
        args.config,
        learning_rate=args.learning_rate,
        total_steps=args.steps,
        # A preset that fills a GPU must never exist in full on one device.
        meta=args.config != "tiny" and args.strategy.startswith("mfsdp"),
        multi_token=multi_token if args.multi_token else None,
    )


def strategy_of(args: argparse.Namespace) -> str | MFSDPStrategy:
    """A name, or the strategy with a context axis or a tensor axis; tokens and targets are divided along dim 1."""
    if args.context == args.tensor == 1:
        return args.strategy
    plan = {f"decoder.{name}": style for name, style in TENSOR_PLAN.items()}
    return MFSDPStrategy(
        context=args.context,
        context_dims={"0": 1, "1": 1},
        tensor=args.tensor,
        tensor_plan=plan if args.tensor > 1 else None,
    )


def build_trainer(args: argparse.Namespace, epochs: int, callbacks: list[Callback]) -> Trainer:
    """A Trainer whose epoch is `interval` optimizer steps, with a validation at its end; it saves half-way and at the end."""
    if not args.no_checkpoint:
        callbacks = [
            *callbacks,
            ModelCheckpoint(
                args.output / "checkpoints",
                filename="step-{step:06d}",
                auto_insert_metric_name=False,
                every_n_epochs=args.epochs // 2,
                save_top_k=-1,  # delete nothing: the checkpoint that the second phase starts from stays
                enable_version_counter=False,
            ),
        ]
    return Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=strategy_of(args),
        precision=args.precision,
        max_epochs=epochs,
        limit_train_batches=args.interval * args.accumulate,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=not args.no_checkpoint,
        enable_model_summary=False,
        log_every_n_steps=10,
        callbacks=[*callbacks, TQDMProgressBar(refresh_rate=5)],
    )


@rank_zero_only
def report(
    args: argparse.Namespace,
    curve: Curve,
    speed: Speed,
    sample: Sample,
    baseline: float,
    accepted: list[float],
    resumed_at: int | None,
) -> None:
    """Save the curve and say how the run went; `accepted` are the shares of drafts, by how far ahead they were."""
    save(curve, args.output / "curve.csv")
    picture = plot(curve, baseline, args.output / "loss.png", resumed_at)
    final = curve.validation[-1][1]
    below = 1 - final / baseline
    if sample.length:
        print(f"\nA sample at temperature {args.temperature}:\n" + "-" * 60 + f"\n{sample.text}\n" + "-" * 60)
    print(f"\nspeed               {speed.summary()}")
    print(f"loss curve          {picture}")
    print(f"unigram baseline    {baseline:.3f} bits per byte")
    print(f"held-out text       {final:.3f} bits per byte")
    for number, rate in enumerate(accepted, start=1):
        print(f"drafts accepted     {rate:.1%} of those for byte {number} after the next one")
    if below > 0.1:
        print(f"verdict: the model LEARNED, it is {below:.0%} below the unigram baseline")
    else:
        print("verdict: NOT LEARNED yet, it is not 10% below the unigram baseline; give it more --steps")


def main() -> None:
    """Train, in two phases unless told otherwise, and report."""
    args = parse_args()
    hide_spurious_warnings()
    torch.set_float32_matmul_precision("high")
    seed_everything(args.seed, verbose=False)

    config = PRESETS[args.config]
    processes = args.devices * args.nodes // (args.context * args.tensor)  # those that read different windows
    held_out = 8 * args.micro_batch * processes
    data = TextDataModule(config.seq, args.micro_batch, held_out, pairs=args.context > 1)
    curve = Curve()
    speed = Speed(tokens_per_batch=args.micro_batch * config.seq * processes)
    sample = Sample(args.prompt, args.sample_bytes, args.temperature)
    checkpoint, resumed_at = args.resume, None

    if checkpoint is None and not (args.no_resume_demo or args.no_checkpoint):
        trainer = build_trainer(args, args.epochs // 2, [Curve(), speed])
        if trainer.is_global_zero:
            print(
                f"Phase 1: train to step {args.epochs // 2 * args.interval} of {args.epochs * args.interval}, and save a checkpoint"
            )
        trainer.fit(build_module(args), data)
        checkpoint, resumed_at = trainer.checkpoint_callback.best_model_path, trainer.global_step
        if trainer.is_global_zero:
            print(f"\nPhase 2: a new Trainer and a new model resume at step {resumed_at} from {checkpoint}")

    trainer = build_trainer(args, args.epochs, [curve, speed, *([sample] if args.sample_bytes else [])])
    trainer.fit(build_module(args), data, ckpt_path=checkpoint)
    metrics = trainer.callback_metrics
    accepted = [metrics[f"val_draft_acceptance_{number + 1}"].item() for number in range(args.multi_token)]
    report(args, curve, speed, sample, unigram_bits_per_byte(data.held_out()), accepted, resumed_at)


if __name__ == "__main__":
    main()
