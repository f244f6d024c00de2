"""Frozen packed weights under adapters: they are sharded as bytes, and train as they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MixedPrecisionPolicy
from lightning_mfsdp.base.errors import EngineStateError, ShardingError
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.state.index import ParameterIndex
from lightning_mfsdp.checkpoint.state.model import load_model
from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer, sharded_parameters, unshard_model
from tests.engine.packed import Adapted, Beside, Nibbles, packed
from tests.helpers.distributed import run_distributed

KINDS = ("inside", "beside", "floats")
STEPS = 3
PLACE = locate("a checkpoint")  # for messages


def built(kind: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(kind) for _ in range(3)))


def batches() -> Tensor:
    return torch.randn(STEPS, 12, 16, generator=torch.Generator().manual_seed(1))


def weights_of(model: nn.Sequential) -> list[Tensor]:
    return [block.base.weight.dequantize() for block in model]  # type: ignore[union-attr, operator]


def trained(model: nn.Sequential, rank: int, world: int) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), []
    if world > 1:
        fully_shard_optimizer(optimizer)
    for batch in batches():
        loss = model(batch[rank::world]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plainly(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    model = built(kind).to("cpu")
    return trained(model, 0, 1), weights_of(model)


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def of_one_kind(rank: int, world: int, kind: str, sharding: str) -> dict[str, Any]:
    model = shard(built(kind, seed=rank), sharding=sharding)  # every rank has its own values; those of rank 0 count
    losses = torch.stack(trained(model, rank, world))
    torch.distributed.all_reduce(losses)
    frozen = [view for view in sharded_parameters(model) if not view.requires_grad]
    rows = sum(view.main.nbytes for view in frozen)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    unshard_model(model)
    return {
        "losses": list(losses / world),
        "weights": weights_of(model),
        "dtypes": {view.main.dtype for view in frozen},
        "rows": rows,
        "shapes": shapes,
        "kinds": [(type(block.base), type(block.base.weight)) for block in model],
        "names": list(model.state_dict()),
    }


def of_all_kinds(rank: int, world: int, sharding: str) -> dict[str, Any]:
    return {kind: of_one_kind(rank, world, kind, sharding) for kind in KINDS}


@pytest.mark.parametrize(("world", "sharding"), [(3, "optim_grads_params"), (2, "optim_grads"), (2, "no_shard")])
def test_train_as_in_one_process_with_the_values_of_the_first_rank(world: int, sharding: str) -> None:
    results = run_distributed(of_all_kinds, world, sharding)
    for kind in KINDS:
        losses, weights = plainly(kind)
        plain = built(kind).to("cpu")
        for found in (result[kind] for result in results):
            torch.testing.assert_close(found["losses"], losses)
            assert all(map(torch.equal, found["weights"], weights))
            assert found["dtypes"] == {torch.uint8}
            assert found["kinds"] == [(type(block.base), type(block.base.weight)) for block in plain]
            assert found["names"] == list(plain.state_dict())
        held = [result[kind]["rows"] for result in results]
        bytes_in_all = 3 * (16 * 8 + (64 + 16 if kind == "inside" else 0))
        assert sum(held) == bytes_in_all * (world if sharding == "no_shard" else 1)


def keep_output(model: nn.Sequential, kept: list[Tensor]) -> None:
    """Have a hook keep the output of a layer, whose block returns something else."""
    model[1].base.register_forward_hook(lambda *arguments: kept.append(arguments[2]))  # type: ignore[union-attr, operator]


def of_other_programs(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for kind in KINDS:
        model = shard(built(kind), policy=policy)
        trained(model, rank, world)
        unshard_model(model)
        found[f"{kind} in bfloat16"] = weights_of(model)
        # What a hook keeps leads to a backward that touches no result.
        model, kept = shard(built(kind)), list[Tensor]()
        keep_output(model, kept)
        for batch in batches():
            model(batch)
            kept.pop().square().mean().backward()
        found[f"{kind} kept"] = [
            view.dtensor.grad.full_tensor() for view in sharded_parameters(model[0]) if view.requires_grad
        ]
        # Outside of a forward a weight is whole.
        weight: Any = model[2].base.weight if kind == "inside" else None
        found[f"{kind} outside"] = None if weight is None else weight.dequantize()
    return found


def test_keep_their_values_and_gradients_in_other_programs() -> None:
    results = run_distributed(of_other_programs, 2)
    for kind in KINDS:
        model, kept = built(kind).to("cpu"), list[Tensor]()
        keep_output(model, kept)
        for batch in batches():
            model(batch)
            kept.pop().square().mean().backward()
        gradients = [p.grad for p in model[0].parameters() if p.requires_grad]
        for found in results:
            assert all(map(torch.equal, found[f"{kind} in bfloat16"], weights_of(model)))
            torch.testing.assert_close(found[f"{kind} kept"], gradients)
            if kind == "inside":
                assert torch.equal(found[f"{kind} outside"], weights_of(model)[2])


def tied_and_loaded(rank: int, world: int) -> dict[str, Any]:
    model = built("inside")
    model[1].base.weight = model[0].base.weight  # type: ignore[union-attr]
    tied = fully_shard(model)
    before = tied(batches()[0]).detach()
    rows = len([view for view in sharded_parameters(tied) if not view.requires_grad])
    unshard_model(tied)
    source, other = shard(built("beside")), shard(built("beside", seed=5))
    lengths = {len(value) for name, value in source.state_dict().items() if "quant_state" in name}
    other.load_state_dict(source.state_dict(), strict=False)
    state = source.state_dict()
    name = next(name for name in state if "quant_state" in name)
    text = bytes(state[name].tolist()).replace(b'"shape": [', b'"shape": [1')
    with pytest.raises(
        ValueError,
        match=r"the checkpoint has a packed weight of shape \[1\d+, \d+\] and not \[\d+, \d+\]; load it into",
    ):
        other.load_state_dict({**state, name: torch.tensor(list(text), dtype=torch.uint8)}, strict=False)
    return {
        "rows": rows,
        "same": torch.equal(tied(batches()[0]), before),
        "lengths": lengths,
        "offsets": [
            (a.base.weight.quant_state.offset, b.base.weight.quant_state.offset)
            for a, b in zip(source, other, strict=True)
        ],
    }


def test_ties_stay_and_states_beside_are_loaded() -> None:
    for found in run_distributed(tied_and_loaded, 2):
        assert found["rows"] == 2
        assert found["same"]
        assert found["lengths"] == {512}
        assert all(torch.equal(*pair) for pair in found["offsets"])


def loaded_with_another_recipe(rank: int, world: int) -> dict[str, Any]:
    source, other = shard(built("inside")), shard(built("inside", seed=5))
    state = source.state_dict()
    recipes = [name for name in state if name.endswith("recipe")]
    load_model(PLACE, state, ParameterIndex(other), strict=True)
    same = [torch.equal(a, b) for a, b in zip(weights_of(source), weights_of(other), strict=True)]
    text = bytes(state[recipes[1]].tolist())
    text = text.replace(b"[16, 16]", b"[8, 32]").replace(b"float32 [16, 1]", b"bfloat16 [32, 1]")
    changed = {**state, recipes[1]: torch.tensor(list(text.ljust(2048)[:2048]), dtype=torch.uint8)}
    messages = []
    for load in (
        lambda: load_model(PLACE, changed, ParameterIndex(other), strict=True),
        lambda: other.load_state_dict(changed),
    ):
        with pytest.raises(ValueError, match="packed weight") as error:
            load()
        messages.append(str(error.value))
    del changed[recipes[1]]  # as an older version has saved it
    other.load_state_dict(changed, strict=False)
    return {"recipes": recipes, "same": same, "messages": messages}


def test_bytes_of_another_recipe_are_refused_by_name() -> None:
    for found in run_distributed(loaded_with_another_recipe, 2):
        assert found["recipes"] == [f"{number}.base.parametrizations.weight.0.recipe" for number in range(3)]
        assert all(found["same"])
        for message in found["messages"]:
            assert message == (
                "1.base.weight: the checkpoint has a packed weight of shape [8, 32] and not [16, 16], scale torch.bfloat16 [32, 1] and "
                "not torch.float32 [16, 1]; load it into a model whose weights were quantized alike"
            )


def refused(rank: int, world: int) -> list[str]:
    on_meta = {
        "inside": nn.Parameter(
            Nibbles(*(tensor.to("meta") for tensor in packed(torch.ones(16, 16)))), requires_grad=False
        ),
        "beside": Beside(torch.empty(16, 16, device="meta"), torch.uint8),
    }
    found = []
    for kind, weight in on_meta.items():
        model = built(kind)
        model[1].base.weight.requires_grad_()  # type: ignore[union-attr, operator]
        found.append(_message(model))
        model[1].base.weight = weight  # type: ignore[union-attr]
        found.append(_message(model))
    return found


def _message(model: nn.Module) -> str:
    with pytest.raises(ShardingError) as error:
        fully_shard(model)
    return str(error.value)


def test_what_is_trained_or_on_meta_is_refused() -> None:
    (found,) = run_distributed(refused, 1)
    for trained_message, meta_message in (found[:2], found[2:]):
        assert "parameter 1.base.weight is packed" in trained_message
        assert "requires a gradient" in trained_message
        assert "on the meta device" in meta_message


KEPT: list[Tensor] = []


class Keeping(Adapted):
    """Its forward keeps what no look at attributes and hooks finds."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(torch.tanh(self.b(self.a(x))))
        KEPT.append(x)
        return torch.tanh(x)


def kept_elsewhere(rank: int, world: int, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side_doors in ("find", "follow"):
        torch.manual_seed(0)
        model = shard(nn.Sequential(*(Keeping(kind) for _ in range(4))), side_doors=side_doors)
        try:
            found[side_doors] = _gradients_of_kept(model)
        except EngineStateError as error:
            found[side_doors] = str(error)
    return found


def _gradients_of_kept(model: nn.Module) -> list[Tensor]:
    for batch in batches():
        KEPT.clear()
        model(batch)
        KEPT[1].square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


@pytest.mark.parametrize("kind", ["inside", "beside"])
def test_a_backward_reads_no_weights_that_were_resharded(kind: str) -> None:
    """Libraries keep weights where autograd compares no versions."""
    results = run_distributed(kept_elsewhere, 2, kind)
    torch.manual_seed(0)
    gradients = _gradients_of_kept(nn.Sequential(*(Keeping(kind) for _ in range(4))).to("cpu"))
    for found in results:
        assert "a backward reads the packed weight" in found["find"]
        torch.testing.assert_close(found["follow"], gradients)
