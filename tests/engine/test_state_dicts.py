"""State dicts of sharded models and their optimizers: what torch.distributed.checkpoint makes of them is what it makes of FSDP2's."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard

from lightning_mfsdp.engine import EngineStateError, fully_shard, fully_shard_optimizer
from lightning_mfsdp.optim import Muon
from tests.engine.cases import device_type
from tests.engine.worlds import at_night, by_world, check, in_turns
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.pairwise import in_turn, pairwise

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
HELD_AS_DTENSORS, OFFLOADED = "an optimizer that looks at whole tensors", "main weights and state in host memory"
HSDP, HFSDP = "copies along the outer axis", "state split along the outer axis"
FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a frozen weight, a tied one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7))
        self.last = nn.Linear(7, 5, bias=False)
        self.one_row = nn.Parameter(torch.ones(1, 5))
        self.fixed = nn.Parameter(torch.full((3, 5), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))) * self.one_row + self.fixed.sum(0) + self.shift


def built(seed: int = 0) -> Uneven:
    torch.manual_seed(seed)
    return Uneven()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]


def ours(
    sharding: str = "optim_grads_params", seed: int = 0, kind: Any = torch.optim.AdamW
) -> tuple[Uneven, torch.optim.Optimizer]:
    model, options = built(seed), options_of(sharding)
    fully_shard(model.middle, **options)
    fully_shard(model, **options)
    elementwise = False if sharding == HELD_AS_DTENSORS else None
    return model, fully_shard_optimizer(kind(groups_of(model), lr=0.01), elementwise=elementwise)


def options_of(sharding: str) -> dict[str, Any]:
    if sharding in (HSDP, HFSDP):
        mesh = init_device_mesh(device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "shard"))
        return {"mesh": mesh, "outer_sharding": "optim" if sharding == HFSDP else "no_shard"}
    if sharding in (HELD_AS_DTENSORS, OFFLOADED):
        return {"offload": "optimizer" if sharding == OFFLOADED else None}
    return {"sharding": sharding}


def ways() -> Sequence[str]:
    """To shard a model over these ranks."""
    two = (*in_turn(0, SHARDINGS), HELD_AS_DTENSORS, OFFLOADED)
    return {2: two, 3: thinned(("optim", "optim_grads_params"), 2), 4: thinned((HFSDP, HSDP), 2)}[dist.get_world_size()]


def theirs(seed: int = 0, kind: Any = torch.optim.AdamW) -> tuple[Uneven, torch.optim.Optimizer]:
    model, mesh = built(seed), init_device_mesh(device_type(), (dist.get_world_size(),))
    fsdp2(model.middle, mesh=mesh)
    fsdp2(model, mesh=mesh)
    return model, kind(groups_of(model), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()


def whole(value: Any) -> Any:
    """Nested state with whole tensors. Collective."""
    if isinstance(value, DTensor):
        return value.to(device_type()).full_tensor()  # NCCL knows nothing of what cpu_offload=True gives
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(part) for part in value]
    return value


def assert_same(found: Any, expected: Any, what: str, rtol: float = 1e-6) -> None:
    """Same keys in the same order, equal values."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), (what, list(found), list(expected))
        for key in expected:
            assert_same(found[key], expected[key], f"{what}.{key}", rtol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{what}.{number}", rtol)
    elif isinstance(expected, Tensor):
        # Where a step's number is, optimizers and what is loaded into them do not agree on GPUs.
        note = {"check_device": expected.dim() > 0, "msg": lambda message: f"{what}: {message}"}
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, **note)
    else:
        assert found == expected, (what, found, expected)


def kinds(value: Any) -> Any:
    """Which leaves are sharded."""
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    return isinstance(value, DTensor)


@contextmanager
def shared_folder() -> Iterator[str]:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = made[0]
    assert folder is not None
    try:
        yield folder
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def each(action: Callable[[str], None]) -> None:
    for sharding in ways():
        action(sharding)


