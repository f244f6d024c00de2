"""Regions of a plain module: numbers to the bit, names, memory, random numbers, precision, in one process and without sharding."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.recompute import Recompute, apply_recompute, remove_recompute
from lightning_mfsdp.recompute.region import region_of
from tests.recompute.counting import Counting
from tests.recompute.models import DIM, Layer, Stack, batch, build, equal, loss_of, steps

CONFIGS = {
    "each layer": Recompute(),
    "pairs": Recompute(num_layers=2),
    "three and one": Recompute(num_layers=3),
    "all": Recompute(num_layers=4),
    "every second pair": Recompute(num_layers=2, every_nth=2),
    "first three": Recompute(method="block", num_layers=3),
    "parts": Recompute(method="selective", modules=["*.up", "*.down"]),
    "products kept": Recompute(method="selective", save_ops=["matmul"]),
    "tanh kept": Recompute(method="selective", save_ops=["aten.tanh"]),
    "on the host": Recompute(offload=True),
    "pairs on the host": Recompute(num_layers=2, offload=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_equal_to_the_bit(name) -> None:
    """With dropout, several forwards, float32 and bfloat16, by autocast and without."""
    for autocast, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        found = []
        for config in (Recompute(method="none"), CONFIGS[name]):
            model = build().to(dtype)
            keys = list(model.state_dict())
            apply_recompute(model, config)
            assert list(model.state_dict()) == keys
            assert [key for key, _ in model.named_parameters()] == keys
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # three forwards, then their backwards
                losses = [model(batch(step).to(dtype)).float().square().mean() for step in range(3)]
            for one in reversed(losses):
                one.backward()
            found.append(losses + [parameter.grad for parameter in model.parameters()])
        assert equal(*found), (autocast, dtype)


def test_random_numbers_go_on_as_if_nothing_was_computed_again() -> None:
    """Both during the backward and after it."""
    states = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=3)):
        model = build()
        apply_recompute(model, config)
        steps(model, 2)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_each_layer_is_computed_twice_and_kept_operators_once() -> None:
    """Also in chunks, where the last layer asks all before it."""
    tanh, product = torch.ops.aten.tanh.default, torch.ops.aten.addmm.default
    expected = {
        (tanh, "each layer"): 8,
        (tanh, "pairs"): 8,
        (tanh, "all"): 8,
        (tanh, "first three"): 7,
        (tanh, "products kept"): 8,
        (tanh, "tanh kept"): 4,
        (product, "products kept"): 10,  # eight in layers, two around them
        (product, "pairs"): 18,
    }
    for (operator, name), count in expected.items():
        model = build()
        apply_recompute(model, CONFIGS[name])
        with Counting(operator) as counting:
            loss_of(model, batch(0)).backward()
        assert counting.count == count, (operator, name, counting.count)


def kept_bytes(model: nn.Module) -> int:
    """All that lives between forward and backward because of it, counted once."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, batch(0, rows=128))
    loss.backward()
    return sum(size for address, size in found.items() if address not in weights)


def test_memory_falls_with_what_is_computed_again() -> None:
    order = ["every second pair", "first three", "each layer", "pairs", "all"]
    found = []
    for config in (Recompute(method="none"), *(CONFIGS[name] for name in order)):
        model = build(layers=4, width=8)
        apply_recompute(model, config)
        found.append(kept_bytes(model))
    assert found == sorted(found, reverse=True), found
    assert all(later < earlier for earlier, later in itertools.pairwise(found)), found
    inputs = 4 * 128 * DIM
    assert found[3] - found[4] == 2 * inputs, "pairs keep every second input"
    assert found[3] - found[5] == 3 * inputs, "all together keep the first one"


class Watched(Layer):
    """Remembers its input, weakly."""

    seen: weakref.ref[Tensor]

    def forward(self, x: Tensor, factor: float = 1.0, *, mask: Tensor) -> Tensor:
        self.seen = weakref.ref(x)
        return super().forward(x, factor, mask=mask)


