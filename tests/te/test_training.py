"""FP8 through the Trainer, on the CPU with a small engine in the library's place: contexts, scales, recompute, checkpoints."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.precision import transformer_engine as lightnings
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy
from lightning_mfsdp.callbacks import ShardedThroughputMonitor
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.te import extra_state
from lightning_mfsdp.trainer.cuda_graph import graphed_training_step
from lightning_mfsdp.trainer.precision import translate_precision
from tests.helpers.distributed import run_distributed
from tests.helpers.pairwise import pairwise
from tests.lightning.models import full_state, make_trainer, seeded, strict_warnings
from tests.te import fake_engine

DIM = 32
ROWS = 16


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(LightningModule):
    """Plain layers; the blocks may be computed again in the backward."""

    def __init__(self, recompute: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 16)
        self.recompute = recompute
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = self.again(block, x) if self.recompute else block(x)
        return self.head(x)

    def again(self, block: nn.Module, x: Tensor) -> Tensor:
        """Computed again in the backward."""
        return checkpoint(block, x, use_reentrant=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Built(Net):
    """Of the library's layers from the start."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute)
        for block in self.blocks:
            block.linear = fake_engine.Linear(DIM, DIM, device="cpu")


def data(rank: int, world: int, steps: int, factor: float = 1.0) -> DataLoader[Any]:
    """Other rows on each rank, larger ones on later ranks."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS * steps, 16, generator=generator) * (1 + rank) * factor
    return DataLoader(TensorDataset(x, (x.sum(1) * 2).round().long() % 16), ROWS)


def trainer_for(world: int, precision: Any, **options: Any) -> Any:
    settings = {"strategy": MFSDPStrategy(units=["Block"], **options.pop("strategy_options", {})), "max_steps": 4}
    plugins = {"plugins": [precision]} if isinstance(precision, MFSDPPrecision) else {"precision": precision}
    return make_trainer("unused", world, **{**settings, "max_epochs": -1, **plugins, **options})


def fp8(recipe: Any = "current", **options: Any) -> MFSDPPrecision:
    return MFSDPPrecision("transformer-engine", recipe=recipe, **{"replace_layers": True, **options})


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}.{part}": value.clone()
        for name, parts in extra_state.scaling(model).items()
        for key, both in parts.items()
        if isinstance(both, dict)
        for part, value in both.items()
    }


def kinds() -> list[str | None]:
    """Recipes of linear layers since the last time, in the order of their calls."""
    linear = [call for call in fake_engine.calls if isinstance(call.module, fake_engine.Linear)]
    fake_engine.calls.clear()
    return [getattr(call.recipe, "kind", None) for call in linear]


# -- one rank: plain PyTorch with the same layers ----------------------------------------------------------------------


def plainly(recipe: Any, steps: int) -> dict[str, Tensor]:
    """The reference: no sharding, no Trainer, nothing computed again."""
    fake_engine.forget()
    model = seeded(Net)
    compute = fp8(recipe).fp8
    assert compute is not None
    compute.prepare(model, None)
    optimizer = model.configure_optimizers()
    for batch in data(0, 1, steps):
        with torch.autocast("cpu", torch.bfloat16), compute.forward():
            loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()} | scales(model)


def one_rank(rank: int, world: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    with fake_engine.installed():
        for name, recompute in (("current", False), ("current", True), ("delayed", False)):
            recipe = "current" if name == "current" else fake_engine.DelayedScaling(amax_history_len=3)
            fake_engine.forget()
            model = seeded(Net, recompute=recompute)
            trainer_for(1, fp8(recipe)).fit(model, data(0, 1, 4))
            found[f"{name}, {recompute}"] = full_state(model) | scales(model), plainly(recipe, 4)
    return found


def test_one_rank_trains_to_the_bit_like_plain_pytorch_with_these_layers() -> None:
    (found,) = run_distributed(one_rank, 1)
    for name, (state, expected) in found.items():
        assert state.keys() == expected.keys()
        assert any("amax_history" in key for key in state) == name.startswith("delayed")
        for key, value in expected.items():
            assert torch.equal(state[key], value), f"{name}: {key}"


# -- two ranks ---------------------------------------------------------------------------------------------------------


def contexts(rank: int, world: int, found: dict[str, Any]) -> None:
    """What each layer computes with: in a step, in what is computed again, in evaluation, and where a hook calls the model."""
    model = seeded(Net, recompute=True)
    trainer = trainer_for(world, fp8(keep_high_precision=["head"], overrides={"blocks.1": "block"}), max_steps=1)
    trainer.fit(model, data(rank, world, 1))
    assert type(model.head) is nn.Linear
    found["groups"] = {
        call.group is trainer.strategy.device_mesh.get_group() for call in fake_engine.calls if call.recipe
    }
    found["dtypes"] = {call.dtype for call in fake_engine.calls if isinstance(call.module, fake_engine.Linear)}
    found["training"] = kinds()
    trainer.validate(model, data(rank, world, 1), verbose=False)
    found["validation"] = kinds()
    trainer.predict(model, data(rank, world, 1))
    found["prediction"] = kinds()
    model(torch.ones(ROWS, 16))
    found["a call of one's own"] = kinds()
    found["depth"] = fake_engine.state.depth, fake_engine.state.enabled


def scaling_over_ranks(rank: int, world: int, found: dict[str, Any]) -> None:
    """Ranks see other data and have one scale; recompute makes no update more; an evaluation leaves no trace."""
    for recompute in (False, True):
        fake_engine.forget()
        model = seeded(Net, recompute=recompute)
        trainer = trainer_for(world, fp8("delayed"), accumulate_grad_batches=2, max_steps=2)
        trainer.fit(model, data(rank, world, 4))
        found[f"updates, {recompute}"] = list(fake_engine.updates)
    before = scales(model)
    trainer.validate(model, data(rank, world, 2, factor=100.0), verbose=False)
    after = scales(model)
    found["scales"] = before
    found["unchanged"] = all(torch.equal(before[key], after[key]) for key in before)


class Seen(Callback):
    """Scales as they were whenever a checkpoint was written."""

    def __init__(self) -> None:
        self.scales: list[dict[str, Tensor]] = []

    def on_save_checkpoint(self, trainer: Any, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.scales.append(scales(module))


def resumed(
    rank: int, world: int, name: str, build: Any, recipe: Any, folder: str, precision: Any = None, **options: Any
) -> dict[str, Any]:
    """Two epochs with a validation and a checkpoint after each; the second again, from the first checkpoint, with nothing else known."""
    train, held_out = data(rank, world, 2), data(rank, world, 1, factor=9.0)
    options = {"max_steps": -1, "max_epochs": 2, **options}
    path = f"{folder}/{name}"

    def trainer(**more: Any) -> Any:
        fake_engine.forget()
        return trainer_for(world, fp8(recipe, **{"replace_layers": "auto", **(precision or {})}), **options, **more)

    seen, straight = Seen(), seeded(build)
    saving = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
    trainer(callbacks=[seen, saving], enable_checkpointing=True).fit(straight, train, held_out)
    expected = full_state(straight) | scales(straight)
    evaluated, again = build(), build()
    trainer().validate(evaluated, held_out, ckpt_path=f"{path}/epoch=0.ckpt", verbose=False)
    found = {"evaluated": (scales(evaluated), seen.scales[0])}
    trainer().fit(again, train, held_out, ckpt_path=f"{path}/epoch=0.ckpt")
    return found | {"resumed": (full_state(again) | scales(again), expected)}


RESUMED = pairwise(("sharded", "full"), (Net, Built), together=1)


def resumed_in_every_way(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    recipe = fake_engine.DelayedScaling(amax_history_len=4)
    for kind, build in RESUMED:
        name, options = f"{kind} {build.__name__}", {"state_dict_type": kind}
        found[name] = resumed(rank, world, name, build, recipe, folder, strategy_options=options)


LOADED = pairwise(("sharded", "full"), (True, False), together=1)  # whether FP8 is first


def other_precisions(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    """A checkpoint of an FP8 run in a bfloat16 run of plain layers and the other way round, strictly."""
    for kind, is_first in LOADED:
        first, second = (fp8("delayed"), "bf16-mixed") if is_first else ("bf16-mixed", fp8("delayed"))
        path = f"{folder}/{kind}-{type(first).__name__}"
        model, other = seeded(Net), seeded(Net)
        options = {"strategy_options": {"state_dict_type": kind}}
        trainer = trainer_for(world, first, max_steps=2, **options)
        trainer.fit(model, data(rank, world, 2))
        trainer.save_checkpoint(path)
        trainer_for(world, second, max_steps=2, **options).fit(other, data(rank, world, 2), ckpt_path=path)
        found[f"{path} loaded"] = full_state(other), full_state(model)


def foreign_extra_state(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    """A file of another strategy holds the library's own extra state, a pickle; with the library's modules here and without."""
    code = torch.ones(3, dtype=torch.uint8)
    source = seeded(Net).state_dict()
    if rank == 0:
        extra = {f"blocks.{index}.linear._extra_state": code for index in range(3)}
        torch.save({"state_dict": {**source, **extra}, "pytorch-lightning_version": "2.6.6"}, f"{folder}/foreign.ckpt")
    dist.barrier()
    for name, build, precision in (
        ("built", Built, fp8(replace_layers=False)),
        ("replaced", Net, fp8()),
        ("plain", Net, "32-true"),
    ):
        model = build()
        trainer_for(world, precision).validate(
            model, data(rank, world, 1), ckpt_path=f"{folder}/foreign.ckpt", verbose=False
        )
        found[f"foreign {name}"] = full_state(model), source


def from_meta(rank: int, world: int, found: dict[str, Any]) -> None:
    class Meta(Net):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.blocks = nn.ModuleList()
            self.recompute = False
            self.losses = []

        def configure_model(self) -> None:
            if not self.blocks:
                with torch.device("meta"):
                    self.inputs, self.head = nn.Linear(16, DIM), nn.Linear(DIM, 16)
                    self.blocks.extend(Block() for _ in range(3))

    model = Meta()
    torch.manual_seed(1)
    trainer_for(world, fp8(), max_steps=1).fit(model, data(rank, world, 1))
    found["meta"] = {name: bool(value.isfinite().all()) for name, value in full_state(model).items()}


@contextmanager
def lightnings_plugin() -> Any:
    """What Lightning's plugin needs of the library to be built."""
    names = {"transformer_engine": ModuleType("transformer_engine")}
    for name in ("common", "common.recipe"):
        names[f"transformer_engine.{name}"] = ModuleType(name)
    names["transformer_engine.common.recipe"].DelayedScaling = fake_engine.DelayedScaling  # type: ignore[attr-defined]
    before = lightnings._TRANSFORMER_ENGINE_AVAILABLE
    lightnings._TRANSFORMER_ENGINE_AVAILABLE = True  # type: ignore[assignment]
    sys.modules.update(names)
    try:
        yield
    finally:
        lightnings._TRANSFORMER_ENGINE_AVAILABLE = before
        for name in names:
            del sys.modules[name]