# -- get ---------------------------------------------------------------------------------------------------------------


def state_dicts_of_optimizers_look_as_with_fsdp2(rank: int, world: int) -> None:
    for kind in (torch.optim.AdamW, torch.optim.NAdam):
        reference = theirs(kind=kind)
        train(*reference)
        expected = reference[1].state_dict()
        for sharding in ways():
            model, optimizer = ours(sharding, kind=kind)
            train(model, optimizer)
            found = optimizer.state_dict()
            assert kinds(found["state"]) == kinds(expected["state"]), (sharding, kind)
            assert_same(whole(found), whole(expected), f"{sharding} {kind.__name__}")


def state_is_a_view_of_what_the_optimizer_has(rank: int, world: int) -> None:
    model, optimizer = ours()
    train(model, optimizer)
    for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        if parameter.numel():
            shown = optimizer.state_dict()["state"][number]["exp_avg"]
            assert shown.to_local().data_ptr() == optimizer.state[parameter]["exp_avg"].to_local().data_ptr()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.to_local().numel():
            assert "exp_avg" in optimizer.state[parameter], "as with FSDP2, the module's parameters are its keys"


def get_state_dict_gives_what_it_gives_of_fsdp2(rank: int, world: int) -> None:
    reference = theirs()
    train(*reference)

    every = (None, FULL, ON_RANK_0, StateDictOptions(cpu_offload=True, ignore_frozen_params=True))
    for number, sharding in enumerate(ways()):
        model, optimizer = ours(sharding)
        train(model, optimizer)
        for options in every if NIGHT else every[number % 2 :: 2]:
            found, expected = (get_state_dict(*pair, options=options) for pair in ((model, optimizer), reference))
            assert kinds(found[1]) == kinds(expected[1]), (sharding, options)
            assert_same(whole(list(found)), whole(list(expected)), f"{sharding} {options}")
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        found, expected = (get_optimizer_state_dict(*pair, options=flat) for pair in ((model, optimizer), reference))
        assert_same(whole(found), whole(expected), f"{sharding} flat")


def optimizers_without_a_step_have_the_same_state_dicts(rank: int, world: int) -> None:
    reference, (model, optimizer) = theirs(), ours()
    assert optimizer.state_dict()["state"] == reference[1].state_dict()["state"] == {}
    found, expected = (get_optimizer_state_dict(*pair) for pair in ((model, optimizer), reference))
    assert_same(whole(found), whole(expected), "before the first step")
    assert all(parameter.grad is None for parameter in model.parameters())


KINDS = {
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


def ranks_without_any_rows_show_what_the_others_do(rank: int, world: int) -> None:
    """An optimizer of one row. Where PyTorch found no state it would take a step to get some."""

    def trained(model: Uneven, optimizer: torch.optim.Optimizer, clears: bool) -> list[Any]:
        found: list[Any] = []
        for step in range(3):
            train(model, optimizer, steps=1, first=step)
            if clears:
                optimizer.zero_grad()
            for state in (optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)):
                found.append(copy.deepcopy(whole(state["state"])))
        return found

    for (name, kind), clears in pairwise(KINDS.items(), (False, True), together=1):
        reference, mesh = built(), init_device_mesh(device_type(), (world,))
        fsdp2(reference, mesh=mesh)
        expected = trained(reference, kind([reference.one_row], lr=0.1), clears)
        model = fully_shard(built())
        optimizer = fully_shard_optimizer(kind([model.one_row], lr=0.1))
        assert_same(trained(model, optimizer, clears), expected, f"{name} {clears}", rtol=1e-5)
        again = fully_shard_optimizer(kind([model.one_row], lr=0.1))
        set_optimizer_state_dict(model, again, get_optimizer_state_dict(model, optimizer))
        assert_same(whole(again.state_dict()["state"]), whole(optimizer.state_dict()["state"]), name)


