"""Hugging Face models: built on meta, trained whole and by adapters, with buffers that no checkpoint holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, ShardingError, sharded_parameters, units
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT, rest_at_night
from tests.helpers.optimizer_state import state_of_rows
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS = 4  # two epochs of two
VOCABULARY = 64

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes, **options)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **dropouts)


def mixtral() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes, **experts)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def on_a_push(name: str) -> bool:
    """GPT-2 has tied weights as well."""
    return name != "llama, tied"


class Causal(LightningModule):
    def __init__(
        self, config: Any, *, meta: bool = False, lora: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.meta, self.lora, self.build_dtype = config, meta, lora, dtype
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta" if self.meta else "cpu"):
                self.model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=self.build_dtype)
            if self.lora:
                options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
                self.model = peft.get_peft_model(self.model, options)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A bias of attention's keys has no gradient but rounding; with the usual eps whole steps would be made of that.
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01, eps=1e-4)


def tokens(size: int) -> Tensor:
    return torch.randint(VOCABULARY, (size, 12), generator=torch.Generator().manual_seed(5))


def data(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(tokens(8)[rank::world_size], batch_size=4 // world_size)  # type: ignore[arg-type]


def fitted(model: Causal, rank: int, world_size: int, **options: Any) -> Any:
    path = options.pop("ckpt_path", None)
    trainer = make_trainer("", world_size, **{"max_epochs": -1, "max_steps": STEPS} | options)
    trainer.fit(model, data(rank, world_size), ckpt_path=path)
    return trainer


def started(model: Causal, world_size: int, **options: Any) -> dict[str, Tensor]:
    """Shard it, and return what training starts from."""
    make_trainer("", world_size, max_epochs=0, **options).fit(model, DataLoader(tokens(4)))  # type: ignore[arg-type]
    return full_state(model)


def train_plainly(model: Causal) -> dict[str, Tensor]:
    optimizer = model.configure_optimizers()
    for batch in tokens(8).split(4) * 2:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def quiet() -> None:
    strict_warnings()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def from_meta(rank: int, world_size: int) -> dict[str, Any]:
    quiet()
    found = {}
    for name, config in CONFIGS.items():
        if not (NIGHT or on_a_push(name)):
            continue
        torch.manual_seed(3)
        model = Causal(config(), meta=True)
        start = started(model, world_size)
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        fitted(model, rank, world_size)
        plain = Causal(config())
        plain.configure_model()
        found[name] = {
            "start": start,
            "buffers": buffers,
            "plain buffers": dict(plain.named_buffers()),
            "plain start": {key: value.detach().clone() for key, value in plain.named_parameters()},
            "sharded": full_state(model),
            "units": [unit.module_class for unit in units(model)],
        }
        plain.load_state_dict(start, strict=False)
        if rank == 0:
            found[name]["plain"] = train_plainly(plain)
    return found


class Adapted(Causal):
    """LoRA; checkpoints hold adapters only."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(llama(), lora=True, dtype=dtype)
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}


def adapted(**options: Any) -> Adapted:
    torch.manual_seed(4)
    model = Adapted(**options)
    model.configure_model()
    return model