def test_inputs_in_host_memory_are_let_go() -> None:
    """On a CPU it is a copy, and the original is gone by the end of the forward."""
    for config, kept in ((Recompute(), 4), (Recompute(offload=True), 0), (Recompute(num_layers=2, offload=True), 0)):
        model = build()
        model.layers = nn.ModuleList(Watched() for _ in range(4))
        apply_recompute(model, config)
        loss = loss_of(model, batch(0))
        gc.collect()
        alive = [layer.seen() is not None for layer in model.layers]
        assert sum(alive) == kept, (config, alive)
        loss.backward()


def test_nothing_is_kept_alive_by_regions() -> None:
    """A model goes when its last name goes, and a forward whose graph is dropped leaves nothing, chunks and all."""
    for config in CONFIGS.values():
        model = build()
        apply_recompute(model, config)
        seen: list[Any] = []
        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, output, seen=seen: seen.append(weakref.ref(args[0])))
        gc.disable()
        try:
            loss = loss_of(model, batch(0))
            del loss
            assert not any(reference() is not None for reference in seen), config
            loss_of(model, batch(1)).backward()
            assert not any(reference() is not None for reference in seen), config
            gone = weakref.ref(model.layers[0].up.weight)
            del model, layer
            assert gone() is None, config
        finally:
            gc.enable()


def test_a_copy_of_a_model_computes_its_own_weights_again() -> None:
    plain = steps(build())
    model = build()
    apply_recompute(model, Recompute(num_layers=2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert equal(steps(twin), plain)
    assert region_of(twin.layers[0]) is not region_of(model.layers[0])
    assert region_of(twin.layers[0]).config == Recompute(), "each layer by itself"
    apply_recompute(twin, Recompute(num_layers=2))
    assert equal(steps(twin), plain)
    assert region_of(twin.layers[0]).is_chunked
    with pytest.raises(RuntimeError, match="its forward was copied without its module"):
        copy.deepcopy(region_of(model.layers[0]))


def test_a_backward_may_come_twice_and_in_parts() -> None:
    for config in (Recompute(), Recompute(num_layers=3), Recompute(num_layers=4, offload=True)):
        found = []
        for chosen in (Recompute(method="none"), config):
            model = build()
            apply_recompute(model, chosen)
            torch.manual_seed(0)
            x = batch(0).requires_grad_()
            loss = loss_of(model, x)
            (first,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([first, x.grad, *(parameter.grad for parameter in model.parameters())])
        assert equal(*found), config


def test_without_gradients_and_without_anything_to_train_forwards_run_as_ever() -> None:
    model = build().eval()
    apply_recompute(model, Recompute(num_layers=2))
    with torch.no_grad():
        plain = model(batch(0))
    with torch.inference_mode():
        assert torch.equal(model(batch(0)), plain)
    model.requires_grad_(False)
    assert torch.equal(model(batch(0)), plain)
    assert not model(batch(0)).requires_grad


class TwoResults(nn.Module):
    """Passes on two tensors, of which only one is the next layer's first argument, and a number on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.side = nn.Linear(DIM, DIM)

    def forward(self, side: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = nn.functional.dropout(torch.tanh(self.linear(x) + side), 0.2)
        return torch.sin(self.side(x)), x, x.square().mean()


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoResults() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        side, total = x * 0.5, x.new_zeros(())
        for layer in self.layers:
            side, x, extra = layer(side, x)
            total = total + extra
        return torch.cat([side.flatten(), x.flatten(), total[None]])


def test_several_results_are_linked_each_to_its_place() -> None:
    found = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=2), Recompute(num_layers=4)):
        torch.manual_seed(0)
        model = Sides()
        apply_recompute(model, config)
        found.append(steps(model))
    assert all(equal(one, found[0]) for one in found)


class Between(Stack):
    """Something happens between layers."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        mask = torch.ones(DIM)
        for layer in self.layers:
            x = self.between(layer(x, mask=mask))
        return self.out(x)


def test_layers_that_do_not_follow_one_another_begin_anew_with_a_warning() -> None:
    for between in (torch.sin, lambda x: x + 1, lambda x: x.clone(), lambda x: x.add_(1.0)):
        torch.manual_seed(0)
        plain = Between(between)
        torch.manual_seed(0)
        model = Between(between)
        apply_recompute(model, Recompute(num_layers=4))
        with pytest.warns(UserWarning, match=r"layers\.1 is given no tensor that layers\.0 returned") as caught:
            found = steps(model)
        assert len(caught) == 1, "once"
        assert equal(found, steps(plain))


def test_hooks_run_once_and_what_they_change_counts() -> None:
    """Also hooks that change what a layer is called with and what it returns."""
    found = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=2)):
        model = build()
        calls: list[str] = []

        def before(module: nn.Module, args: Any, kwargs: Any, calls: list[str] = calls) -> Any:
            calls.append("before")
            return (args[0] * 2, *args[1:]), kwargs

        def after(module: nn.Module, args: Any, output: Tensor, calls: list[str] = calls) -> Tensor:
            calls.append("after")
            return output + 1

        for layer in model.layers:
            layer.register_forward_pre_hook(before, with_kwargs=True)
            layer.register_forward_hook(after)
        apply_recompute(model, config)
        if config.num_layers:
            with pytest.warns(UserWarning, match="is given no tensor that"):
                found.append(steps(model, 1))
        else:
            found.append(steps(model, 1))
        assert calls == ["before", "after"] * 4
    assert all(equal(one, found[0]) for one in found)


def test_a_layer_that_is_called_several_times_and_one_that_is_left_out() -> None:
    class Program(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, mask = self.inputs(x), torch.ones(DIM)
            for index in (0, 1, 1, 3, 0, 1, 2):
                x = self.layers[index](x, mask=mask)
            return self.out(x)

    found = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=2), Recompute(num_layers=4)):
        torch.manual_seed(0)
        model = Program()
        apply_recompute(model, config)
        found.append(steps(model))
    assert all(equal(one, found[0]) for one in found)


