"""What is looked at: one rank of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import (
    around_backward,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    sharded_parameters,
    units,
    unshard,
)
from lightning_mfsdp.engine import MixedPrecisionPolicy
from tests.engine.internals import ParameterGroup, context_of
from tests.fuzzing.description import Description, Micro
from tests.fuzzing.model import BlockModule, Net, seeded
from tests.fuzzing.running import LIMIT, Event, Run, make_optimizer


class EngineRun(Run):
    """One rank of the engine, in a loop of one's own. A Trainer brings model and optimizer itself."""

    def __init__(self, case: Description, rank: int, mesh: Any, *, builds: bool = True) -> None:
        super().__init__(case, [rank])
        self.mesh = mesh
        if builds:
            self.model = seeded(case, seed=rank)
            shard_blocks(case, self.model, mesh)
            if case.configuration.late_root:
                with no_sync(next(block for block in self.model.blocks if block.spec.unit)):
                    self.go_back_early()
            fully_shard(self.model, mesh, **sharding_options(case))
            if case.model.judge:
                for module in (*self.model.judges[0], self.model.judges[0]):
                    fully_shard(module, mesh, **sharding_options(case))
            made = make_optimizer(case, self.model.parameters())
            self.optimizer = fully_shard_optimizer(
                made, elementwise=False if case.configuration.keeps_dtensors else None
            )
            self.start()

    def around_backward(self) -> Any:
        judges = self.model.judges if self.case.model.judge and self.case.program.loop == "raw" else ()
        return around_backward(self.model, *judges)

    def holding_back(self, sync: str) -> Any:
        return nullcontext() if sync == "all" else no_sync(self.model, keep_sharded=sync == "keep_sharded")

    def clip_norm(self) -> Tensor:
        return clip_grad_norm_(self.model, LIMIT)

    def unsharding(self, module: nn.Module) -> Any:
        return unshard(module)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with unshard(self.model, writeback=True):
            yield

    def gradients(self) -> dict[str, tuple[int, Tensor | None]]:
        self._look()
        return {
            view.name: (view.rows.start, None if view.grad is None else view.grad.detach().clone())
            for view in sharded_parameters(self.model)
            if view.local.numel()
        }

    def _look(self) -> None:
        """What is held back shows as a gradient until somebody looks: whether any rank used the parameter is known after that.

        And what a backward left of which no unit heard is reduced when a program reads it.
        """
        for parameter in self.model.parameters():
            parameter.grad  # noqa: B018
        for view in sharded_parameters(self.model):
            if view.grad is not None:
                view.grad.detach()

    def shown_gradients(self) -> dict[str, tuple[int, Tensor | None]]:
        self._look()
        views = {view.name: view for view in sharded_parameters(self.model)}
        found: dict[str, tuple[int, Tensor | None]] = {}
        for name, parameter in self.model.named_parameters():
            grad, view = parameter.grad, views[name]
            if isinstance(grad, DTensor):
                found[name] = (view.rows.start, grad.to_local().detach().clone())
            elif view.local.numel():
                found[name] = (0, None if grad is None else grad.detach().clone())
        return found

    def finish(self) -> None:
        views = sharded_parameters(self.model)
        seen = {view.name: (view.rows.start, view.main.detach().clone()) for view in views}
        self.events.append(Event("weights", seen))
        with unshard(self.model):
            whole = {name: (0, p.detach().clone()) for name, p in self.model.named_parameters()}
        self.events.append(Event("whole weights", whole))
        rows = {id(one): view for view in views for one in (view.local, view.dtensor)}
        state = {}
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        for parameter, values in optimizer.state.items():
            view = rows[id(parameter)]
            for key, value in values.items():
                here = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
                # A rank without rows steps nothing, so its counters say nothing.
                if view.local.numel():
                    state[f"{view.name}: {key}"] = (view.rows.start if here.dim() else 0, here.detach().clone())
        self.events.append(Event("optimizer state", state))
        self.model.zero_grad()
        self.optimizer.zero_grad()
        self.evaluate((9, 0), Micro())
        self.note("gradient memory", bytes=self.memory())
        context = context_of(self.model)
        most = sum(most_reductions(self.case, group) for unit in context.units for group in unit.groups)
        self.note("reductions", too_many=max(0, context.reductions.started - most))

    def memory(self) -> int:
        """Of gradients that should have been given back, once a step is over. Whole ones that were held back keep theirs."""
        configuration = self.case.configuration
        whole = configuration.sharding in ("no_shard", "optim") or configuration.ranks == max(configuration.outer, 1)
        whole |= self.case.model.scale  # 0-D parameters are whole everywhere
        holds_back = any(micro.sync != "all" for step in self.case.program.steps for micro in step.micros)
        if whole and (holds_back or configuration.late_root):
            return 0
        # Nothing ends a forward without a backward, and where that left units out, the next may begin with one of them: no pass begins.
        leaves_out = any(block.dropped for block in self.case.model.blocks)
        if leaves_out and self.case.program.steps[-1].micros[-1].kind == "no_backward":
            return 0
        waiting = context_of(self.model).gradients
        return (
            0 if any(one.is_accumulating for one in waiting) else sum(unit.gradient_bytes for unit in units(self.model))
        )