def groups_with_other_options_show_their_own_state(rank: int, world: int) -> None:
    """No rank without rows of one group takes the keys of another."""

    def grouped(model: Uneven, options: dict[str, Any]) -> torch.optim.Optimizer:
        others = [one for one in model.parameters() if one.requires_grad and one is not model.one_row]
        return torch.optim.AdamW([{"params": others}, {"params": [model.one_row], **options}], lr=0.01)

    reference, mesh = built(), init_device_mesh(device_type(), (world,))
    fsdp2(reference, mesh=mesh)
    theirs = grouped(reference, {"amsgrad": True})
    train(reference, theirs)
    for sharding in ways():
        model = built()
        fully_shard(model, **options_of(sharding))
        optimizer = fully_shard_optimizer(grouped(model, {"amsgrad": True}))
        train(model, optimizer)
        assert_same(whole(optimizer.state_dict()["state"]), whole(theirs.state_dict()["state"]), sharding)


def muon_shows_its_state(rank: int, world: int) -> None:
    model = built()
    fully_shard(model)
    matrices = [model.one_row, model.first.weight]
    optimizer = fully_shard_optimizer(
        Muon([{"params": matrices}, {"params": [model.last.weight, model.first.bias], "use_muon": False}], lr=0.01)
    )
    train(model, optimizer)
    keys = [["momentum_buffer"]] * 2 + [["step", "exp_avg", "exp_avg_sq"]] * 2
    for state in (optimizer.state_dict()["state"], get_optimizer_state_dict(model, optimizer)["state"]):
        assert [list(values) for values in state.values()] == keys
        found = whole(state)
        assert [float(values["step"]) for values in found.values() if "step" in values] == [2.0, 2.0]
    single = fully_shard_optimizer(Muon([{"params": [model.one_row]}], lr=0.01))
    train(model, single)
    for state in (single.state_dict()["state"], get_optimizer_state_dict(model, single)["state"]):
        assert [list(values) for values in state.values()] == [["momentum_buffer"]]
        assert [value.shape for values in whole(state).values() for value in values.values()] == [(1, 5)]


# -- set ---------------------------------------------------------------------------------------------------------------


