"""Hugging Face models: built on meta, filled with pretrained weights, trained, exported, and read by `from_pretrained`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint import export_checkpoint, export_model, load_safetensors
from lightning_mfsdp.engine import sharded_parameters
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, make_trainer, strict_warnings

pytest.importorskip("transformers")

WORLD, VOCAB, LENGTH = 2, 67, 6
MODELS = ("llama", "gpt2")

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def config_of(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if name == "llama":
        return LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, **dropout
    )


def batch(rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(rank))


class FineTuned(LightningModule):
    """Starts from pretrained weights, and says what they were before the first step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None
        self.losses: list[Tensor] = []
        self.at_start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if self.model is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder))

    def on_fit_start(self) -> None:
        load_safetensors(self.model, self.folder)

    def on_train_start(self) -> None:
        self.at_start = {view.name: view.main.clone() for view in sharded_parameters(self)}

    def training_step(self, ids: Tensor, batch_index: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fine_tune(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    data = DataLoader(batch(rank).repeat(2, 1), batch_size=2)  # one batch, twice
    for name in MODELS:
        path = Path(folder, name)
        module = FineTuned(path)
        trainer = make_trainer(folder, world, max_steps=2, strategy=MFSDPStrategy())
        trainer.fit(module, data)
        trainer.save_checkpoint(f"{path}-sharded.ckpt")
        export_model(module.model, f"{path}-exported", max_shard_bytes=20_000)
        end = {view.name: view.main.clone() for view in sharded_parameters(module)}
        resumed = FineTuned(path)
        again = make_trainer(folder, world, max_steps=2, strategy=MFSDPStrategy(state_dict_type="full"))
        again.fit(resumed, data, ckpt_path=f"{path}-sharded.ckpt")
        again.save_checkpoint(f"{path}-full.ckpt")
        found[name] = {
            "loss": module.losses[0],
            "end": end,
            "resumed": {view.name: view.main.clone() for view in sharded_parameters(resumed)},
            "whole": {name: value.full_tensor() for name, value in module.model.state_dict().items()},
        }
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config_of(name))
        model.save_pretrained(folder / name, max_shard_size="20KB" if name == "llama" else "1GB")
    return folder, run_distributed(fine_tune, WORLD, str(folder))


def pretrained(folder: Path, **options: Any) -> Any:
    """By Hugging Face, which found nothing missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", MODELS)
class TestAHuggingFaceModel:
    def test_starts_with_the_loss_of_its_pretrained_weights(self, trained: Any, name: str) -> None:
        folder, found = trained
        model = pretrained(folder / name)
        for rank in range(WORLD):
            ids = batch(rank)
            torch.testing.assert_close(
                found[rank][name]["loss"], model(input_ids=ids, labels=ids).loss.detach(), rtol=1e-6, atol=0
            )

    def test_resumes_from_the_checkpoint_and_not_from_them(self, trained: Any, name: str) -> None:
        for found in trained[1]:
            for key, value in found[name]["end"].items():
                assert torch.equal(found[name]["resumed"][key], value), key

    def test_is_read_by_from_pretrained_after_an_export(self, trained: Any, name: str) -> None:
        folder, found = trained
        exported = folder / f"{name}-exported"
        assert len(list(exported.glob("*.safetensors"))) > 2
        model = pretrained(exported)
        assert {*model.state_dict()} == {*found[0][name]["whole"]}
        for key, value in model.state_dict().items():
            assert torch.equal(value, found[0][name]["whole"][key]), key
        assert model.config.architectures == [type(model).__name__]
        before = pretrained(folder / name)
        assert model.config.to_dict() == {**before.config.to_dict(), "_name_or_path": str(exported)}
        assert not torch.equal(model(batch(0)).logits, before(batch(0)).logits), "it was trained"

    @pytest.mark.parametrize("kind", ["sharded", "full"])
    def test_is_read_by_from_pretrained_after_an_export_of_a_checkpoint(
        self, trained: Any, name: str, kind: str, tmp_path: Path
    ) -> None:
        folder, found = trained
        files = export_checkpoint(
            folder / f"{name}-{kind}.ckpt", tmp_path / "out", prefix="model.", max_shard_bytes=20_000
        )
        assert len(files) > 2
        config_of(name).save_pretrained(tmp_path / "out")
        model = pretrained(tmp_path / "out")
        reference = pretrained(folder / f"{name}-exported")
        assert torch.equal(model(batch(0)).logits, reference(batch(0)).logits)
        for key, value in model.state_dict().items():
            assert torch.equal(value, found[0][name]["whole"][key]), key
        names = [file.name for file in files]
        exported = sorted(path.name for path in (folder / f"{name}-exported").glob("*.safetensors"))
        assert names == exported
        for file in names:
            assert (tmp_path / "out" / file).read_bytes() == (folder / f"{name}-exported" / file).read_bytes()


class TestExportOfACheckpoint:
    def test_casts_and_tells_progress(self, trained: Any, tmp_path: Path) -> None:
        folder, found = trained
        calls: list[tuple[int, int]] = []
        files = export_checkpoint(
            folder / "gpt2-sharded.ckpt",
            tmp_path / "out",
            prefix="model.",
            dtype=torch.bfloat16,
            progress=lambda done, total: calls.append((done, total)),
        )
        assert files == [tmp_path / "out" / "model.safetensors"]
        size = sum(value.numel() * 2 for name, value in found[0]["gpt2"]["whole"].items() if name != "lm_head.weight")
        assert calls[-1] == (size, size)
        assert files[0].stat().st_size > size
        config_of("gpt2").save_pretrained(tmp_path / "out")
        model = pretrained(tmp_path / "out", dtype=torch.bfloat16)
        for key, value in model.state_dict().items():
            assert torch.equal(value, found[0]["gpt2"]["whole"][key].bfloat16()), key

    def test_writes_all_names_where_it_is_not_known_what_is_tied(self, trained: Any, tmp_path: Path) -> None:
        """As in directories that Lightning's own strategies wrote. No value is lost, and from_pretrained ties what is equal."""
        folder, found = trained
        shutil.copytree(folder / "gpt2-sharded.ckpt", tmp_path / "other.ckpt")
        meta = torch.load(tmp_path / "other.ckpt" / "meta.pt", weights_only=True)
        assert meta.pop("tied_weights") == {"model.lm_head.weight": "model.transformer.wte.weight"}
        torch.save(meta, tmp_path / "other.ckpt" / "meta.pt")
        (file,) = export_checkpoint(tmp_path / "other.ckpt", tmp_path / "out", prefix="model.")
        assert load_file(file).keys() == found[0]["gpt2"]["whole"].keys()
        config_of("gpt2").save_pretrained(tmp_path / "out")
        model = pretrained(tmp_path / "out")
        assert model.lm_head.weight is model.transformer.wte.weight

    def test_refuses_names_outside_the_prefix(self, trained: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"model\.transformer\S+, .* \(of 29\) do not begin with prefix='net\.'"):
            export_checkpoint(trained[0] / "gpt2-sharded.ckpt", tmp_path / "out", prefix="net.")
        assert not list(tmp_path.iterdir())

    def test_refuses_what_is_no_checkpoint(self, trained: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is nothing at that path"):
            export_checkpoint(tmp_path / "none", tmp_path / "out")
        with pytest.raises(ValueError, match="the directory has no such file"):
            export_checkpoint(tmp_path, tmp_path / "out")
        torch.save({"model": {}}, tmp_path / "other.pt")
        with pytest.raises(ValueError, match="holds no state_dict"):
            export_checkpoint(tmp_path / "other.pt", tmp_path / "out")

    def test_refuses_a_damaged_checkpoint(self, trained: Any, tmp_path: Path) -> None:
        damaged = tmp_path / "damaged.ckpt"
        damaged.mkdir()
        for file in (trained[0] / "llama-sharded.ckpt").iterdir():
            (damaged / file.name).write_bytes(file.read_bytes()[: 10_000 if file.suffix == ".distcp" else None])
        with pytest.raises(RuntimeError, match=r"is incomplete or damaged: __0_0\.distcp has 10000 bytes"):
            export_checkpoint(damaged, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["damaged.ckpt"]