def by_string(rank: int, world: int, found: dict[str, Any]) -> None:
    with lightnings_plugin():
        trainer = make_trainer("unused", world, strategy="mfsdp", precision="transformer-engine", max_steps=1)
        trainer.fit(seeded(Net), data(rank, world, 1))
    found["by string"] = type(trainer.precision_plugin).__name__, trainer.precision, kinds()


def fabric_loop(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    def run(steps: range, path: str | None, seed: int) -> tuple[Any, ...]:
        fake_engine.forget()
        strategy = MFSDPFabricStrategy(units=["Block"])
        strategy.precision = fp8(fake_engine.DelayedScaling(amax_history_len=4))
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        other = fabric.setup_module(seeded(Net)) if path is None else None  # a model beside, which is not saved
        if other is not None:
            other(torch.full((ROWS, 16), 100.0))
        torch.manual_seed(seed)
        model = fabric.setup_module(Net(recompute=True))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        state = {"model": model, "optimizer": optimizer}
        if path is not None:
            fabric.load(path, state)
        for index, (x, y) in enumerate(data(rank, world, 4)):
            if index in steps:
                fabric.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return fabric, state, model, other

    fabric, state, *_ = run(range(2), None, 0)
    fabric.save(f"{folder}/fabric", state)
    _, _, straight, other = run(range(4), None, 0)
    expected = full_state(straight) | scales(straight.module)
    assert scales(other.module)
    _, _, again, _ = run(range(2, 4), f"{folder}/fabric", 1)
    found["fabric"] = full_state(again) | scales(again.module), expected
    found["fabric recipes"] = set(kinds())


def two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for case in (contexts, scaling_over_ranks, from_meta, by_string):
        with fake_engine.installed():
            case(rank, world, found)
    for saving in (resumed_in_every_way, other_precisions, foreign_extra_state, fabric_loop):
        with fake_engine.installed():
            saving(rank, world, folder, found)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("fp8")
    return run_distributed(two_ranks, 2, str(folder))


def test_every_pass_computes_with_the_recipes_of_choice(ranks: Any) -> None:
    once = ["current", "current", "block", "current"]
    for found in ranks:
        # The last block is computed again first.
        assert found["training"] == [*once, "current", "block", "current"]
        assert found["validation"] == found["prediction"] == found["a call of one's own"] == once
        assert found["depth"] == (0, False)
        assert found["groups"] == {True}


def test_ranks_agree_on_scales_and_recompute_sets_none(ranks: Any) -> None:
    first, second = (found["scales"] for found in ranks)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["inputs.scaling_fwd.scale"], torch.ones(3))
    microbatch = ["scaling_fwd", "scaling_bwd"]
    for found in ranks:
        assert found["updates, False"] == found["updates, True"] == microbatch * 4


