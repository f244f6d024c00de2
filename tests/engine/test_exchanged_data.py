"""`parameter.data = value` leaves alone what was taken of the parameter before, as where the memory of a tensor is exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Average:
    """As programs write it: weights are exchanged for the average and back, by reference."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shadow = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, parameter in self.module.named_parameters():
            self.shadow[name] = 0.5 * self.shadow[name] + 0.5 * parameter.data

    def apply(self) -> None:
        for name, parameter in self.module.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def restore(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.data = self.backup[name]
        self.backup = {}


def pair(sharding: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    module = copy.deepcopy(plain)
    fully_shard(module[0], sharding=sharding)
    return plain, fully_shard(module, sharding=sharding)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def a_backup_by_reference_is_restored(rank, world):
    for sharding in STRATEGIES:
        modules = pair(sharding)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in modules]
        fully_shard_optimizer(optimizers[1])
        averages = [Average(module) for module in modules]
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            results = []
            for module, optimizer, average in zip(modules, optimizers, averages, strict=True):
                module(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update()
                average.apply()
                with torch.no_grad():
                    results.append(module(x))
                average.restore()
                with torch.no_grad():
                    results.append(module(x))
            torch.testing.assert_close(results[2], results[0], msg=f"{sharding}: averaged, step {step}")
            torch.testing.assert_close(results[3], results[1], msg=f"{sharding}: restored, step {step}")


def what_was_taken_before_keeps_its_values(rank, world):
    for sharding in STRATEGIES:
        plain, module = pair(sharding)
        for one in (plain, module):
            weight = one[0].weight
            before = whole(weight).clone()
            taken = [weight.data, weight.detach(), weight.data.detach(), one.state_dict()["0.weight"]]
            taken[1].data = torch.full_like(before, 7.0)  # of that alone
            assert torch.equal(whole(taken[1]), torch.full_like(before, 7.0)), sharding
            assert torch.equal(whole(weight), before), sharding
            weight.data = torch.ones_like(before)
            for tensor in (taken[0], *taken[2:]):
                assert torch.equal(whole(tensor), before), sharding
            taken[0].zero_()
            assert torch.equal(whole(weight), torch.ones_like(before)), sharding
            new = weight.data
            weight.data = new  # what it is
            with torch.no_grad():
                weight.mul_(2)
            assert torch.equal(whole(new), torch.full_like(before, 2.0)), sharding


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda data: data.view(-1),
    "rows": lambda data: data[:2],
    "row": lambda data: data[1],
    "transposed": lambda data: data.t(),
    "chunk": lambda data: data.chunk(2)[0],
    "flattened": lambda data: data.detach().flatten(),
}


def views_of_what_was_taken_keep_their_values(rank, world):
    for sharding in STRATEGIES:
        for name, view in VIEWS.items():
            for square in (True, False):
                torch.manual_seed(0)
                module = fully_shard(nn.Linear(6, 6 if square else 4), sharding=sharding)
                weight, case = module.weight, f"{sharding} {name} {square}"
                with torch.no_grad():
                    before, taken = view(weight.full_tensor()).clone(), [view(weight.data), view(weight)]
                    weight.data = torch.ones(weight.shape)
                    for tensor in taken:
                        assert torch.equal(whole(tensor), before), case
                        tensor.fill_(3.0)
                    assert torch.equal(whole(weight), torch.ones(weight.shape)), case


def views_of_its_own_data_may_be_assigned(rank, world):
    for sharding in STRATEGIES:
        for change in (Tensor.t, lambda data: data[:1].expand(6, 6), lambda data: data.as_strided((6, 6), (1, 6))):
            torch.manual_seed(0)
            module = fully_shard(nn.Linear(6, 6), sharding=sharding)
            expected = change(module.weight.full_tensor()).clone()
            module.weight.data = change(module.weight.data)
            assert torch.equal(whole(module.weight), expected), sharding


def a_converted_parameter_is_exchanged_as_any(rank, world):
    for sharding in STRATEGIES:
        _, module = pair(sharding)
        module.double()
        weight = module[0].weight
        before, taken = whole(weight).clone(), [weight.data, weight.detach(), module.state_dict()["0.weight"]]
        weight.data = torch.ones_like(before)
        assert torch.equal(whole(weight), torch.ones_like(before)), sharding
        for tensor in taken:
            assert torch.equal(whole(tensor), before), sharding
        weight.data = taken[0]
        assert torch.equal(whole(weight), before), sharding


def nothing_is_kept_of_what_was_taken(rank, world):
    _, module = pair("optim_grads_params")
    parameter = context_of(module).groups[0].entries[0].sharded
    kept = parameter.data
    for _ in range(10):
        parameter.detach()
        module.state_dict()
    assert list(parameter.taken.values()) == [kept]
    parameter.data = torch.zeros(parameter.shape)
    assert not parameter.taken


WORLDS = dict.fromkeys(
    (1, 2, 3),
    (
        a_backup_by_reference_is_restored,
        what_was_taken_before_keeps_its_values,
        views_of_what_was_taken_keep_their_values,
        views_of_its_own_data_may_be_assigned,
        a_converted_parameter_is_exchanged_as_any,
        nothing_is_kept_of_what_was_taken,
    ),
)


@by_world(WORLDS)
def test_exchanged_data(world, case):
    check(WORLDS, world, case)
