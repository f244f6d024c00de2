"""Saves and restores what a resumed run needs, besides weights and optimizers, to compute the same numbers as one that was not stopped.

That is every rank's random state and the state of its loaders (Lightning keeps those of rank 0), and the gradients of a step that is not
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp._lightning_api import Trainer, TrainerFn, collect_rng_states, set_rng_states
from lightning_mfsdp.engine import has_gradient, reduce_pending, sharded_parameters
from lightning_mfsdp.engine.internals import placed_as

__all__ = [
    "GRADIENTS",
    "PendingGradients",
    "is_inside_a_step",
    "random_state",
    "rank_state",
    "restore_random_state",
    "set_whole_gradients",
    "take_loader_states",
]

GRADIENTS = "gradients"


def rank_state(
    checkpoint: Mapping[str, Any], module: nn.Module, device: torch.device, *, data_size: int, data_rank: int
) -> dict[str, Any]:
    """State that only this rank has: in Lightning's dictionary, random numbers, and inside a step the gradients that are not sharded.

    Args:
        checkpoint: As Lightning made it.
        module: Sharded.
        device: Of this rank.
        data_size: How many ranks have different batches.
        data_rank: Which of them this is.
    """
    gradients: dict[str, Tensor] = {}
    if is_inside_a_step(module.trainer):  # type: ignore[arg-type]
        for name, parameter in _unmanaged(module).items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().cpu()
    loaders = _fit_state(checkpoint).get("combined_loader")
    return {
        "random": random_state(device),
        "loaders": loaders,
        "gradients": gradients,
        "data_size": data_size,
        "data_rank": data_rank,
    }


def set_whole_gradients(module: nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
    """Set the gradients of parameters that are not sharded from a `rank_state`, or the mean of several."""
    means = mean_gradients(states)
    for name, parameter in _unmanaged(module).items():
        if name in means:
            parameter.grad = means[name].to(parameter)


def mean_gradients(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The mean, by parameter name, of the gradients in several of `rank_state`."""
    gradients: dict[str, list[Tensor]] = {}
    for state in states:
        for name, gradient in state.get("gradients", {}).items():
            gradients.setdefault(name, []).append(gradient)
    return {name: torch.stack(several).mean(0) for name, several in gradients.items()}


def _unmanaged(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are whole on every rank: ignored ones."""
    sharded = {id(view.dtensor) for view in sharded_parameters(module)}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in sharded}


def take_loader_states(checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put the states of this rank's loaders where Lightning reads them."""
    if state["loaders"] is not None:
        _fit_state(checkpoint)["combined_loader"] = state["loaders"]


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint["loops"]["fit_loop"]["state_dict"]
    return state


def random_state(device: torch.device) -> dict[str, Any]:
    """Random numbers of this process and its device; only tensors and plain values, so it loads with `weights_only`."""
    state = collect_rng_states(include_cuda=False)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `rank_state` returned as "random"."""
    state = dict(state)
    on_device = state.pop("device", None)
    if on_device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_device, device)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    set_rng_states(state)


def is_inside_a_step(trainer: Trainer) -> bool:
    """Whether some but not all microbatches of an optimizer step have been run, as far as the Trainer accumulates."""
    if (
        trainer.state.fn != TrainerFn.FITTING
        or trainer.sanity_checking
        or not trainer.lightning_module.automatic_optimization
    ):
        return False
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.current
    if progress.ready == progress.processed:
        return loop._should_accumulate()
    return bool(progress.processed % trainer.accumulate_grad_batches)  # a batch has begun


class PendingGradients:
    """Gradients of the microbatches so far, as another value that checkpoints keep for each parameter.

    To be saved as rows they are reduced, also where `no_sync` defers that: the run that continues and the one that is resumed then add the
    same numbers in the same order.

    Args:
        module: Sharded.
        at_first_step: Is called with what must be done before the first training step.
    """

    def __init__(self, module: nn.Module, at_first_step: list[Callable[[], None]]) -> None:
        self._module = module
        self._at_first_step = at_first_step

    def rows(self) -> dict[str, Tensor]:
        """The gradients of all parameters that have one, on this rank or elsewhere; optimizers skip the others. Collective."""
        reduce_pending(self._module)
        return {
            view.name: torch.zeros_like(view.main, dtype=view.local.grad_dtype)
            if view.grad is None
            else view.grad.detach()
            for view in sharded_parameters(self._module)
            if has_gradient(view.local)
        }

    def load_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Make them the parameters' gradients when training begins: Lightning clears earlier ones."""
        if rows:
            self._at_first_step.append(lambda: self._set(rows))

    def _set(self, rows: Mapping[str, Tensor]) -> None:
        for view in sharded_parameters(self._module):
            own_rows = rows.get(view.name)
            if own_rows is not None:
                rows_on_device = own_rows.to(view.local.device, view.local.grad_dtype)
                view.dtensor.grad = placed_as(rows_on_device, view.dtensor)
