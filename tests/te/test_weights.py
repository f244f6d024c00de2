"""FP8 weights through the Trainer and Fabric, on the CPU with a small engine in the library's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy, MixedPrecisionPolicy, ShardingError
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy
from lightning_mfsdp.te import Fp8Compute, Fp8Options, checks, weight_codecs
from lightning_mfsdp.te.quantized_weights import is_quantized
from lightning_mfsdp.trainer.precision import translate_precision
from tests.engine.cases import run_cases
from tests.engine.internals import context_of, owner_of
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import full_state, seeded, strict_warnings
from tests.te import fake_engine
from tests.te.test_training import DIM, Block, Net, assert_equal_states, data, fp8, resumed, trainer_for

STEPS = 3
# On a push what differs from one recipe, or kind of checkpoint, to the other; at night the product.
KINDS = dict.fromkeys(("current", "delayed"), ("plain", "transposes", "fused"))
COPIED, RESUMED = ("current", "block", "delayed"), ("sharded", "full")
if not NIGHT:
    KINDS["delayed"], COPIED, RESUMED = ("plain",), ("current", "delayed"), ("sharded",)


class OnMeta(Net):
    """Nothing is built before `configure_model`, and then on meta."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.blocks = nn.ModuleList()
        self.recompute, self.losses = False, []

    def configure_model(self) -> None:
        if not self.blocks:
            with torch.device("meta"):
                self.inputs, self.head = nn.Linear(16, DIM), nn.Linear(DIM, 16)
                self.blocks.extend(Block() for _ in range(3))


class Built(OnMeta):
    """Of the library's layers, with and without memory at first; one is in high precision by the user's choice."""

    def configure_model(self) -> None:
        if not self.blocks:
            torch.manual_seed(3)
            self.inputs, self.head = nn.Linear(16, DIM), nn.Linear(DIM, 16)
            self.blocks.extend(Block() for _ in range(3))
            for block, device in zip(self.blocks, ("cpu", "meta", "cpu"), strict=True):
                options: Any = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": device == "cpu"}
                block.linear = fake_engine.Linear(DIM, DIM, device=device, **options)
            options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True, "normalization": "RMSNorm"}
            self.blocks[0].linear = fake_engine.LayerNormLinear(DIM, DIM, device="cpu", **options)
            with fake_engine.quantized_model_init(enabled=False):
                self.blocks[2].linear = fake_engine.Linear(DIM, DIM, device="cpu")


def outcome(model: Net) -> dict[str, Tensor]:
    return full_state(model) | {f"loss {step}": loss for step, loss in enumerate(model.losses)}


def trained(
    rank: int, world: int, model: Net, precision: Any, *, steps: int = STEPS, seed: int | None = None, **options: Any
) -> Net:
    fake_engine.forget()
    if seed is not None:
        torch.manual_seed(seed)
    batches = steps * options.get("accumulate_grad_batches", 1)
    trainer_for(world, precision, max_steps=steps, **options).fit(model, data(rank, world, batches))
    return model


def quantized_names(model: nn.Module) -> list[str]:
    """Of parameters whose module sees a quantized one, and whose bytes are gathered."""
    groups = [group for unit in context_of(model).units for group in unit.groups]
    full = {id(entry.full) for group in groups if group.spec.storage_dtype is torch.uint8 for entry in group.entries}
    assert full == {id(entry.full) for group in groups for entry in group.entries if is_quantized(entry.full)}
    return sorted(name for name, shown in model.named_parameters() if id(owner_of(shown)[1].full) in full)  # type: ignore[index]


def replaced_layers(rank: int, world: int, found: dict[str, Any]) -> None:
    """The same rounding of the same main weights: no number differs from those of a run with 16-bit weights."""
    for recipe in ("current", "delayed"):
        kept = {} if recipe == "current" else {"keep_quantized": False}
        expected = outcome(trained(rank, world, seeded(Net), fp8(recipe, **kept)))
        for name in KINDS[recipe]:
            options = {
                "plain": {},
                "transposes": {"keep_transpose_cache": True},
                "fused": {"fuse_weight_gradients": True},
            }[name]
            model = trained(rank, world, seeded(Net), fp8(recipe, fp8_weights=True, **options))
            found[f"{recipe} {name}"] = outcome(model), expected
            found[f"{recipe} {name} writes"] = list(fake_engine.writes)
            found[f"{recipe} {name} quantized"] = quantized_names(model)
    fused = trained(rank, world, seeded(Net), fp8(fuse_weight_gradients=True), accumulate_grad_batches=3, steps=1)
    found["fused microbatches"] = len(fake_engine.writes)
    usual = trained(rank, world, seeded(Net), fp8(), accumulate_grad_batches=3, steps=1)
    found["fused 16-bit weights"] = outcome(fused), outcome(usual)


