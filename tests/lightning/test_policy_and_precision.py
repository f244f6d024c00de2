"""A policy beside a precision string: what contradicts it is refused with the ways out, the rest is done and said."""

from __future__ import annotations

import logging
import tempfile
from itertools import product
from typing import Any, get_args

import pytest
import torch
from lightning.fabric import Fabric
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy, MixedPrecisionPolicy, sharded_parameters
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy
from lightning_mfsdp.options.dtypes import PrecisionName
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, loader, make_trainer, seeded, strict_warnings

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (None, F16, BF16, F32, F64)
PRECISIONS = get_args(PrecisionName)

# What each string goes with, by field of the policy.
COMPUTE: dict[str, set[Any]] = {
    "32-true": {None, F32},
    "bf16-mixed": {None, BF16, F32},
    "bf16-true": {None, BF16},
    "16-mixed": {None, F16, F32},
    "16-true": {None, F16},
    "64-true": {None, F64},
    "transformer-engine": {None, BF16, F32},
    "fp8": {None, BF16, F32},
}
MAIN = {name: allowed | ({F32} if name != "64-true" else set()) for name, allowed in COMPUTE.items()}
# Lightning has no plugin for float16 autocast on the CPU, no "fp8", and needs Transformer Engine for its own; ours take any string.
BY_STRING = [name for name in PRECISIONS if name not in ("16-mixed", "transformer-engine", "fp8")]


def agrees(precision: str, compute: Any, main: Any) -> bool:
    return compute in COMPUTE[precision] and main in MAIN[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_policy_beside_each_precision_is_taken_or_refused_by_both_strategies(precision: Any) -> None:
    for compute, main in product(DTYPES, DTYPES):
        policy = MixedPrecisionPolicy(compute_dtype=compute, main_params_dtype=main, main_grads_dtype=None)
        ways: list[Any] = [
            lambda policy=policy: MFSDPStrategy(policy=policy, precision_plugin=MFSDPPrecision(precision)),
            lambda policy=policy: MFSDPFabricStrategy(policy=policy, precision=MFSDPFabricPrecision(precision)),
        ]
        if precision in BY_STRING:
            ways += [
                lambda policy=policy: (
                    make_trainer(".", 1, strategy=MFSDPStrategy(policy=policy), precision=precision).strategy
                ),
                lambda policy=policy: (
                    Fabric(
                        accelerator="cpu", devices=1, strategy=MFSDPFabricStrategy(policy=policy), precision=precision
                    ).strategy
                ),
            ]
        for way in ways:
            if agrees(precision, compute, main):
                strategy = way()
                plugin = strategy.precision if isinstance(strategy, MFSDPFabricStrategy) else strategy.precision_plugin
                assert (plugin.precision, plugin.policy.compute_dtype) == (precision, compute)
            elif precision == "transformer-engine" and compute is F16:
                with pytest.raises(ValueError, match="float16 beside FP8"):
                    way()
            else:
                field = "compute_dtype" if compute not in COMPUTE[precision] else "main_params_dtype"
                with pytest.raises(
                    ValueError, match=rf"precision='{precision}'.*policy\.{field}=torch\.\w+ contradict"
                ):
                    way()


def test_a_policy_without_a_precision_is_answered_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match="contradict each other") as info:
        make_trainer(".", 1, strategy=MFSDPStrategy(policy=MixedPrecisionPolicy(compute_dtype=BF16)))
    said = str(info.value)
    for part in (
        "precision='32-true' (also the default if no precision is passed)",
        "policy.compute_dtype=torch.bfloat16",
        'use precision="bf16-mixed" or "bf16-true"',
        'plugins=[MFSDPPrecision("32-true", policy=policy)]',
        "expected torch.float32, or None",
    ):
        assert part in said, f"{part!r} in {said!r}"


class Watched(Classifier):
    """Notes what a linear layer inside a unit computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()
        self.blocks[0].linear.register_forward_hook(
            lambda layer, _, output: self.seen.add((layer.weight.dtype, output.dtype))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.blocks[0](self.inputs(batch[0])).float()[:, :5], batch[1])


def fits(rank: int, world: int) -> list[Any]:
    strict_warnings()
    found = []
    for precision, compute, main in product(("32-true", "bf16-mixed", "bf16-true", "64-true"), DTYPES, DTYPES):
        if not agrees(precision, compute, main):
            continue
        policy = MixedPrecisionPolicy(compute_dtype=compute, main_params_dtype=main, main_grads_dtype=None)
        model = seeded(Watched)
        trainer = make_trainer(
            tempfile.gettempdir(), world, strategy=MFSDPStrategy(policy=policy), precision=precision, max_steps=1
        )
        trainer.fit(model, loader(4, 4, rank, world))
        (view,) = (one for one in sharded_parameters(model) if one.name == "blocks.0.linear.weight")
        found.append(((precision, compute, main), model.seen, view.main.dtype))
    return found


def test_what_is_taken_is_what_is_computed() -> None:
    own = {"32-true": F32, "bf16-mixed": F32, "bf16-true": BF16, "64-true": F64}
    products = {**own, "bf16-mixed": BF16}
    (found,) = run_distributed(fits, 1)
    assert len(found) > 15
    for (precision, compute, main), seen, kept in found:
        case = (precision, compute, main)
        assert seen == {(compute or own[precision], products[precision])}, case
        assert kept == (main or own[precision]), case


def test_what_a_policy_replaces_is_said_in_one_sentence() -> None:
    policy = MixedPrecisionPolicy(compute_dtype=BF16, grad_reduce="sum")
    assert MFSDPPrecision("bf16-mixed", policy=policy).policy_beside_precision() == (
        "mfsdp: the policy replaces what precision='bf16-mixed' stands for: fp32_modules=() instead of 10 kinds of modules, "
        "cast_forward_inputs=True instead of False, grad_reduce='sum' instead of 'mean'"
    )
    assert (
        "main_params_dtype=torch.float32 instead of None"
        in MFSDPPrecision("bf16-true", policy=MixedPrecisionPolicy()).policy_beside_precision()
    )
    for name in PRECISIONS:
        assert MFSDPPrecision(name).policy_beside_precision() == ""


def says(rank: int, world: int) -> list[str]:
    strict_warnings()
    heard: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    rank_zero.log.setLevel(logging.INFO)  # Lightning puts its own logger there
    rank_zero.log.addHandler(Hears())
    strategy = MFSDPStrategy(policy=MixedPrecisionPolicy(compute_dtype=BF16))
    trainer = make_trainer(tempfile.gettempdir(), world, strategy=strategy, precision="bf16-mixed", max_steps=1)
    trainer.fit(seeded(Classifier), loader(4, 8, rank, world))
    return [message for message in heard if "the policy replaces" in message]


def test_it_is_said_once_on_rank_0() -> None:
    first, second = run_distributed(says, 2)
    assert len(first) == 1
    assert second == []
