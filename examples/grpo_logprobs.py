"""Reinforcement learning in one file: a policy that is rewarded for lower-case letters, under `Trainer(strategy="mfsdp")`.

Group-relative policy optimization: for each prompt (a piece of real text) the policy writes several completions; each is rewarded, and
those better than their group become likelier. Log-probabilities and entropies of all completions come from a LinearLossHead, so they cost
no `[tokens, vocabulary]` of memory, and the two share one backward.

    python examples/grpo_logprobs.py
    python examples/grpo_logprobs.py --accelerator gpu --devices 4 --precision bf16-mixed --prompts 64
    python examples/grpo_logprobs.py --accelerator gpu --devices 4 --precision transformer-engine --prompts 64

The last computes the blocks in FP8. Prompts times completions are a multiple of 16, as FP8 wants its rows, however long these are; the
head stays in bfloat16.

Two processes on the CPU take about twenty seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mfsdp  # noqa: F401 - registers the strategy "mfsdp"
from examples.decoder import Decoder, DecoderConfig, rotary_tables
from examples.reporting import hide_spurious_warnings
from examples.text import BYTES, ByteText, decode
from lightning_mfsdp.ops import LinearLossHead

PROMPT = 16
COMPLETION = 8
IGNORED = -100
CONFIG = DecoderConfig(dim=64, layers=2, heads=2, kv_heads=2, ffn=176, vocab=BYTES, seq=PROMPT + COMPLETION)
LETTERS = (ord("a"), ord("z"))
RANDOM_REWARD = 26 / BYTES
"""What bytes drawn blindly get."""


class Policy(Decoder):
    """The reference decoder whose head scores targets instead of returning logits.

    Args:
        config: Sizes.
        temperature: At which it is sampled, and so the one of its log-probabilities.
    """

    def __init__(self, config: DecoderConfig, temperature: float) -> None:
        super().__init__(config)
        self.head = LinearLossHead(config.dim, config.vocab, temperature=temperature, ignore_index=IGNORED)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[B, S]` of `target`, or without one the logits `[B, V]` of what comes next."""
        x = self.embedding(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.config.head_dim, self.config.rope_base, tokens.device)
        for block in self.blocks:
            x = block(x, cos.to(x.dtype), sin.to(x.dtype))
        x = self.norm(x)
        return self.head(x[:, -1]) if target is None else self.head(x, target, "logprobs_and_entropy")


def reward_of(completions: Tensor) -> Tensor:
    """Share of lower-case letters in each row of bytes: a reward that anybody can check."""
    return ((completions >= LETTERS[0]) & (completions <= LETTERS[1])).float().mean(-1)


class PolicyGradient(LightningModule):
    """One policy-gradient step per batch of prompts.

    Args:
        group: Completions of each prompt.
        learning_rate: Of Adam.
        clip: Largest change of a probability ratio that is still rewarded.
        entropy_weight: What the policy gains for each nat of entropy, so that it goes on trying.
        temperature: Of sampling.
    """

    def __init__(
        self,
        group: int = 8,
        learning_rate: float = 1e-2,
        clip: float = 0.2,
        entropy_weight: float = 1e-3,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.group, self.learning_rate, self.clip = group, learning_rate, clip
        self.entropy_weight, self.temperature = entropy_weight, temperature
        self.policy: nn.Module | None = None
        self.dice = torch.Generator()
        self.rewards: list[Tensor] = []
        self.sample = Tensor()

    def configure_model(self) -> None:
        """Build the policy. Lightning calls this before it shards."""
        if self.policy is None:
            self.policy = Policy(CONFIG, self.temperature)

    def on_fit_start(self) -> None:
        """Dice of its own for each process, or all would write the same."""
        self.dice = torch.Generator(self.device).manual_seed(1 + self.global_rank)

    @torch.no_grad()
    def complete(self, prompts: Tensor) -> Tensor:
        """Prompts `[B, S]` continued by sampling. All ranks do as many forwards, each of which is a collective."""
        tokens = prompts
        for _ in range(COMPLETION):
            odds = self.policy(tokens).float().softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=self.dice)), dim=1)
        return tokens

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Write, reward, compare within groups, and score what was written."""
        prompts = batch[:, :PROMPT].repeat_interleave(self.group, 0)
        tokens = self.complete(prompts)
        rewards = reward_of(tokens[:, PROMPT:])
        by_group = rewards.view(-1, self.group)
        centered = by_group - by_group.mean(1, keepdim=True)
        advantage = (centered / (by_group.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        target = tokens[:, 1:].clone()
        target[:, : PROMPT - 1] = IGNORED  # the prompt is not the policy's work
        logprobs, entropy = self.policy(tokens[:, :-1], target)
        written = (target != IGNORED).float()
        ratio = (logprobs - logprobs.detach()).exp()  # 1, where each batch is used once
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)
        count = written.sum()
        spread = entropy.sum() / count
        loss = -(gain * written).sum() / count - self.entropy_weight * spread

        self.rewards.append(rewards.mean())
        self.sample = tokens[rewards.argmax()]
        self.log("reward", rewards.mean(), prog_bar=True, sync_dist=True)
        self.log("entropy", spread.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def train(
    steps: int, *, prompts: int = 8, accelerator: str = "cpu", devices: int = 2, precision: str = "32-true"
) -> PolicyGradient:
    """Train a policy for so many steps; its `rewards` has this process's mean of each."""
    seed_everything(0, verbose=False)
    module = PolicyGradient()
    trainer = Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy="mfsdp",
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(ByteText("train", PROMPT), prompts, shuffle=True, drop_last=True))
    return module


def main() -> None:
    """Train, and say what was learned."""
    parser = argparse.ArgumentParser(description="Reward a tiny sharded policy for lower-case letters.")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps (default: 24)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step and process (default: 8)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true", help="transformer-engine for FP8 (default: 32-true)")
    args = parser.parse_args()
    hide_spurious_warnings()
    if args.accelerator == "cpu":
        torch.set_num_threads(1)  # the products are so small that threads would only wait for each other
    module = train(
        args.steps,
        prompts=args.prompts,
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
    )
    if module.global_rank == 0:
        rewards = [float(reward) for reward in module.rewards]
        best, last = decode(module.sample[PROMPT:].cpu()), sum(rewards[-5:]) / len(rewards[-5:])
        print(f"reward {rewards[0]:.3f} -> {last:.3f} (bytes drawn blindly get {RANDOM_REWARD:.3f})")
        print(f"a completion: {best!r}")
        print("verdict: LEARNED" if last > 3 * RANDOM_REWARD else "verdict: NOT LEARNED yet; give it more --steps")


if __name__ == "__main__":
    main()
