"""LoRA on a base model in 4 bits, of bitsandbytes and of torchao: trained, resumed on other ranks, merged and exported.

Where the libraries are not installed, tests/engine/test_packed_weights.py holds what the engine does with such weights.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lightning_mfsdp import MFSDPStrategy, unshard_model  # noqa: E402
from lightning_mfsdp.checkpoint import export_model  # noqa: E402
from lightning_mfsdp.engine import sharded_parameters  # noqa: E402
from tests.helpers.distributed import run_distributed  # noqa: E402
from tests.lightning.models import FOREIGN_WARNINGS  # noqa: E402
from tests.lightning.test_huggingface import Causal, fitted, llama, quiet, tokens, train_plainly  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (*FOREIGN_WARNINGS, ".*is_gradient_checkpointing.*:FutureWarning")
]

LIBRARY = {
    "nf4": "bitsandbytes",
    "nf4, twice, in float32": "bitsandbytes",
    "torchao nf4": "torchao",
    "torchao intx": "torchao",
}
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"could not import {library!r}"),
    )
    for kind, library in LIBRARY.items()
]


def quantize(model: nn.Module, kind: str) -> None:
    """All layers but the head."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        if LIBRARY[kind] == "bitsandbytes":
            import bitsandbytes

            storage = torch.float32 if "float32" in kind else torch.uint8
            options = {"compress_statistics": "twice" in kind, "quant_type": "nf4", "quant_storage": storage}
            quantized = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, **options
            )
            quantized.load_state_dict(layer.state_dict())
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, quantized)  # packed when it is moved to the device
        elif kind == "torchao nf4":
            from torchao.quantization import to_nf4

            layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
        else:
            from torchao.quantization import IntxWeightOnlyConfig, quantize_
            from torchao.quantization.granularity import PerGroup

            quantize_(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)))
            layer.weight.requires_grad_(False)
    if LIBRARY[kind] == "bitsandbytes":
        model.is_loaded_in_4bit = True  # as from_pretrained leaves it


class Quantized(Causal):
    """LoRA on all layers of a quantized model."""

    def __init__(self, kind: str, seed: int = 4, *, adapters_only: bool = False) -> None:
        super().__init__(llama(), lora=True)
        self.strict_loading = not adapters_only
        self.losses: list[Tensor] = []
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_config(self.config)
        quantize(base, kind)
        torch.manual_seed(5)
        options = peft.LoraConfig(r=4, target_modules="all-linear", lora_alpha=8, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")  # it cannot merge
            self.model = peft.get_peft_model(base.train(), options)

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.losses.append(loss.detach())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.strict_loading:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}


def adapters(model: Quantized) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if "lora_" in name}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(2), use_cache=False).logits  # type: ignore[no-any-return]


def saved(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    """A straight run, and two that save halfway."""
    quiet()
    found: dict[str, Any] = {}
    model = Quantized(kind, seed=rank)  # the first rank's base counts
    fitted(model, rank, world, precision="bf16-mixed" if "float32" in kind else "32-true")
    frozen = [view for view in sharded_parameters(model) if not view.requires_grad and view.dtensor.dim() < 3]
    found["bytes"] = sum(view.main.nbytes for view in frozen if view.main.dtype is torch.uint8)
    found["dtypes"] = {view.main.dtype for view in frozen}
    found["losses"] = torch.stack(model.losses)
    model = Quantized(kind)
    fitted(model, rank, world)
    unshard_model(model)
    found["straight"] = adapters(model)
    for state_dict_type in ("sharded", "full"):
        saver = ModelCheckpoint(f"{folder}/{state_dict_type}", "half", every_n_train_steps=2)
        strategy = MFSDPStrategy(state_dict_type=state_dict_type)  # type: ignore[arg-type]
        options = {"strategy": strategy, "callbacks": [saver], "enable_checkpointing": True}
        fitted(Quantized(kind), rank, world, max_steps=2, **options)
    saver = ModelCheckpoint(f"{folder}/adapters", "half", every_n_train_steps=2)
    fitted(Quantized(kind, adapters_only=True), rank, world, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    return found


def resumed(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    """On other ranks: from a whole checkpoint, into another base; from adapters alone, into the same base."""
    quiet()
    found: dict[str, Any] = {}
    for name in ("sharded", "full", "adapters"):
        only = name == "adapters"
        model = Quantized(kind, 4 if only else 9, adapters_only=only)
        with (
            pytest.warns(UserWarning, match="keep their present values")
            if only and rank == 0
            else pytest.MonkeyPatch.context()
        ):
            fitted(model, rank, world, ckpt_path=f"{folder}/{name}/half.ckpt")
        if name == "full":
            found["export"] = _export(model, folder)
        unshard_model(model)
        found[name] = adapters(model)
    found["logits"] = logits(model.model)
    found["classes"] = sorted({type(layer.base_layer.weight).__name__ for layer in _adapted(model)})
    found["merged"] = logits(_merged(model.model))
    return found


def _export(model: Quantized, folder: str) -> str:
    base = model.model.base_model.model
    with pytest.raises(ValueError, match=r"4-bit|quantized") as error:
        export_model(base, f"{folder}/export", dtype=torch.bfloat16)
    return str(error.value)


def _adapted(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight")]


def _merged(model: Any) -> nn.Module:
    """A model without 4-bit weights, as docs/finetuning.md has it."""
    with torch.no_grad():
        for name, layer in list(model.named_modules()):
            if not hasattr(layer, "get_delta_weight"):
                continue
            base = layer.base_layer
            columns = torch.eye(base.in_features)
            plain = nn.Linear(base.in_features, base.out_features, bias=False)
            plain.weight.copy_(base(columns).t() + layer.get_delta_weight("default"))
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, plain)
    return model.base_model.model  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_trains_resumes_on_other_ranks_and_merges_as_in_one_process(kind: str, tmp_path: Path) -> None:
    first = run_distributed(saved, 2, str(tmp_path), kind)
    other = run_distributed(resumed, 1, str(tmp_path), kind)[0]
    plain = Quantized(kind)
    plain.to("cpu")
    sizes = [layer.base_layer.weight for layer in _adapted(plain)]
    expected = {name: value for name, value in train_plainly(plain).items() if "lora_" in name}
    for name, value in expected.items():
        for found in (first[0]["straight"], other["sharded"], other["full"], other["adapters"]):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-5)
    mixed = Quantized(kind, seed=0)
    mixed.to("cpu")
    with torch.autocast("cpu", torch.bfloat16, enabled="float32" in kind):
        train_plainly(mixed)
    losses = (first[0]["losses"] + first[1]["losses"]) / 2
    torch.testing.assert_close(losses, torch.stack(mixed.losses), rtol=3e-2 if "float32" in kind else 1e-5, atol=1e-5)
    assert other["classes"] == sorted({type(weight).__name__ for weight in sizes})
    torch.testing.assert_close(other["logits"], logits(plain.model), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other["merged"], other["logits"], rtol=1e-3, atol=1e-4)
    assert ("quantized" if "torchao" in kind else "4-bit") in other["export"]
    assert torch.uint8 in first[0]["dtypes"]
    held = [found["bytes"] for found in first]
    assert abs(held[0] - held[1]) < 0.2 * sum(held)  # each rank has its half