def by_adapters(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    quiet()
    model, found = adapted(), {}
    found["before"] = {name: value.detach().clone() for name, value in model.named_parameters()}
    fitted(model, rank, world_size)
    found["straight"] = full_state(model)
    found["plain"] = train_plainly(adapted())
    for kind in ("sharded", "full"):
        strategy = MFSDPStrategy(state_dict_type=kind)  # type: ignore[arg-type]
        saver = ModelCheckpoint(f"{folder}/{kind}", "half", every_n_train_steps=2)
        options = {"strategy": strategy, "callbacks": [saver], "enable_checkpointing": True}
        fitted(adapted(), rank, world_size, max_steps=2, **options)
        resumed = adapted()
        kept = "these keep their present values: model.base_model.model.model.embed_tokens.weight"
        with pytest.warns(UserWarning, match=kept) if rank == 0 else nullcontext():
            fitted(resumed, rank, world_size, ckpt_path=f"{folder}/{kind}/half.ckpt")
        found[kind] = full_state(resumed)
        found[f"{kind} steps"] = resumed.trainer.global_step
    # An export that peft loads into a model without sharding.
    state = {name: value.full_tensor() for name, value in model.model.state_dict().items() if "lora_" in name}
    exported = peft.get_peft_model_state_dict(model.model, state_dict=state)
    other = adapted()
    peft.set_peft_model_state_dict(other.model, exported)
    found["exported"] = {name: value.detach() for name, value in other.named_parameters()}
    return found


def bytes_of_adapters(rank: int, world_size: int) -> dict[str, Any]:
    quiet()
    model = adapted(dtype=torch.bfloat16)
    plain = {name: (value.numel(), value.requires_grad) for name, value in model.named_parameters()}
    trainer = fitted(model, rank, world_size, precision="bf16-mixed")
    views = sharded_parameters(model)
    return {
        "dtypes": {
            view.requires_grad: {other.dtype for other in views if other.requires_grad == view.requires_grad}
            for view in views
        },
        "rows": sum(view.main.nbytes for view in views),
        "kept": sum(unit.main_bytes + unit.held_bytes for unit in units(model)),
        "frozen": sum(count for count, trained in plain.values() if not trained),
        "trained": sum(count for count, trained in plain.values() if trained),
        "state": sum(state["exp_avg"].numel() for state in state_of_rows(trainer.optimizers[0]).values()),
        "gradients": sum(view.grad.numel() for view in views if view.grad is not None),
    }


def refused(rank: int, world_size: int) -> dict[str, str]:
    quiet()
    found = {}
    with pytest.raises(ValueError, match="get_peft_model") as adapters:
        fitted(Causal(llama(), meta=True, lora=True), rank, world_size)
    found["adapters"] = str(adapters.value)
    with pytest.raises(ShardingError) as unknown:
        fitted(WithUnknown(llama(), meta=True), rank, world_size)
    found["unknown"] = str(unknown.value)
    return found


class Unknown(torch.nn.Module):
    """Values that nothing sets when it gets memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.table = torch.nn.Buffer(torch.arange(4), persistent=False)


class WithUnknown(Causal):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.model.model.extra = Unknown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("huggingface"))


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {
        "meta": from_meta(rank, world_size),
        "lora": by_adapters(rank, world_size, folder),
        "bytes": bytes_of_adapters(rank, world_size),
    }


@pytest.fixture(scope="module")
def on_two(folder: str) -> list[dict[str, Any]]:
    return run_distributed(on_two_ranks, 2, folder)


@pytest.mark.parametrize("name", rest_at_night(CONFIGS, on_a_push))
def test_a_model_from_meta_trains_like_one_process(on_two: list[dict[str, Any]], name: str) -> None:
    found = on_two[0]["meta"][name]
    assert len(found["units"]) == 3  # two blocks and the rest
    for key, value in found["plain"].items():
        torch.testing.assert_close(found["sharded"][key], value, rtol=1e-4, atol=5e-5)
        assert not torch.equal(value, found["start"][key]), key


@pytest.mark.parametrize("name", rest_at_night(CONFIGS, on_a_push))
def test_a_model_from_meta_starts_as_one_that_was_built_for_real(on_two: list[dict[str, Any]], name: str) -> None:
    """Constants and buffers exactly; what is drawn has the same spread, also where one module sets the values of another."""
    found = on_two[0]["meta"][name]
    assert found["buffers"].keys() == found["plain buffers"].keys()
    for key, value in found["plain buffers"].items():
        assert torch.equal(found["buffers"][key], value), key
    assert found["start"].keys() == found["plain start"].keys()
    for key, value in found["plain start"].items():
        if value.std() == 0:
            assert torch.equal(found["start"][key], value), key
        else:
            assert math.isclose(found["start"][key].std(), value.std(), rel_tol=0.15), key
    if name == "llama":
        assert "model.model.rotary_emb.inv_freq" in found["buffers"]


def test_only_adapters_are_trained_and_like_in_one_process(on_two: list[dict[str, Any]]) -> None:
    found = on_two[0]["lora"]
    for name, value in found["plain"].items():
        torch.testing.assert_close(found["straight"][name], value, rtol=1e-4, atol=5e-5)
        assert torch.equal(found["straight"][name], found["before"][name]) == ("lora_" not in name), name


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_of_adapters_resumes_to_the_bit(on_two: list[dict[str, Any]], folder: str, kind: str) -> None:
    found = on_two[0]["lora"]
    assert found[f"{kind} steps"] == STEPS
    for name, value in found["straight"].items():
        assert torch.equal(found[kind][name], value), name
    path = f"{folder}/{kind}/half.ckpt"
    saved = torch.load(path)["state_dict"] if kind == "full" else _load_distributed_checkpoint(Path(path))["model"]
    assert len(saved) == 8
    assert all("lora_" in name for name in saved)


def test_adapters_are_exported_for_peft(on_two: list[dict[str, Any]]) -> None:
    for found in (results["lora"] for results in on_two):
        for name, value in found["straight"].items():
            assert torch.equal(found["exported"][name], value), name


def test_a_frozen_bfloat16_base_has_no_float32_weights_no_gradients_and_no_state(on_two: list[dict[str, Any]]) -> None:
    results = [found["bytes"] for found in on_two]
    frozen, trained = results[0]["frozen"], results[0]["trained"]
    assert results[0]["dtypes"] == {False: {torch.bfloat16}, True: {torch.float32}}
    assert sum(found["rows"] for found in results) == 2 * frozen + 4 * trained
    assert sum(found["kept"] for found in results) < 1.1 * (2 * frozen + 4 * trained)  # with padding
    assert sum(found["state"] for found in results) == trained
    assert sum(found["gradients"] for found in results) in (0, trained)


def test_what_cannot_be_initialized_from_meta_is_named() -> None:
    (found,) = run_distributed(refused, 1)
    assert "layers.0.self_attn.q_proj.lora_A: adapters on the meta device" in found["adapters"]
    assert "(Unknown) has bias, table on the meta device" in found["unknown"]
