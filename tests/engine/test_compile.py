"""Compilers that look into a sharded module stop at the engine's hooks and compile what is inside."""

from __future__ import annotations

import torch

from lightning_mfsdp.engine import fully_shard
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, inputs, loss_of, plain_chain, sharded_chain, train
from tests.helpers.pairwise import pairwise


def compiled_modules_train_alike(rank, world):
    plain = sharded_chain(layers=2)
    expected = torch.stack(train(plain, adamw(plain), range(4), rank))
    for what, backend in pairwise(("units in place", "root in place", "root"), ("eager", "aot_eager"), together=1):
        torch.compiler.reset()
        model = plain_chain(layers=2)
        if what == "units in place":
            for layer in model.layers:
                layer.compile(backend=backend)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if what == "root in place":
            model.compile(backend=backend)
        called = torch.compile(model, backend=backend) if what == "root" else model
        optimizer, losses = adamw(model), []
        for step in range(4):
            loss = loss_of(called, inputs(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(torch.stack(losses), expected, msg=f"{what} {backend}")


WORLDS = {2: (compiled_modules_train_alike,)}


@by_world(WORLDS)
def test_compilation(world, case):
    check(WORLDS, world, case)