def most_reductions(case: Description, group: ParameterGroup) -> int:
    """Of one group: one for each backward that communicates, and one for a look at what is held back."""
    reduces_early = group.placement.gradient  # under keep_sharded
    leaves_back = not reduces_early or case.configuration.outer > 1
    count, held_back = 0, case.configuration.late_root
    for step in case.program.steps:
        stale = 0
        for micro in step.micros:
            apart = micro.side in ("first", "last")
            backwards = {"no_backward": 0, "plain": 1, "two_forwards": 1, "stale": 1}.get(micro.kind, 2)
            backwards = (
                1 + apart if micro.kind in ("input_grad", "weight_grad", "rest_grad", "jvp", "plain") else backwards
            )
            stale += micro.kind == "stale"
            # Where a backward of what weights alone give is found out later, its gradients are reduced then.
            is_found_out = micro.side not in ("", "beside") and any(
                b.keeps in ("sum", "penalty") for b in case.model.blocks
            )
            if micro.sync == "all" or (micro.sync == "keep_sharded" and reduces_early) or is_found_out:
                count += backwards
            if backwards:
                held_back = micro.sync == "no_sync" or (micro.sync == "keep_sharded" and leaves_back)
        if step.takes_step and held_back:
            count, held_back = count + 1, False
        if stale:
            count, held_back = count + stale, False
    return count


def policy_of(case: Description) -> MixedPrecisionPolicy:
    configuration = case.configuration
    options: dict[str, Any] = {"keep_compute_shard": configuration.keeps_compute}
    if configuration.direct:
        options["direct_weight_gradients"] = True
    if configuration.comm:
        options["grad_comm_dtype"] = torch.bfloat16
    if configuration.precision == "float64":
        options |= {"main_params_dtype": None, "main_grads_dtype": torch.float64}
    elif configuration.precision == "mixed":
        options["compute_dtype"] = torch.bfloat16
    elif configuration.precision == "bfloat16":
        options["main_params_dtype"] = None
    return MixedPrecisionPolicy(**options)


def sharding_options(case: Description) -> dict[str, Any]:
    """For `fully_shard` and for a strategy alike."""
    configuration = case.configuration
    return {
        "sharding": configuration.sharding,
        "outer_sharding": configuration.outer_sharding,
        "policy": policy_of(case),
        "reshard_after_forward": {"yes": True, "no": False}.get(configuration.reshard, "auto"),
        "storage": "dynamic" if configuration.dynamic else "pooled",
        "offload": "optimizer" if configuration.offload else None,
    }


def shard_blocks(case: Description, model: Net, mesh: Any) -> None:
    """Units inside first, then neighbors, two by two if they are grouped."""
    options = sharding_options(case)
    blocks: list[BlockModule] = [block for block in dict.fromkeys(model.blocks) if block.spec.unit]
    for block in blocks:
        if block.spec.kind == "nested":
            fully_shard(block.inner, mesh, **options)
    together = 2 if case.configuration.grouped else 1
    for start in range(0, len(blocks), together):
        members = blocks[start : start + together]
        fully_shard(members[0] if len(members) == 1 else members, mesh, **options)
