"""The reference decoder with a predictor through the Trainer, and the rate at which its drafts would be accepted."""

from __future__ import annotations

import io
import re
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import pretrain
from examples.decoder import DecoderConfig, next_token_loss
from examples.lightning_decoder import LightningDecoder, TextDataModule
from examples.multi_token import MultiTokenDecoder, MultiTokenOptions
from lightning_mfsdp import MFSDPStrategy, units
from tests.examples.test_scripts import curve
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import full_state, make_trainer, strict_warnings

CONFIG = DecoderConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=256, seq=16, tie_head=True)
DEPTH = 2


class Traced(LightningDecoder):
    """Keeps its losses."""

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        found = super().training_step(batch, batch_index)
        self.seen = [*getattr(self, "seen", []), torch.stack([found["loss"], found["next_token_loss"]]).detach()]
        return found


def data() -> TextDataModule:
    return TextDataModule(CONFIG.seq, 4, held_out_windows=16)


def fit(world: int, recompute: bool, meta: bool, **strategy: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    options = MultiTokenOptions(depth=DEPTH, recompute=recompute, loss_weight=0.5)
    module = Traced(CONFIG, total_steps=6, warmup_steps=1, learning_rate=1e-2, multi_token=options, meta=meta)
    strategy = MFSDPStrategy(**strategy)
    trainer = make_trainer(
        "unused", world, strategy=strategy, max_steps=6, val_check_interval=6, use_distributed_sampler=True
    )
    torch.manual_seed(1)
    trainer.fit(module, data())
    return module, trainer


def pretrain_script(folder: str) -> tuple[str, list[tuple[int, float]]]:
    """What the script prints, and its curve, of two steps with two microbatches each."""
    short = ["--steps", "2", "--interval", "1", "--accumulate", "2", "--micro-batch", "1", "--sample-bytes", "0"]
    ahead = ["--no-checkpoint", "--multi-token", "1", "--recompute-multi-token"]
    sys.argv = ["pretrain.py", *short, *ahead, "--output", folder]
    with redirect_stdout(io.StringIO()) as printed:
        pretrain.main()
    dist.barrier()  # rank 0 writes the curve
    return printed.getvalue(), curve(Path(folder), "train")


def runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    # Tracing a layer looks at the `.grad` of its input, which is no leaf in a chain of layers.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    found: dict[str, Any] = {}
    compiled = {"compile": {"backend": "eager", "fullgraph": True}}
    for name, recompute, meta, options in (
        ("kept", False, False, {}),
        ("again", True, False, {}),
        *([("compiled", True, False, compiled)] if NIGHT else []),
        ("from meta", True, True, {}),
    ):
        module, trainer = fit(world, recompute, meta, **options)
        found[name] = torch.stack(module.seen), full_state(module)
    found["metrics"] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    found["units"] = [view.name for view in units(module)]
    found["prediction"] = module(torch.arange(16)[None]).argmax(-1)
    found["pretrain"] = pretrain_script(folder)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(runs, 2, str(tmp_path_factory.mktemp("pretrain")))


def test_losses_and_weights_are_the_same_to_the_bit_with_and_without_recompute(ranks: Any) -> None:
    for found in ranks:
        losses, weights = found["kept"]
        again, same = found["again"]
        assert torch.equal(losses, again)
        assert all(torch.equal(value, same[name]) for name, value in weights.items())
        if NIGHT:
            torch.testing.assert_close(found["compiled"][0], losses)  # without a graph break
        assert losses[-1, 1] < losses[0, 1]
        # At the start every token costs about the same, and the predictor adds half of that.
        torch.testing.assert_close(losses[0, 0], 1.5 * losses[0, 1], rtol=0.05, atol=0.0)
        assert {f"decoder.predictor.layers.{index}" for index in range(DEPTH)} <= set(found["units"])
        assert bool(found["from meta"][0].isfinite().all())


def by_hand(state: dict[str, Tensor]) -> dict[str, float]:
    """The logged rates, position by position."""
    decoder = MultiTokenDecoder(CONFIG, MultiTokenOptions(depth=DEPTH))
    decoder.load_state_dict({name.removeprefix("decoder."): value for name, value in state.items()}, strict=False)
    decoder.head.weight = decoder.embedding.weight
    windows = torch.stack([data().held_out()[index] for index in range(16)])
    tokens, targets = windows[:, :-1], windows[:, 1:]
    with torch.no_grad():
        logits, (_, ahead) = decoder(tokens), decoder.all_states(tokens)
        drafts = decoder.head(ahead).argmax(-1)
    rates = {"val_bits_per_byte": float(next_token_loss(logits, targets)) / torch.tensor(2.0).log().item()}
    own = logits.argmax(-1)
    for k in range(1, DEPTH + 1):
        pairs = [(row, i) for row in range(16) for i in range(CONFIG.seq - k)]
        accepted = sum(int(drafts[k - 1, row, i] == own[row, i + k]) for row, i in pairs)
        correct = sum(int(drafts[k - 1, row, i] == windows[row, i + k + 1]) for row, i in pairs)
        rates[f"val_draft_acceptance_{k}"] = accepted / len(pairs)
        rates[f"val_draft_accuracy_{k}"] = correct / len(pairs)
    return rates


def test_the_rate_of_accepted_drafts_is_that_of_a_loop_over_held_out_text(ranks: Any) -> None:
    expected = by_hand(ranks[0]["from meta"][1])
    assert 0 < expected["val_draft_accuracy_1"] < expected["val_draft_acceptance_1"]
    for found in ranks:
        logged = {name: value for name, value in found["metrics"].items() if name in expected}
        assert logged == pytest.approx(expected, rel=1e-4)


def test_pretraining_says_how_many_drafts_are_accepted_and_its_curve_is_that_of_the_next_token(ranks: Any) -> None:
    printed, losses = ranks[0]["pretrain"]
    (rate,) = re.findall(r"drafts accepted +([0-9.]+)% of those for byte 1 after the next one", printed)
    assert 0 <= float(rate) <= 100
    assert [step for step, _ in losses] == [1, 2]
    assert losses[0][1] == pytest.approx(10, abs=0.3), "1,024 tokens to choose from, and nothing known"