def copies_of_weights(rank: int, world: int, found: dict[str, Any]) -> None:
    for recipe in COPIED:
        states = []
        for keep in (False, True):
            model = trained(rank, world, seeded(Net, recompute=True), fp8(recipe, keep_quantized=keep))
            found[f"copies, {recipe}, {keep}"] = set(fake_engine.copies)
            states.append(outcome(model))
        found[f"copied or not: {recipe}"] = states[0], states[1]
    kept = trained(rank, world, Built(), fp8(replace_layers=False, keep_high_precision=["blocks.1"]))
    found["copies dropped"] = [block.linear.is_fsdp2 for block in kept.blocks]


def from_meta(rank: int, world: int, found: dict[str, Any]) -> None:
    states = [trained(rank, world, OnMeta(), fp8(fp8_weights=on), seed=5) for on in (False, True)]
    found["from meta"] = outcome(states[1]), outcome(states[0])
    found["from meta quantized"] = quantized_names(states[1])


def tied_and_frozen(rank: int, world: int, found: dict[str, Any]) -> None:
    """A weight that an embedding holds as well stays as it is; frozen ones and marks are kept."""

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, DIM)
            self.head = nn.Linear(DIM, 16)
            self.head.weight = self.embedding.weight
            self.blocks[0].linear.weight.requires_grad_(False)
            self.blocks[1].linear.weight.mark = "mine"  # type: ignore[assignment]

    states = [trained(rank, world, seeded(Tied), fp8(fp8_weights=on)) for on in (False, True)]
    found["tied"] = outcome(states[1]), outcome(states[0])
    found["tied quantized"] = quantized_names(states[1])
    found["tied kept"] = states[1].head.weight is states[1].embedding.weight
    block = states[1].blocks[1]
    found["mark"] = block.linear.weight.mark
    found["frozen"] = [block.linear.weight.requires_grad for block in states[1].blocks]


def user_built(rank: int, world: int, found: dict[str, Any]) -> None:
    expected = outcome(trained(rank, world, Built(), fp8(replace_layers=False), seed=5))
    model = trained(rank, world, Built(), fp8(replace_layers=False, fp8_weights=True), seed=5)
    found["built"] = outcome(model), expected
    found["built quantized"] = quantized_names(model)
    found["built writes"] = len(fake_engine.writes)
    again = trainer_for(world, fp8(replace_layers=False, fp8_weights=True))
    again.validate(model, data(rank, world, 1), verbose=False)  # no warning that policies differ

    class Overwritten(Built):
        def configure_model(self) -> None:
            super().configure_model()
            with torch.no_grad():
                self.blocks[0].linear.weight.copy_(torch.full((DIM, DIM), 0.5))

    with pytest.raises(ShardingError, match=r"weight of .* other values were written into it after it was built"):
        trained(rank, world, Overwritten(), fp8(replace_layers=False, fp8_weights=True))


def high_precision_and_overrides(rank: int, world: int, found: dict[str, Any]) -> None:
    options = {"keep_high_precision": ["head"], "overrides": {"blocks.1": "delayed"}}
    states = [trained(rank, world, seeded(Net), fp8(fp8_weights=on, **options)) for on in (False, True)]
    found["overrides"] = outcome(states[1]), outcome(states[0])
    found["overrides quantized"] = quantized_names(states[1])