def test_an_evaluation_leaves_no_trace_in_histories(ranks: Any) -> None:
    assert all(found["unchanged"] for found in ranks)


def assert_equal_states(pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    state, expected = pair
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name].cpu(), value.cpu()), name


@pytest.mark.parametrize(("kind", "build"), [(kind, build.__name__) for kind, build in RESUMED])
def test_a_resumed_run_ends_like_the_one_that_went_on_to_the_bit(ranks: Any, kind: str, build: str) -> None:
    for found in ranks:
        pairs = found[f"{kind} {build}"]
        assert all(any("amax_history" in name for name in expected) for _, expected in pairs.values())
        assert_equal_states(pairs["evaluated"])
        assert_equal_states(pairs["resumed"])


def test_checkpoints_go_into_runs_without_the_library_and_back(ranks: Any) -> None:
    for found in ranks:
        pairs = [pair for name, pair in found.items() if name.endswith(" loaded")]
        assert len(pairs) == len(LOADED)
        for pair in pairs:
            assert_equal_states(pair)


@pytest.mark.parametrize("where", ["built", "replaced", "plain"])
def test_extra_state_of_other_strategies_is_never_read(ranks: Any, where: str) -> None:
    for found in ranks:
        state, expected = found[f"foreign {where}"]
        assert_equal_states((state, {name: value for name, value in expected.items() if "_extra_state" not in name}))


