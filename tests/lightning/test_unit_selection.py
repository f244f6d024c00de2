"""Which modules are chosen as units, on real model shapes without their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import select_units
from lightning_mfsdp.engine import UnitView
from lightning_mfsdp.options import strategy_options
from lightning_mfsdp.options.unit_selection import describe_units, join_blocks, validate_units
from tests.lightning.models import FOREIGN_WARNINGS, Block, Classifier, loader, make_trainer, seeded


def names(root: nn.Module, units: Any = "auto") -> list[str]:
    known = {id(module): name for name, module in root.named_modules()}
    return [known[id(module)] for module in select_units(root, units)]


class Decoder(nn.Module):
    """Table, blocks, head."""

    def __init__(self, *, vocab: int, dim: int, layers: int, tied: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(vocab, dim)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 1, 4 * dim) for _ in range(layers))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_and_large_tables_are_units_and_the_norm_stays_in_the_root() -> None:
    assert names(Decoder(vocab=32_000, dim=256, layers=3, tied=False)) == ["embed", *BLOCKS, "head"]


def test_tied_tables_stay_in_the_root() -> None:
    assert names(Decoder(vocab=32_000, dim=256, layers=3, tied=True)) == BLOCKS


def test_small_tables_stay_in_the_root() -> None:
    assert names(Decoder(vocab=50, dim=256, layers=3, tied=False)) == BLOCKS


def test_a_huge_table_is_a_unit_however_large_the_model() -> None:
    root = Decoder(vocab=128_000, dim=1024, layers=0, tied=False)
    with torch.device("meta"):
        root.blocks.extend(nn.Linear(65_536, 65_536) for _ in range(3))
    assert names(root) == ["embed", *BLOCKS, "head"]


def test_stages_of_sequences_give_their_blocks() -> None:
    root = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(4, 2)
    )
    assert names(root) == ["1.0", "1.1", "2.0", "2.1"]


def test_a_plain_stack_of_small_layers_is_not_cut_up() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


def test_lists_of_lists_give_what_can_be_called() -> None:
    root = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
    assert names(root) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_single_entry_and_entries_without_parameters_are_no_units() -> None:
    assert names(nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": nn.Sequential(nn.ReLU(), nn.ReLU())})) == []


def test_blocks_that_share_a_parameter_stay_together() -> None:
    root = nn.ModuleList(Block() for _ in range(3))
    root[2].linear.weight = root[0].linear.weight
    assert names(root) == ["1"]


def test_a_block_listed_twice_is_one_unit() -> None:
    block = Block()
    assert names(nn.ModuleList([block, Block(), block])) == ["0", "1"]


def test_a_module_that_blocks_share_is_a_unit_of_its_own() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), shared) for _ in range(3))
    root = nn.Sequential(nn.Linear(2, 4), nn.Sequential(*blocks))
    assert select_units(root, "auto") == [*blocks, shared]
    assert select_units(root, lambda module: module is blocks[0]) == [blocks[0], shared], (
        "shared with the root's own part"
    )
    holder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # cannot be called
    holding = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(2))
    for block in holding:
        block.held = holder
    assert select_units(nn.Sequential(holding), "auto") == [*holding, *holder]


def test_classes_hugging_face_models_name_are_units() -> None:
    class Layer(Block):
        pass

    class PreTrained(nn.Module):
        _no_split_modules = ("Layer",)

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert names(nn.ModuleDict({"model": PreTrained()})) == ["model.first"]
    PreTrained._no_split_modules = None  # type: ignore[assignment]
    assert names(nn.ModuleDict({"model": PreTrained()})) == []


def test_the_projection_inside_attention_is_no_unit_because_nobody_calls_it() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(1024, 2)
            self.head = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    assert names(Attending()) == ["head"]


def test_names_classes_and_callables_choose_exactly_what_they_say() -> None:
    model = Classifier()
    assert names(model, ["Block"]) == ["blocks.0", "blocks.1"]
    assert names(model, [Block, nn.Linear]) == [
        "inputs",
        "blocks.0",
        "blocks.0.linear",
        "blocks.1",
        "blocks.1.linear",
        "head",
    ]
    assert names(model, lambda module: isinstance(module, nn.Linear) and module.out_features == 5) == ["head"]


def test_a_name_that_matches_nothing_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no module with parameters matches 'Layer'.*Linear \(4\)"):
        select_units(Classifier(), ["Block", "Layer"])


def test_a_class_without_a_forward_says_why_it_is_no_unit() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def encode(self, x: Any) -> Any:
            return self.inner(x)

    with pytest.raises(
        ValueError, match=r"'Coder' has no forward, or no parameters.*name modules inside it.*Linear \(1\)"
    ):
        select_units(nn.Sequential(Coder()), ["Coder"])


def joined(root: nn.Module, blocks_per_unit: Any = "auto", units: Any = "auto") -> list[Any]:
    """Names of the units; a list for those of several modules."""
    known = {id(module): name for name, module in root.named_modules()}
    return [
        known[id(unit)] if isinstance(unit, nn.Module) else [known[id(member)] for member in unit]
        for unit in join_blocks(root, select_units(root, units), blocks_per_unit)
    ]


def test_small_neighbors_share_a_unit_until_it_is_worth_a_gather() -> None:
    found = joined(Decoder(vocab=32_000, dim=1024, layers=24, tied=False))  # 12.6 million a block
    assert (found[0], found[-1]) == ("embed", "head")
    assert found[1:-1] == [[f"blocks.{i}" for i in range(start, start + 3)] for start in range(0, 24, 3)]


def test_large_blocks_stay_alone_and_few_blocks_too() -> None:
    assert joined(Decoder(vocab=50, dim=2048, layers=12, tied=False)) == [f"blocks.{i}" for i in range(12)]
    assert joined(Decoder(vocab=50, dim=256, layers=11, tied=False)) == [f"blocks.{i}" for i in range(11)]


def test_tiny_blocks_leave_enough_units_to_overlap() -> None:
    assert [len(unit) for unit in joined(Decoder(vocab=50, dim=64, layers=40, tied=False))] == [5, 6, 6, 5, 6, 6, 6]


def test_only_neighbors_of_one_class_in_one_list_are_joined() -> None:
    root = nn.ModuleList([Block(), Block(), Block(), nn.Linear(4, 4), Block(), Block()])
    assert joined(root, 2, ["Block"]) == ["0", ["1", "2"], ["4", "5"]]
    assert joined(root, 1, ["Block"]) == ["0", "1", "2", "4", "5"]
    stages = nn.Sequential(*(nn.Sequential(Block(), Block(), Block()) for _ in range(2)))
    assert joined(stages, 4) == [["0.0", "0.1", "0.2"], ["1.0", "1.1", "1.2"]]


@pytest.mark.parametrize("units", [{nn.Linear}, frozenset({"Linear"}), [nn.Linear], ("Linear",)])
def test_any_collection_of_classes_and_names_chooses_units(units: Any) -> None:
    validate_units(units)
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2))
    assert select_units(root, units) == [root[0], root[1][0]]


def view_of(name: str, kind: str, size: int, *, padding: float = 0.013, is_whole: bool = False) -> UnitView:
    return UnitView(
        name=name,
        module_class=kind,
        num_parameters=size,
        padding_fraction=padding,
        main_bytes=2 * size,
        held_bytes=size,
        gradient_bytes=0,
        full_bytes=0 if is_whole else 4 * size,
        stays_gathered=False,
    )


def test_the_table_joins_equal_units_and_says_what_a_rank_keeps() -> None:
    views = [view_of("", "GPT", 50), view_of("blocks.0", "Block", 10**6), view_of("blocks.1", "Block", 10**6)]
    assert describe_units(views, 1025, {"data": 2}).splitlines() == [
        "mfsdp: 3 units, 2,000,050 parameters; this rank keeps 5.7 MiB of weights and 1,025 elements of each optimizer state",
        "unit      class  count  parameters  sharded MiB  unsharded MiB",
        "(root)    GPT        1          50         <0.1           <0.1",
        "blocks.0  Block      2   1,000,000          2.9            3.8",
    ]


def test_the_table_shows_padding_only_of_units_that_have_much() -> None:
    views = [view_of("", "GPT", 50, padding=0.9), view_of("head", "Linear", 10**7, padding=0.06, is_whole=True)]
    assert describe_units(views, 25, {"data": 2}).splitlines() == [
        "mfsdp: 2 units, 10,000,050 parameters; this rank keeps 28.6 MiB of weights and 25 elements of each optimizer state",
        "unit    class   count  parameters  sharded MiB  unsharded MiB  padding",
        "(root)  GPT         1          50         <0.1           <0.1",
        "head    Linear      1  10,000,000         28.6              -     6.0%",
    ]
    said = describe_units(views[:1], 25, {"data": 1, "context": 2}).splitlines()[0]
    assert said.startswith("mfsdp: 1 unit, 50 parameters;")
    assert said.endswith("; ranks: data 1 x context 2")


@pytest.mark.filterwarnings(*(f"ignore:{message}" for message in FOREIGN_WARNINGS))
def test_the_announcement_counts_optimizer_state_of_trained_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(strategy_options, "rank_zero_info", said.append)
    model = seeded(Classifier)
    model.requires_grad_(requires_grad=False)
    model.inputs.requires_grad_()
    trained = sum(parameter.numel() for parameter in model.inputs.parameters())
    make_trainer(tmp_path, 1, max_steps=1).fit(model, loader(4))
    assert f" {trained:,} elements of each optimizer state" in said[0]
