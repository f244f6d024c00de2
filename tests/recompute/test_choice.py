"""What is computed again, as tables of names, and options that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mfsdp.callbacks import ActivationRecompute
from lightning_mfsdp.recompute import Recompute, apply_recompute, as_recompute, recomputed, remove_recompute
from lightning_mfsdp.recompute.apply import chunks_of, find_stacks
from tests.recompute.models import Layer, build


class TwoStacks(nn.Module):
    """An encoder, a decoder of other layers, and a head with one layer of the decoder's class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.decoder = nn.Module()
        self.decoder.blocks = nn.ModuleList(Layer() for _ in range(5))
        self.head = nn.Module()
        self.head.layer = Layer()
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def names(config: Recompute, model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in chunk] for chunk in chunks_of(config, find_stacks(model, config.modules))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["e0", "e1", "e2", "d0", "d1", "d2", "d3", "d4", "h"]),
        ({"num_layers": 2}, ["e0 e1", "e2", "d0 d1", "d2 d3", "d4", "h"]),
        ({"num_layers": 7}, ["e0 e1 e2", "d0 d1 d2 d3 d4", "h"]),
        ({"every_nth": 2}, ["e0", "e2", "d0", "d2", "d4", "h"]),
        ({"num_layers": 2, "every_nth": 2}, ["e0 e1", "d0 d1", "d4", "h"]),
        ({"method": "block", "num_layers": 1}, ["e0", "d0", "h"]),
        ({"method": "block", "num_layers": 4}, ["e0", "e1", "e2", "d0", "d1", "d2", "d3", "h"]),
        ({"method": "selective", "save_ops": ["matmul"], "every_nth": 3}, ["e0", "d0", "d3", "h"]),
        ({"modules": ["decoder.*"], "num_layers": 3}, ["d0 d1 d2", "d3 d4"]),
        ({"method": "block", "num_layers": 2, "modules": ["*.blocks.[1-4]"]}, ["d1", "d2"]),
    ],
)
def test_layers_of_each_stack(options, expected) -> None:
    short = {f"encoder.{number}": f"e{number}" for number in range(3)} | {"head.layer": "h"}
    short |= {f"decoder.blocks.{number}": f"d{number}" for number in range(5)}
    found = names(Recompute(**options), TwoStacks())
    assert [" ".join(short[name] for name in chunk) for chunk in found] == expected


def test_modules_inside_layers_by_pattern_outermost_first() -> None:
    config = Recompute(method="selective", modules=["*.up", "layers.1*"], save_ops=["aten.mm"])
    found = names(config, build())
    assert found == [["layers.0.up"], ["layers.1"], ["layers.2.up"], ["layers.3.up"]]


def test_layers_that_hugging_face_says_not_to_split() -> None:
    model = nn.Module()
    model._no_split_modules = ["Layer"]
    model.only = Layer()
    assert names(Recompute(), model) == [["only"]]


def test_layers_within_stages_and_layers_registered_twice() -> None:
    model = nn.Module()
    shared = Layer()
    model.stages = nn.ModuleList(nn.Sequential(Layer(), Layer()) for _ in range(2))
    model.depths = nn.ModuleList([shared, shared])
    assert names(Recompute(num_layers=2), model) == [
        ["stages.0.0", "stages.0.1"],
        ["stages.1.0", "stages.1.1"],
        ["depths.0"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full"}, "method='full': expected one of 'none', 'uniform', 'block', 'selective'"),
        ({"num_layers": 0}, "num_layers=0: expected a number of at least 1"),
        ({"num_layers": True}, "num_layers=True: expected a number of at least 1"),
        ({"every_nth": None}, "every_nth=None: expected a number of at least 1"),
        ({"modules": "layers.*"}, "modules='layers.*': expected a list of strings"),
        ({"offload": "cpu"}, "offload='cpu': expected True or False"),
        ({"method": "none", "num_layers": 2, "offload": True}, "num_layers, offload would have no effect"),
        ({"save_ops": ["matmul"]}, "save_ops would have no effect"),
        ({"method": "block", "num_layers": 2, "every_nth": 2}, "every_nth would have no effect"),
        ({"method": "selective", "modules": ["*"], "num_layers": 2}, "num_layers would have no effect"),
        ({"method": "block"}, "expected num_layers, how many first layers"),
        ({"method": "selective"}, "expected modules, patterns of names of what is recomputed, or save_ops"),
        ({"method": "selective", "save_ops": ["mm"]}, "'mm' is neither one of 'matmul', 'attention' nor the name"),
    ],
)
def test_options_that_contradict_each_other(options, message) -> None:
    for build_it in (Recompute, ActivationRecompute):
        with pytest.raises((ValueError, TypeError)) as caught:
            build_it(**options)
        assert message in str(caught.value)


def test_a_mapping_stands_for_the_options() -> None:
    assert as_recompute({"method": "block", "num_layers": 3}) == Recompute(method="block", num_layers=3)
    assert as_recompute(None) is None
    assert hash(Recompute(modules=["a"])) == hash(Recompute(modules=("a",)))
    with pytest.raises(ValueError, match="unknown option 'layers'; expected method, num_layers"):
        as_recompute({"layers": 3})
    with pytest.raises(TypeError, match="expected a Recompute, a mapping of its options, or None"):
        as_recompute("uniform")  # type: ignore[arg-type]


def test_models_that_cannot_be_recomputed_as_asked() -> None:
    with pytest.raises(ValueError, match="Linear has no layers that repeat"):
        apply_recompute(nn.Linear(2, 2), Recompute())
    with pytest.raises(ValueError, match=r"'blocks\.\*' matches no module of Stack; names look like \['inputs'"):
        apply_recompute(build(), Recompute(modules=["blocks.*"]))
    model = build()
    model.layers[2].up.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"layers\.2 checkpoints itself already"):
        apply_recompute(model, Recompute())
    model.layers[2].up.gradient_checkpointing = False
    model.layers[2].gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"layers\.2\.up checkpoints itself already, or a module around it does"):
        apply_recompute(model, Recompute(method="selective", modules=["layers.*.up"]))
    assert recomputed(model) == [], "nothing was changed"


def test_what_was_applied_is_replaced_or_removed() -> None:
    model = build()
    assert apply_recompute(model, Recompute()) == [f"layers.{number}" for number in range(4)]
    apply_recompute(model, Recompute(method="block", num_layers=1))
    assert recomputed(model) == ["layers.0"]
    apply_recompute(model, Recompute(method="none"))
    assert recomputed(model) == []
    apply_recompute(model, Recompute(num_layers=2))
    remove_recompute(model)
    assert not any("forward" in vars(module) for module in model.modules())
    own = torch.compile(model.layers[0].forward, backend="eager")
    model.layers[0].forward = own
    apply_recompute(model, Recompute())
    remove_recompute(model)
    assert vars(model.layers[0])["forward"] is own
