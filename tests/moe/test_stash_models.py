"""PagedStash with experts divided among ranks and with a Hugging Face model, both in one training: bit for bit what it is without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import fully_shard
from lightning_mfsdp.callbacks import PagedStash
from lightning_mfsdp.moe import OrdinarySaver, enable_grouped_experts, expert_parallel
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings
from tests.moe.models import batch, build, loss_of, meshes
from tests.moe.test_huggingface import built, transformers

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

STEPS, ACCUMULATED = 4, 2
CROWDED_CASE = "{'capacity_factor': 1.5}"
CROWDED = 2  # the step in which all tokens of all ranks go to the same two experts of each layer


class Both(LightningModule):
    """A mixture whose experts are divided among all ranks, and a sharded Mixtral."""

    def __init__(self, dispatcher: str = "all_gather", **limits: Any) -> None:
        super().__init__()
        self.dispatcher, self.limits = dispatcher, limits
        self.mixture: nn.Module | None = None
        self.losses: list[Tensor] = []
        self.found: list[list[Tensor]] = []

    def configure_model(self) -> None:
        if self.mixture is not None:
            return
        self.mixture = build(**self.limits)
        self.theirs = built("Mixtral")
        dense, expert = meshes(self.trainer.world_size, self.trainer.world_size)
        for block in self.mixture.blocks:
            fully_shard(expert_parallel(block.experts, expert, dispatcher=self.dispatcher), expert)
            fully_shard(block, dense)

    def loss(self, ids: Tensor) -> Tensor:
        return loss_of(self.mixture, ids) + self.theirs(input_ids=ids, labels=ids).loss

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self.loss(ids)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, ids: Tensor, index: int) -> None:
        with torch.enable_grad():
            self.loss(ids)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.found.append([one.grad.clone() for one in self.parameters() if one.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def ids_of(step: int, rank: int, world: int) -> Tensor:
    ids = batch(step, rank, world)
    return torch.full_like(ids, 3) if step // ACCUMULATED == CROWDED else ids


def fit(rank: int, world: int, stash: PagedStash | None, **options: Any) -> Both:
    module = Both(**options)
    trainer = make_trainer(
        "",
        world,
        callbacks=[] if stash is None else [stash],
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.5,
        val_check_interval=1,
        limit_val_batches=1,
    )
    train = [ids_of(step, rank, world) for step in range(STEPS * ACCUMULATED)]
    if stash is None:  # the same arithmetic for both
        module.on_fit_start = lambda: enable_grouped_experts(module.theirs)  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(train, batch_size=None), DataLoader([batch(9)], batch_size=None))
    return module


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def outcomes(rank: int, world: int) -> list[Any]:
    """Differences from training without a stash, what the stashes counted, and what was told of rows left out."""
    strict_warnings()
    wrong, counts, told = [], [], []
    for options, reference, modes in (
        ({"capacity_factor": 1.5}, {}, ("keep", "skip", "rerun") if NIGHT else ("keep", "rerun")),
        *([({"capacity_factor": 1.5, "over_capacity": "drop"}, None, ("keep",))] if NIGHT else []),
        ({"dispatcher": "all_to_all"}, None, ("keep",)),
    ):
        plain = fit(rank, world, None, **(options if reference is None else reference))
        for overflow in modes:
            case = f"{overflow} {options}"
            stash = PagedStash(page_rows=4, overflow=overflow, device_factor=1.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", message=".*left some out.*")
                warnings.filterwarnings(
                    "always", message=".*(found no pages|than their buffers hold|takes a larger buffer).*"
                )
                warnings.filterwarnings("ignore", message=".*does not pay here.*")
                module = fit(rank, world, stash, **options)
            told.append([str(one.message) for one in caught])
            counts.append((case, stash.skipped, stash.reruns, stash.statistics.saves, stash.statistics.overflowed))
            until = CROWDED if overflow == "skip" else STEPS  # after a step that was left out all is different
            seen, wanted, before = module.losses, plain.losses, ACCUMULATED * CROWDED
            if overflow == "skip":
                seen, wanted = seen[:before], wanted[:before]
            elif overflow == "rerun":  # the step was seen twice, the first time with rows left out
                first = seen[before : before + ACCUMULATED]
                # The first tokens, of rank 0, found room.
                if (
                    rank == world - 1
                    and "capacity_factor" in options
                    and same(first, wanted[before : before + ACCUMULATED])
                ):
                    wrong.append(f"{case}: no rows were left out")
                seen = seen[:before] + seen[before + ACCUMULATED :]
            if not same(seen, wanted):
                wrong.append(f"{case}: losses")
            if not all(map(same, module.found[:until], plain.found[:until])):
                wrong.append(f"{case}: gradients")
            if overflow != "skip" and not same([*full_state(module).values()], [*full_state(plain).values()]):
                wrong.append(f"{case}: weights")
            experts = [*(block.experts for block in module.mixture.blocks)]
            if not all(isinstance(one.saver, OrdinarySaver) for one in experts):
                wrong.append(f"{case}: savers")
            if module.theirs.config._experts_implementation != plain_implementation():
                wrong.append(f"{case}: {module.theirs.config._experts_implementation}")
    return [wrong, counts, told]


def plain_implementation() -> str:
    return built("Mixtral").config._experts_implementation


def test_divided_experts_and_a_hugging_face_model_train_to_the_bit_as_without_a_stash() -> None:
    ranks = run_distributed(outcomes, 2)
    for wrong, counts, _ in ranks:
        assert not wrong
        # Two layers of two models in two microbatches, without the last layer.
        assert {saves for case, *_, saves, _ in counts if CROWDED_CASE in case} == {6}
        # A rank that got no row at all saves nothing; the layer before is the last then, which nobody foresaw.
        assert counts[-1][-2] >= 6
        assert {overflowed for case, *_, overflowed in counts if CROWDED_CASE in case} == {0}, (
            "the last step has pages enough"
        )
    # Two experts are on one rank, whose buffers have room for 1.5 times the average and not for all. Only who asks for it loses rows.
    told, others = ({case: lines for (case, *_), lines in zip(counts, told, strict=True)} for _, counts, told in ranks)
    (keep,) = (case for case in told if case.startswith("keep") and case.endswith(CROWDED_CASE))
    acting = [case for case in told if not case.startswith("keep")]
    lost = [case for case in told if "drop" in case]
    silent = [told[keep], *(others[case] for case in acting), *(told[case] for case in lost)]
    assert [lines for lines in silent if any("left some" in line for line in lines)] == []
    assert any("capacity_factor=2.00 would have been enough" in line for line in others[keep])
    for lines in (told[case] for case in acting):
        (line,) = lines
        assert "experts had more rows than their buffers hold" in line
        assert "capacity_factor=2.00 would have been enough" in line
    for case in lost:
        (line,) = (line for line in others[case] if "left some" in line)
        assert "rank 1: mixture.blocks.0.experts (and 1 more) had more rows than its buffer holds" in line
        assert "capacity_factor=2.00 would have been enough so far" in line
    acted = [[(case, skipped, reruns) for case, skipped, reruns, *_ in counts] for _, counts, _ in ranks]
    assert acted[0] == acted[1]
    assert acted[0] == [(case, int(case.startswith("skip")), int(case.startswith("rerun"))) for case, *_ in acted[0]], (
        "all tokens on two experts found too few pages on the rank that has them"
    )


class Theirs(LightningModule):
    """A Hugging Face model alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(model: nn.Module, folder: Any, **options: Any) -> PagedStash:
    stash = PagedStash(page_rows=4, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not pay here.*")
        warnings.filterwarnings("ignore", message=".*nothing needed pages.*")  # of a single layer
        make_trainer(folder, 1, callbacks=[stash], max_steps=2).fit(
            Theirs(model), DataLoader([batch(0), batch(1)], batch_size=None)
        )
    return stash


@pytest.fixture
def told(monkeypatch):
    """What goes to rank 0's log."""
    lines: list[str] = []
    monkeypatch.setattr(
        "lightning_mfsdp.callbacks.paged_stash.report.rank_zero_info", lambda text, **_: lines.append(text)
    )
    return lines


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3"])
def test_experts_of_hugging_face_are_found_told_and_given_back(kind: str, tmp_path, told) -> None:
    model = built(kind, experts_implementation="eager")
    first = 1 if kind == "DeepseekV3" else 0
    stash = trained(model, tmp_path, modules=[f"*.{layer}.mlp.experts" for layer in range(first, 2)])
    assert f"PagedStash: {2 - first} layers save their rows in pages" in told[0]
    assert f"  model.model.layers.1.mlp.experts  {type(model.model.layers[1].mlp.experts).__name__}" in told[0]
    assert stash.statistics.saves == 1 - first, "all but the last layer"
    assert stash.statistics.live_rows == (1 - first) * 8 * 6 * 2
    assert model.config._experts_implementation == "eager"
    assert not any("saver" in vars(module) for module in model.modules())


def test_two_stashes_of_one_model_and_one_fit_after_the_other_leave_nothing_behind(tmp_path) -> None:
    model = built("Mixtral", experts_implementation="eager")
    module = Theirs(model)
    for _ in range(2):
        stashes = [PagedStash(page_rows=4, modules=[f"*.{layer}.mlp.experts"]) for layer in range(2)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not pay here.*")
            warnings.filterwarnings("ignore", message=".*nothing needed pages.*")  # of a single layer
            make_trainer(tmp_path, 1, callbacks=stashes, max_steps=2).fit(
                module, DataLoader([batch(0), batch(1)], batch_size=None)
            )
        assert [stash.statistics.ordinary_bytes > 0 for stash in stashes] == [True, True]
        assert model.config._experts_implementation == "eager"
        assert not any("saver" in vars(module) for module in model.modules())


def test_layers_that_a_user_gave_a_saver_get_it_back(tmp_path) -> None:
    class Mine(OrdinarySaver):
        pass

    model, mine = built("Mixtral"), Mine()
    enable_grouped_experts(model, mine)
    implementation = model.config._experts_implementation
    stash = trained(model, tmp_path, modules=["*.1.mlp.experts"])
    assert stash.statistics.saves == 0, "a single layer stays where it is"
    assert stash.statistics.ordinary_bytes > 0
    assert model.config._experts_implementation == implementation
    assert all(layer.mlp.experts.saver is mine for layer in model.model.layers)


def test_experts_that_cannot_be_stashed_are_named_with_the_reason(tmp_path, told) -> None:
    def unable() -> Any:
        return built("GptOss", experts_implementation="eager")

    with pytest.raises(
        ValueError,
        match=r"it fits .*model\.model\.layers\.0\.mlp\.experts \(GptOssExperts, because its experts have bia",
    ):
        trained(unable(), tmp_path)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.able, self.unable = built("Mixtral"), unable()

        def forward(self, **inputs: Tensor) -> Any:
            return self.able(**inputs)

    two = Two()
    trained(two, tmp_path)
    assert "  model.able.model.layers.0.mlp.experts  MixtralExperts" in told[0]
    assert "  model.unable.model.layers.1.mlp.experts: left alone, because its experts have biases" in told[0]
    assert two.unable.config._experts_implementation == "eager"


def test_a_model_that_shares_the_configuration_of_a_switched_one_computes_on(tmp_path) -> None:
    model = built("Mixtral")
    other = transformers.MixtralForCausalLM(model.config)
    ids = batch(0)
    expected = other(input_ids=ids).logits
    enable_grouped_experts(model)
    torch.testing.assert_close(other(input_ids=ids).logits, expected)
