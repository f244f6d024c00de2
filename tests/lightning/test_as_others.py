"""What works under Lightning's own strategies works here: its gradient norms, compiled modules, a module in two blocks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, units
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT, rest_at_night
from tests.lightning.models import DIM, Block, Classifier, dataset, make_trainer, seeded


class WithNorms(Classifier):
    """Logs what the utility finds; a module is shared by two blocks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(DIM, DIM)
        for block in self.blocks:
            block.shared = shared
        self.norms: list[dict[str, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale + self.shift)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for norm_type in (2, "inf"):
            norms = grad_norm(self, norm_type)
            self.log_dict(norms)
            self.norms.append({name: float(norm) for name, norm in norms.items()})


class SharingBlock(Block):
    """Calls what it shares."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)


def model() -> WithNorms:
    made = seeded(WithNorms)
    for block in made.blocks:
        block.__class__ = SharingBlock
    return made


def fit(strategy: Any, world: int, compiled: bool = False) -> tuple[dict[str, Tensor], WithNorms]:
    made = model()
    trainer = make_trainer(tempfile.gettempdir(), world, strategy=strategy, max_epochs=1)
    trainer.fit(torch.compile(made, backend="eager") if compiled else made, DataLoader(dataset(), batch_size=4))
    assert "grad_inf_norm_total" in trainer.callback_metrics
    found = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in made.named_parameters()}
    return found, made


def compare(rank: int, world: int) -> None:
    expected, plain = fit("ddp", world)
    for sharding in ("optim_grads_params", "optim_grads") if NIGHT else ("optim_grads_params",):
        found, sharded = fit(MFSDPStrategy(sharding=sharding), world)  # type: ignore[arg-type]
        names = [view.name for view in units(sharded)]
        assert names.count("blocks.0.shared") == 1, names
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
        for got, wanted in zip(sharded.norms, plain.norms, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def compare_compiled(rank: int, world: int) -> None:
    expected, _ = fit("ddp", world)
    found, compiled = fit(MFSDPStrategy(compile={"backend": "eager"}), world, compiled=True)
    assert "forward" in vars(compiled.blocks[0]), "units are compiled"
    assert "training_step" not in vars(compiled) or vars(compiled)["training_step"] == compiled.training_step
    assert compiled._compiler_ctx is None
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_norms_and_shared_modules_are_as_under_ddp() -> None:
    run_distributed(compare, 2)


@pytest.mark.parametrize("world", rest_at_night([1, 2], lambda world: world == 1))
def test_compiled_modules_are_as_under_ddp(world: int) -> None:
    run_distributed(compare_compiled, world)


def test_a_compiled_module_is_taken_as_compile_true(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_mfsdp.trainer.strategy.rank_zero_info", said.append)
    made = seeded(Classifier)
    step = made.training_step
    for given, expected in ((False, True), (True, True), ({"mode": "default"}, {"mode": "default"})):
        strategy = MFSDPStrategy(compile=given)
        strategy._lightning_module = from_compiled(torch.compile(made, backend="eager"))
        assert strategy._options.compile == expected
        assert strategy.lightning_module is made
        assert made.training_step == step
        assert "MFSDPStrategy(compile=True)" in said.pop()
    MFSDPStrategy()._lightning_module = made
    assert not said