def checkpoints(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    """Resumed to the bit, also under delayed scaling with an evaluation before the save; into a run with 16-bit weights, and back."""

    def build() -> Net:
        return Net()

    recipe = fake_engine.DelayedScaling(amax_history_len=4)
    for kind, what, directions in (
        ("sharded", recipe, ((True, False), (False, True)) if NIGHT else ((True, False),)),
        ("full", "current", ((True, False), (False, True)) if NIGHT else ((False, True),)),
    ):
        options = {"strategy_options": {"state_dict_type": kind}}
        if kind in RESUMED:
            result = resumed(rank, world, f"w{kind}", build, what, folder, precision={"fp8_weights": True}, **options)
            found |= {f"{kind} {name}": pair for name, pair in result.items()}
        for first, second in directions:
            path = f"{folder}/{kind}-{first}"
            model, other = seeded(Net), seeded(Net)
            trainer = trainer_for(world, fp8(fp8_weights=first), max_steps=2, **options)
            trainer.fit(model, data(rank, world, 2))
            trainer.save_checkpoint(path)
            precision = fp8(fp8_weights=True) if second else "bf16-mixed"
            trainer_for(world, precision, max_steps=2, **options).fit(other, data(rank, world, 2), ckpt_path=path)
            found[f"loaded {path}"] = full_state(other), full_state(model)


def fabric_with_an_optimizer_from_before(rank: int, world: int, found: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    states = []
    for on in (False, True):
        fake_engine.forget()
        strategy = MFSDPFabricStrategy(units=["Block"])
        strategy.precision = MFSDPFabricPrecision("transformer-engine", replace_layers=True, fp8_weights=on)
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        with fabric.init_module():
            plain = Net()
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        for x, y in data(rank, world, STEPS):
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state(model))
    found["fabric"] = states[1], states[0]
    found["fabric quantized"] = quantized_names(plain)


def two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for case in (
        replaced_layers,
        copies_of_weights,
        from_meta,
        tied_and_frozen,
        user_built,
        high_precision_and_overrides,
        fabric_with_an_optimizer_from_before,
    ):
        with fake_engine.installed():
            case(rank, world, found)
    with fake_engine.installed():
        checkpoints(rank, world, folder, found)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("weights")
    return run_distributed(two_ranks, 2, str(folder))


PAIRS = (
    *(f"{recipe} {kind}" for recipe, kinds in KINDS.items() for kind in kinds),
    *(f"copied or not: {recipe}" for recipe in COPIED),
    *("fused 16-bit weights", "from meta", "tied", "built", "overrides", "fabric"),
    *(f"{kind} {what}" for kind in RESUMED for what in ("evaluated", "resumed")),
)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_number_is_another_than_that_of_16_bit_weights_or_of_the_straight_run(ranks: Any, pair: str) -> None:
    for found in ranks:
        assert_equal_states(found[pair])


def test_checkpoints_go_into_runs_with_other_weights_and_back(ranks: Any) -> None:
    for found in ranks:
        pairs = [pair for name, pair in found.items() if name.startswith("loaded ")]
        assert len(pairs) == (4 if NIGHT else 2)
        for pair in pairs:
            assert_equal_states(pair)


def test_linear_layers_get_quantized_weights(ranks: Any) -> None:
    linears = [f"blocks.{index}.linear.weight" for index in range(3)]
    everything = [*linears, "head.weight", "inputs.weight"]
    for found in ranks:
        for case in ("current plain", "delayed plain", "from meta", "fabric"):
            assert found[f"{case} quantized"] == everything
        assert found["tied quantized"] == found["overrides quantized"] == [*linears, "inputs.weight"]
        assert found["built quantized"] == linears[:2]


def test_what_was_marked_tied_or_frozen_stays_so(ranks: Any) -> None:
    for found in ranks:
        assert found["tied kept"]
        assert found["mark"] == "mine"
        assert found["frozen"] == [False, True, True]


def test_layers_write_gradients_by_themselves_if_asked(ranks: Any) -> None:
    for found in ranks:
        assert found["current plain writes"] == []
        assert found["current fused writes"] == [True] * 5 * STEPS
        assert found["built writes"] == STEPS
        assert found["fused microbatches"] == 3 * 5


def test_copies_are_kept_only_where_they_must_be_or_are_asked_for(ranks: Any) -> None:
    for found in ranks:
        assert {found[f"copies, {recipe}, False"] == {False} for recipe in COPIED if recipe != "delayed"} == {True}
        assert found["copies, current, True"] == found["copies, delayed, False"] == {True}
        # The first must keep its copy to have its gradient's memory, the second has none.
        assert found["copies dropped"] == [False, False, True]


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _fake(self) -> Iterator[None]:
        with fake_engine.installed():
            yield

    def prepare(self, model: nn.Module, **options: Any) -> Fp8Compute:
        compute = Fp8Compute(Fp8Options(**{"replace_layers": True, **options}))
        compute.prepare(model, None)
        return compute

    def test_options_that_nothing_follows(self) -> None:
        built = nn.Sequential(fake_engine.Linear(16, 16, device="cpu"))
        for options in ({"fp8_weights": True}, {"keep_transpose_cache": True}):
            with pytest.raises(ValueError, match=r"Sequential has no module with FP8 weights\. Build modules"):
                self.prepare(built, replace_layers=False, **options)
        with pytest.raises(ValueError, match=r"fuse_weight_gradients=True: Sequential has no layer that was replaced"):
            self.prepare(built, replace_layers=False, fuse_weight_gradients=True)

    def test_modules_whose_gradients_come_later_or_elsewhere(self) -> None:
        late, elsewhere = fake_engine.Linear(16, 16, device="cpu"), fake_engine.BasicLinear()
        late.need_backward_dw = lambda: True  # type: ignore[method-assign]
        elsewhere._accumulate_into_main_grad = True
        for module, option in ((late, "delay_wgrad_compute"), (elsewhere, "accumulate_into_main_grad")):
            with pytest.raises(
                ValueError, match=rf"1 \(.*\) was built with {option}=True: the gradient of its weight is not"
            ):
                self.prepare(nn.Sequential(nn.Linear(16, 16), module))

    def test_switches_that_are_none(self) -> None:
        with pytest.raises(ValueError, match="fp8_weights='yes': expected True or False"):
            MFSDPPrecision("transformer-engine", fp8_weights="yes")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"'bf16-mixed'\): recipe, .*fp8_weights.* are about FP8"):
            MFSDPPrecision("bf16-mixed", fp8_weights=True)

    def test_blocks_of_128_are_whole_in_quantized_weights(self) -> None:
        model = nn.Sequential(nn.Linear(64, 128))
        with pytest.raises(ValueError, match=r"0 maps 64 to 128 features, .*multiples of 128 \(of FP8 weights\)"):
            self.prepare(model, recipe="block", fp8_weights=True)
        self.prepare(model, recipe="block")

    def test_weights_of_one_recipe_in_a_module_of_another(self) -> None:
        compute = Fp8Compute(Fp8Options(fp8_weights=True, keep_high_precision=["0"]))
        with compute.building():
            model = nn.Sequential(fake_engine.Linear(16, 16, device="cpu"))
        with pytest.raises(ValueError, match="0 is to compute with another recipe or in high precision"):
            compute.prepare(model, None)

    def test_a_library_without_the_way_to_drop_copies_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(fake_engine.TransformerEngineBaseModule, "is_fsdp2")
        model = nn.Sequential(nn.Linear(16, 16))
        compute = Fp8Compute(Fp8Options(replace_layers=True))
        assert "1 keep 8-bit copies of weights for the backward: this version" in compute.prepare(model, None)

    def test_a_norm_fused_with_a_layer_keeps_its_copy_where_it_writes_gradients(self) -> None:
        for fused in (False, True):
            options: Any = {"normalization": "RMSNorm", "fuse_wgrad_accumulation": fused, "device": "cpu"}
            layer = fake_engine.LayerNormLinear(16, 16, **options)
            done = Fp8Compute(Fp8Options()).prepare(nn.Sequential(layer), None)
            assert layer.is_fsdp2 is not fused
            assert ("1 keep 8-bit copies" in done) is fused

    def test_weights_that_were_built_on_another_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with fake_engine.quantized_model_init(recipe=fake_engine.Float8CurrentScaling()):
            model = nn.Sequential(fake_engine.Linear(16, 16, device="cpu"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        with pytest.raises(ValueError, match="0 has FP8 weights on cpu, and this rank computes on cuda:1"):
            checks.check_devices(dict(model.named_modules()))

    def test_two_sayings_about_transposes(self) -> None:
        policy = MixedPrecisionPolicy(weight_codecs=weight_codecs())
        with pytest.raises(ValueError, match="keep_transpose_cache=True, and a policy with weight_codecs of its own"):
            MFSDPPrecision("transformer-engine", keep_transpose_cache=True, policy=policy)

    def test_float16_is_refused_whoever_brings_the_policy(self) -> None:
        policy = MixedPrecisionPolicy(compute_dtype=torch.float16)
        with pytest.raises(ValueError, match=r"policy\.compute_dtype=torch\.float16 beside FP8"):
            fp8(policy=policy)
        with pytest.raises(ValueError, match=r"policy\.compute_dtype=torch\.float16 beside FP8"):
            translate_precision(fp8(), policy)

    def test_a_policy_of_the_strategy_learns_of_quantized_weights(self) -> None:
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        given = fp8(fp8_weights=True, policy=policy)
        assert translate_precision(given, policy) is given
        assert translate_precision(fp8(fp8_weights=True), policy).policy == given.policy
        assert given.policy.weight_codecs == weight_codecs()


def native_main_weights_are_refused(rank: int, world: int) -> None:
    with fake_engine.installed():
        policy = MixedPrecisionPolicy(main_params_dtype=None, compute_dtype=torch.bfloat16)
        with pytest.raises(
            ShardingError, match=r"linear\.weight of Block is quantized, and an optimizer's small steps"
        ):
            trained(rank, world, seeded(Net), fp8(fp8_weights=True, policy=policy))


def test_quantized_weights_need_main_weights() -> None:
    assert run_cases({"native": native_main_weights_are_refused}, 1) == {"native": ""}


def test_the_strategy_takes_the_options() -> None:
    strategy = MFSDPStrategy(precision_plugin=fp8(fp8_weights=True, fuse_weight_gradients=True))
    options = strategy.precision_plugin.fp8.options  # type: ignore[union-attr]
    assert (options.fp8_weights, options.fuse_weight_gradients) == (True, True)
