"""What exact continuation needs beside weights and optimizers.

Every rank's random state and the state of its loaders (Lightning keeps those of rank 0), and the gradients of a step that is not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import reduce_pending, sharded_parameters
from lightning_mfsdp.lightning_api import Trainer, TrainerFn, collect_rng_states, set_rng_states

__all__ = [
    "GRADIENTS",
    "RANK_STATES",
    "PendingGradients",
    "is_inside_a_step",
    "random_state",
    "rank_state",
    "restore_random_state",
    "take_loader_states",
]

RANK_STATES = "rank_states"
GRADIENTS = "gradients"


def rank_state(checkpoint: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What of Lightning's dictionary is this rank's alone, and its random state."""
    return {"random": random_state(device), "loaders": _fit_state(checkpoint).get("combined_loader")}


def take_loader_states(checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put the states of this rank's loaders where Lightning looks for them."""
    if state["loaders"] is not None:
        _fit_state(checkpoint)["combined_loader"] = state["loaders"]


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint["loops"]["fit_loop"]["state_dict"]
    return found


def random_state(device: torch.device) -> dict[str, Any]:
    """Random numbers of this process and its device; nothing in it but tensors and plain values, so it loads without trust."""
    state = collect_rng_states(include_cuda=False)
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """What `rank_state` gave as "random"."""
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
    """Gradients of the microbatches so far, as one more thing that checkpoints keep for each parameter.

    To be saved as rows they are reduced, also where `no_sync` put that off: the run that goes on and the one that is resumed then add the
    same numbers in the same order.

    Args:
        module: Sharded.
        at_first_step: Is given what is to be done before the first training step.
    """

    def __init__(self, module: nn.Module, at_first_step: list[Callable[[], None]]) -> None:
        self._module = module
        self._at_first_step = at_first_step

    def rows(self) -> dict[str, Tensor]:
        """Of all trained parameters; zeros where there is no gradient. Collective."""
        reduce_pending(self._module)
        return {
            view.name: torch.zeros_like(view.main) if view.grad is None else view.grad.detach()
            for view in sharded_parameters(self._module)
            if view.requires_grad
        }

    def load_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Make them the parameters' gradients when training begins: before, Lightning clears all."""
        if rows:
            self._at_first_step.append(lambda: self._set(rows))

    def _set(self, rows: Mapping[str, Tensor]) -> None:
        for view in sharded_parameters(self._module):
            found = rows.get(view.name)
            if found is not None and found.numel():
                view.local.grad = found.to(view.local)