def set_state_dict_takes_what_get_state_dict_gave(rank: int, world: int) -> None:
    straight = theirs()
    train(*straight)
    given = {"sharded": (None, 0), "sharded, later": (None, 1), "full": (FULL, 1), "from rank 0": (FROM_RANK_0, 0)}
    states = {name: copy.deepcopy(get_state_dict(*straight, options=FULL)) for name in ("full", "from rank 0")}
    train(*straight, steps=2, first=2)
    expected = whole(list(get_state_dict(*straight)))

    for number, sharding in enumerate(ways()):
        before = ours(sharding)
        train(*before)
        states["sharded"] = states["sharded, later"] = get_state_dict(*before)
        for name, (options, trained_before) in list(given.items()) if NIGHT else [list(given.items())[number]]:
            model, optimizer = ours(sharding, seed=5)
            train(model, optimizer, steps=trained_before, first=7)
            weights, state = copy.deepcopy(states[name])  # optimizers go on in the memory that they are given
            if name == "from rank 0" and rank:
                weights, state = {}, {}
            set_model_state_dict(model, weights, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            train(model, optimizer, steps=2, first=2)
            assert_same(whole(list(get_state_dict(model, optimizer))), expected, f"{sharding} {name}")


def flat_optimizer_states_are_taken(rank: int, world: int) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    first = ours()
    train(*first)
    expected = whole(copy.deepcopy(first[1].state_dict()))
    for trained_before in (0, 1):  # full ones are refused by PyTorch (2.13: KeyError), FSDP2's as well
        second = ours(seed=5)
        train(*second, steps=trained_before)
        state = copy.deepcopy(get_optimizer_state_dict(*first, options=flat))
        set_optimizer_state_dict(*second, state, options=flat)
        assert_same(whole(second[1].state_dict()), expected, f"trained {trained_before} steps before")


class Scaled(nn.Module):
    """Has a parameter of no dimension, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() * self.scale


def numbers_have_the_state_of_plain_pytorch(rank: int, world: int) -> None:
    """One rank has it. Others show it too, also where nothing else is in the optimizer."""

    def stepped(model: Scaled, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
        return optimizer

    both = (("scale",), ("weight", "scale"))
    for (name, kind), parts, elementwise in thinned(product(KINDS.items(), both, (None, False)), 3):
        plain = Scaled()
        expected = stepped(plain, kind([getattr(plain, part) for part in parts], lr=0.1)).state_dict()
        what = f"{name} {parts} {elementwise}"
        models = [fully_shard(Scaled()) for _ in range(2)]
        optimizer, again = (
            fully_shard_optimizer(kind([getattr(one, part) for part in parts], lr=0.1), elementwise=elementwise)
            for one in models
        )
        stepped(models[0], optimizer)
        assert_same(whole(optimizer.state_dict()["state"]), expected["state"], what)
        again.load_state_dict(copy.deepcopy(expected))
        assert_same(whole(again.state_dict()["state"]), expected["state"], f"{what} loaded")
        stepped(models[1], again)
        full = get_optimizer_state_dict(models[0], optimizer, options=FULL)["state"]
        assert_same(full, {parts[number]: values for number, values in expected["state"].items()}, what)


def states_find_their_rows_in_models_of_other_units(rank: int, world: int) -> None:
    pair = ours()
    train(*pair)
    for sharding in ways():
        model = built(5)
        fully_shard(model, **options_of(sharding))
        elementwise = False if sharding == HELD_AS_DTENSORS else None
        optimizer = fully_shard_optimizer(torch.optim.AdamW(groups_of(model), lr=0.01), elementwise=elementwise)
        optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
        assert_same(whole(optimizer.state_dict()), whole(pair[1].state_dict()), sharding)


def load_state_dict_takes_its_own_and_whole_states(rank: int, world: int) -> None:
    plain = built()
    reference = torch.optim.AdamW(groups_of(plain), lr=0.01)
    for _ in range(2):
        reference.zero_grad()
        plain(torch.ones(2, 5)).sum().backward()
        reference.step()
    for sharding in ways():
        _, optimizer = ours(sharding, seed=5)
        optimizer.load_state_dict(reference.state_dict())
        assert_same(whole(optimizer.state_dict()), reference.state_dict(), f"{sharding} whole")
        again = ours(sharding, seed=6)
        again[1].load_state_dict(optimizer.state_dict())
        assert_same(whole(again[1].state_dict()), reference.state_dict(), f"{sharding} own")


def models_take_tensors_of_equal_parts(rank: int, world: int) -> None:
    """As `distribute_tensor` makes them; their rows are not where the layout has them."""
    source, _ = theirs(seed=3)
    for sharding in ways():
        model, _ = ours(sharding, seed=4)
        model.load_state_dict(source.state_dict())
        assert_same(whole(dict(model.named_parameters())), whole(dict(source.named_parameters())), sharding)
        outputs = [one(torch.ones(2, 5)) for one in (model, source)]
        torch.testing.assert_close(*outputs)


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def checkpoints_of_plain_loops_are_those_of_fsdp2(rank: int, world: int) -> None:
    reference = theirs()
    train(*reference)

    def case(sharding: str) -> None:
        pair = ours(sharding)
        train(*pair)
        with shared_folder() as folder:
            for name, (model, optimizer) in (("ours", pair), ("theirs", reference)):
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
            made = {"ours": theirs(seed=5), "theirs": ours(sharding, seed=5)}
            if device_type() == "cpu":  # it wants a process group for CPUs
                weights, state = get_state_dict(*pair)
                dcp.async_save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/async").result()
                made["async"] = ours(sharding, seed=6)
            for name, (model, optimizer) in made.items():
                weights, state = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}")
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
                found = whole(list(get_state_dict(model, optimizer)))
                assert_same(found, whole(list(get_state_dict(*reference))), f"{sharding} {name}")

    each(case)


def optimizers_are_saved_by_number_with_every_rank_s_rows(rank: int, world: int) -> None:
    pair = ours()
    train(*pair)
    with shared_folder() as folder:
        dcp.save({"optim": pair[1].state_dict()}, checkpoint_id=folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.distcp"))
        assert size
        again = ours(seed=5)
        train(*again, steps=1)
        state = {"optim": again[1].state_dict()}
        dcp.load(state, checkpoint_id=folder)
        again[1].load_state_dict(state["optim"])
        assert_same(whole(again[1].state_dict()), whole(pair[1].state_dict()), "by number")


# -- tensors -----------------------------------------------------------------------------------------------------------


def weights_go_to_every_rank_and_nowhere_else(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate

    model, _ = ours()
    weight = model.first.weight
    everywhere = weight.redistribute(placements=[Replicate()])
    assert torch.equal(everywhere.to_local(), weight.full_tensor())
    with pytest.raises(EngineStateError, match="redistribute"):
        weight.redistribute(placements=[Shard(1)])
    assert weight.placements == (Shard(0),)


def arithmetic_with_tensors_of_equal_parts_finds_their_rows(rank: int, world: int) -> None:
    model, _ = ours()
    other, _ = theirs(seed=3)
    name = "middle.0.weight"
    weight, partner = dict(model.named_parameters())[name], dict(other.named_parameters())[name]
    with torch.no_grad():
        expected = weight.full_tensor() + partner.full_tensor()
        assert torch.equal((weight + partner).full_tensor(), expected)
        weight.add_(partner)
        assert torch.equal(weight.full_tensor(), expected)
        with pytest.raises(EngineStateError, match="add_"):
            partner.add_(weight)


def a_pickled_optimizer_state_is_refused_with_what_to_save(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(5, 3))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    if world == 1:  # which has whole tensors
        return
    with pytest.raises(
        EngineStateError, match=r"^gradient or optimizer state.* of unit Linear.*get_optimizer_state_dict\("
    ):
        torch.save(optimizer.state_dict(), io.BytesIO())
    with pytest.raises(EngineStateError, match=r"full_state_dict\(module\)"):
        torch.save(model.state_dict(), io.BytesIO())


CASES = [
    a_pickled_optimizer_state_is_refused_with_what_to_save,
    state_dicts_of_optimizers_look_as_with_fsdp2,
    state_is_a_view_of_what_the_optimizer_has,
    get_state_dict_gives_what_it_gives_of_fsdp2,
    optimizers_without_a_step_have_the_same_state_dicts,
    set_state_dict_takes_what_get_state_dict_gave,
    flat_optimizer_states_are_taken,
    ranks_without_any_rows_show_what_the_others_do,
    groups_with_other_options_show_their_own_state,
    muon_shows_its_state,
    numbers_have_the_state_of_plain_pytorch,
    states_find_their_rows_in_models_of_other_units,
    load_state_dict_takes_its_own_and_whole_states,
    models_take_tensors_of_equal_parts,
    checkpoints_of_plain_loops_are_those_of_fsdp2,
    optimizers_are_saved_by_number_with_every_rank_s_rows,
    weights_go_to_every_rank_and_nowhere_else,
    arithmetic_with_tensors_of_equal_parts_finds_their_rows,
]
ON_TWO_AXES = [checkpoints_of_plain_loops_are_those_of_fsdp2]  # which get and set states
AT_NIGHT = [get_state_dict_gives_what_it_gives_of_fsdp2, set_state_dict_takes_what_get_state_dict_gave]
WORLDS = {**in_turns((3, 2), CASES), 4: ON_TWO_AXES, **at_night({4: [*ON_TWO_AXES, *AT_NIGHT]})}


@by_world(WORLDS)
def test_state_dicts_are_those_of_fsdp2(world: int, case: Any) -> None:
    check(WORLDS, world, case)
