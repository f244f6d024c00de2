"""Complex parameters train as in plain PyTorch, beside real ones, under every sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import (
    AveragedWeights,
    GradientWatch,
    MFSDPStrategy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
)
from tests.engine.cases import Problems
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Spectral(nn.Module):
    """Filters in the frequency domain, a complex linear layer, and real layers around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.filters = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.mix = nn.Linear(8, 8, dtype=torch.complex64)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x).float()) * self.filters.sum(0) * self.gain
        return self.last(self.mix(spectrum).abs())


def seeded() -> Spectral:
    torch.manual_seed(0)
    return Spectral()


def batch(step: int, rank: int | None = None, world: int = 1) -> Tensor:
    """Of all ranks, or this rank's part."""
    torch.manual_seed(step)
    x = torch.randn(2 * world, 4)
    return x if rank is None else x[2 * rank : 2 * rank + 2]


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def weights_gradients_and_norms_are_those_of_one_process(rank: int, world: int) -> None:
    problems = Problems()
    for optimizer_name, make in OPTIMIZERS.items():
        plain = seeded()
        optimizer, norms = make(plain.parameters()), []
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                plain(batch(2 * step + micro, world=world)).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            optimizer.step()
        for sharding in SHARDINGS:
            where = f"{optimizer_name} {sharding}"
            model = fully_shard(seeded(), sharding=sharding)
            sharded_optimizer = fully_shard_optimizer(make(model.parameters()))
            for step in range(3):
                sharded_optimizer.zero_grad()
                with no_sync(model):
                    model(batch(2 * step, rank, world)).square().mean().backward()
                model(batch(2 * step + 1, rank, world)).square().mean().backward()
                if step == 1:
                    own = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
                    problems.close(torch.as_tensor(own), norms[step], f"{where} get_total_norm")
                problems.close(clip_grad_norm_(model, 0.5), norms[step], f"{where} norm {step}")
                sharded_optimizer.step()
            for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                whole = parameter.full_tensor().detach()  # type: ignore[attr-defined]
                problems.expect(whole.dtype == expected.dtype, f"{where} {name}: {whole.dtype}")
                problems.close(
                    torch.view_as_real(whole) if whole.is_complex() else whole, _real(expected), f"{where} {name}"
                )
                sums = parameter.detach().sum(), expected.detach().sum()
                problems.close(
                    _real(torch.as_tensor(sums[0])), _real(sums[1]), f"{where} sum of {name}", rtol=1e-4, atol=1e-5
                )
    problems.finish()


def _real(value: Tensor) -> Tensor:
    value = value.detach()
    return torch.view_as_real(value) if value.is_complex() else value


def with_low_precision_complex_weights_keep_theirs(rank: int, world: int) -> None:
    """Real gradients are sent in bfloat16 and summed in float32; complex ones are not rounded."""
    problems, results = Problems(), []
    for sharding in SHARDINGS:
        policy = MixedPrecisionPolicy(
            main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16, high_precision_reduce=True
        )
        model = fully_shard(seeded(), sharding=sharding, policy=policy)
        model(batch(0, rank, world)).square().mean().backward()
        results.append({name: one.grad.full_tensor() for name, one in model.named_parameters()})  # type: ignore[union-attr]
    plain = seeded()
    plain(batch(0, world=world)).square().mean().backward()
    for sharding, gradients in zip(SHARDINGS, results, strict=True):
        for name, parameter in plain.named_parameters():
            if parameter.is_complex():
                problems.close(_real(gradients[name]), _real(parameter.grad), f"{sharding} {name}")  # type: ignore[arg-type]
    problems.finish()


def averages_and_watches_work(rank: int, world: int) -> None:
    problems = Problems()
    for sharding in SHARDINGS:
        model = fully_shard(seeded(), sharding=sharding)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        average, watch = AveragedWeights(model), GradientWatch(model)
        average.update(0.5)
        before = {name: rows.clone() for name, rows in average.rows().items()}
        model(batch(0, rank, world)).square().mean().backward()
        problems.expect(watch.check() is None, f"{sharding}: finite gradients are reported")
        optimizer.step()
        average.update(0.5)
        for name, rows in average.rows().items():
            now = model.get_parameter(name).to_local()  # type: ignore[attr-defined]
            problems.close(_real(rows), _real((before[name] + now) / 2), f"{sharding} average of {name}")
        watch.close()
    problems.finish()


class Trained(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = seeded()

    def training_step(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def resumed(rank: int, world: int, folder: str) -> None:
    strict_warnings()
    data = torch.stack([batch(step, rank, world) for step in range(2)])
    plain = seeded()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        plain(batch(step % 2, world=world)).square().mean().backward()
        optimizer.step()
    for kind in ("sharded", "full"):
        path = Path(folder, kind)
        for epochs in (1, 2):
            model = Trained()
            strategy = MFSDPStrategy(state_dict_type=kind)  # type: ignore[arg-type]
            trainer = make_trainer(folder, world, strategy=strategy, max_epochs=epochs)
            trainer.fit(model, DataLoader(data, batch_size=None), ckpt_path=path if epochs == 2 else None)
            trainer.save_checkpoint(path if epochs == 1 else Path(folder, "end"))
        weights = full_state(model)
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(weights[f"model.{name}"], expected.detach(), rtol=1e-4, atol=1e-6)


CASES = (
    weights_gradients_and_norms_are_those_of_one_process,
    with_low_precision_complex_weights_keep_theirs,
    averages_and_watches_work,
)
WORLDS = {1: CASES, 2: CASES, **at_night({3: (weights_gradients_and_norms_are_those_of_one_process,)})}


@by_world(WORLDS)
def test_complex_parameters(world: int, case: Any) -> None:
    check(WORLDS, world, case)


def test_a_run_with_complex_parameters_is_resumed(tmp_path: Path) -> None:
    run_distributed(resumed, 2, str(tmp_path))