def test_a_region_within_a_checkpoint_and_a_checkpoint_within_a_region() -> None:
    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, mask = self.inputs(x), torch.ones(DIM)
            for first in (0, 2):
                x = checkpoint(self.pair, x, mask, first, use_reentrant=False)
            return self.out(x)

        def pair(self, x: Tensor, mask: Tensor, first: int) -> Tensor:
            for layer in self.layers[first : first + 2]:
                x = layer(x, mask=mask)
            return x

    class Inner(Layer):
        def forward(self, x: Tensor, factor: float = 1.0, *, mask: Tensor) -> Tensor:
            return x + checkpoint(super().forward, x, factor, mask=mask, use_reentrant=False)

    def inner() -> Stack:
        model = build()
        model.layers = nn.ModuleList(Inner() for _ in range(4))
        return model

    for make in (Outer, inner):
        found = []
        for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=2), Recompute(offload=True)):
            torch.manual_seed(0)
            model = make()
            apply_recompute(model, config)
            found.append(steps(model))
        assert all(equal(one, found[0]) for one in found), make


def test_the_default_dtype_is_that_of_the_forward() -> None:
    """As "*-true" precisions have it around a forward, and not around a backward."""

    class Makes(Layer):
        def forward(self, x: Tensor, factor: float = 1.0, *, mask: Tensor) -> Tensor:
            return super().forward(x * torch.linspace(0.5, 1.5, DIM), factor, mask=mask)

    found = []
    for config in (Recompute(method="none"), Recompute(), Recompute(num_layers=2)):
        model = build()
        torch.manual_seed(0)
        model.layers = nn.ModuleList(Makes() for _ in range(4))
        model.bfloat16()
        apply_recompute(model, config)
        torch.set_default_dtype(torch.bfloat16)
        try:
            torch.manual_seed(1)
            loss = model(batch(0).bfloat16()).square().mean()
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(equal(one, found[0]) for one in found)


def test_removing_regions_gives_back_what_was_there() -> None:
    model = build()
    plain = steps(build())
    for config in CONFIGS.values():
        apply_recompute(model, config)
        remove_recompute(model)
        assert not any("forward" in vars(module) or region_of(module) for module in model.modules())
    assert equal(steps(model), plain)
