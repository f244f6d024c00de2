"""A tensor axis on GPUs: NCCL, bfloat16, and features that need a device. Two GPUs train as one."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, grad_norm
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, make_trainer, strict_warnings
from tests.lightning.test_context import ROWS, Finetuned, Texts, Trained
from tests.lightning.test_gpu import two_gpus
from tests.lightning.test_tensor import OnMeta, Own, Parallelized, Qwen3, Tied

pytestmark = two_gpus

KINDS: dict[str, type[Trained]] = {
    "Llama": Own,
    "Qwen3": Qwen3,
    "tied": Tied,
    "meta": OnMeta,
    "parallelize": Parallelized,
}
# Model, text, precision, options.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "padded", "32-true", {}),
    "Qwen3": ("Qwen3", "whole", "32-true", {"sharding": "optim_grads"}),
    "tied": ("tied", "whole", "32-true", {"offload": "optimizer"}),
    "meta": ("meta", "whole", "32-true", {"recompute": {"method": "uniform"}}),
    "parallelize_module": ("parallelize", "whole", "32-true", {}),
    "bfloat16": ("Llama", "padded", "bf16-mixed", {}),
    "compile": ("Llama", "whole", "bf16-mixed", {"compile": True}),
    "CUDA graph": ("Llama", "whole", "32-true", {"cuda_graph": True}),
}


def fit(rank: int, world: int, case: str) -> dict[str, Any]:
    kind, text, precision, options = CASES[case]
    strict_warnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of what torch.compile imports
    # Tracing a layer looks at the `.grad` of its input, which is no leaf in a chain of layers.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    warnings.filterwarnings("ignore", message="You called `self.log")  # by the recorded step, there is no logger
    model = KINDS[kind]()
    norms: list[float] = []
    model.on_before_optimizer_step = lambda optimizer: norms.append(grad_norm(model).item())  # type: ignore[method-assign]
    axes: dict[str, Any] = {"tensor": world} if kind != "parallelize" or world == 1 else {"tensor_parallel_size": world}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            accelerator="cuda",
            strategy=MFSDPStrategy(**axes, **options),
            precision=precision,
            gradient_clip_val=0.3,
            log_every_n_steps=1,
            use_distributed_sampler=True,
            limit_val_batches=1,
            max_steps=-1,
            max_epochs=3 if "cuda_graph" in options else 1,
        )
        trainer.fit(model, *(DataLoader(Texts(text), batch_size=ROWS) for _ in range(2)))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"norms": norms, "logged": logged, "state": full_state(model)}


def train(rank: int, world: int) -> dict[str, Any]:
    """All cases in one process a rank; what failed is told by its case."""
    found: dict[str, Any] = {}
    for case in CASES:
        torch.manual_seed(0)
        try:
            found[case] = fit(rank, world, case)
        except Exception:  # the test of this case raises it
            found[case] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (one,) = run_distributed(train, 1, backend="nccl")
    return one, run_distributed(train, 2, backend="nccl")


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_train_as_one(trained: Any, case: str) -> None:
    one, two = trained
    expected = one[case]
    assert isinstance(expected, dict), expected
    low = CASES[case][2] == "bf16-mixed"
    for ranks in two:
        found = ranks[case]
        assert isinstance(found, dict), found
        assert len(found["norms"]) == len(expected["norms"]) > 1 or "CUDA graph" in case
        assert found["norms"] == pytest.approx(expected["norms"], rel=8e-2 if low else 5e-4)
        assert found["logged"] == pytest.approx(expected["logged"], rel=2e-2 if low else 5e-4)
        if low:
            continue
        for name, value in expected["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=5e-3, atol=1e-3, msg=name)


class Watched(Finetuned):
    """A vocabulary so large that whole logits would show in the peak."""

    def __init__(self) -> None:
        super().__init__(heads=4, kv_heads=4)
        from tests.lightning.test_context import transformers

        config = self.model.config
        config.vocab_size = 65536
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(config)


def peak_of_a_step(rank: int, world: int) -> float:
    strict_warnings()
    model = Watched()
    peaks: list[float] = []

    def begin(batch: Any, batch_idx: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        peaks.append(-float(torch.cuda.memory_allocated()))

    model.on_train_batch_start = begin  # type: ignore[method-assign]
    model.on_before_optimizer_step = lambda _: peaks.append(float(torch.cuda.max_memory_allocated()))  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            world,
            accelerator="cuda",
            strategy=MFSDPStrategy(tensor=world),
            precision="bf16-mixed",
            limit_val_batches=0,
            max_steps=2,
        )
        trainer.fit(model, DataLoader(Texts("whole", 512), batch_size=4))
    return peaks[-2] + peaks[-1]


def test_logits_are_never_whole() -> None:
    (whole,) = run_distributed(peak_of_a_step, 1, backend="nccl")
    found = max(run_distributed(peak_of_a_step, 2, backend="nccl"))
    assert found < 0.6 * whole, "logits, their float32 copy and their gradient are of half of the vocabulary each"