def test_a_model_from_meta_trains(ranks: Any) -> None:
    for found in ranks:
        assert len(found["meta"]) == 16
        assert all(found["meta"].values())


def test_lightnings_string_is_current_scaling_with_layers_replaced(ranks: Any) -> None:
    for found in ranks:
        assert found["by string"] == ("MFSDPPrecision", "transformer-engine", ["current"] * 5)


def test_graphs_are_refused_with_the_reason() -> None:
    module = SimpleNamespace(device=torch.device("cuda"), automatic_optimization=True)
    with pytest.warns(
        UserWarning, match=r"cuda_graph=True: modules of Transformer Engine keep part of their state in Python"
    ):
        assert graphed_training_step(print, module, SimpleNamespace(precision_plugin=fp8())) is None  # type: ignore[arg-type]


def test_utilization_is_measured_against_the_peak_of_8_bits() -> None:
    monitor = ShardedThroughputMonitor(batch_size_fn=len)
    strategy = SimpleNamespace(root_device=None, distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})
    trainer = SimpleNamespace(precision_plugin=fp8(), strategy=strategy, world_size=1)
    with (
        mock.patch.object(ThroughputMonitor, "setup"),
        mock.patch("lightning_mfsdp.callbacks.throughput.get_available_flops", lambda device, dtype: dtype),
    ):
        monitor.setup(trainer, None, "fit")  # type: ignore[arg-type]
    assert monitor.available_flops is torch.int8


def test_a_loop_of_ones_own_under_fabric_resumes_to_the_bit(ranks: Any) -> None:
    for found in ranks:
        assert_equal_states(found["fabric"])
        assert found["fabric recipes"] == {"delayed"}


class TestLightningsPlugin:
    @pytest.fixture(autouse=True)
    def _plugin(self) -> Any:
        with lightnings_plugin():
            yield

    def test_what_it_says_is_kept(self) -> None:
        recipe = fake_engine.DelayedScaling(amax_history_len=7)
        plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=False)
        options = translate_precision(plugin, None).fp8.options  # type: ignore[union-attr]
        assert options.recipe is recipe
        assert options.replace_layers is False

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_dtypes_are_refused_with_the_reason(self, dtype: torch.dtype) -> None:
        for options in ({"weights_dtype": dtype}, {"weights_dtype": torch.bfloat16, "fallback_compute_dtype": dtype}):
            with pytest.raises(TypeError, match="mfsdp computes in bfloat16 what is not in FP8"):
                translate_precision(TransformerEnginePrecision(**options), None)
        with pytest.raises(TypeError, match="float16 would need loss scaling"):
            make_trainer("unused", 1, precision="transformer-engine-float16")


def test_options_survive_a_policy_of_the_strategy() -> None:
    policy = MFSDPPrecision("transformer-engine").policy
    given = fp8("block", keep_high_precision=["head"])
    translated = translate_precision(given, policy)
    assert translated.fp8.options == given.fp8.options  # type: ignore[union-attr]
    assert translated.policy is policy
