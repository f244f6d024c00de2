"""What the strategy requires of loggers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_mfsdp._lightning_api import TensorBoardLogger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loggers import Logger

__all__ = ["check_loggers", "check_watched"]


def check_loggers(loggers: Iterable[Logger], module: LightningModule) -> None:
    """Raise a ValueError for a logger that would trace the module with `torch.jit` on rank 0 alone.

    It would wait for the other ranks until the time-out; with one process the trace fails, since a forward shows other parameters.
    """
    for logger in loggers:
        # Lightning's own attribute; without an example it draws nothing and warns.
        if isinstance(logger, TensorBoardLogger) and logger._log_graph and module.example_input_array is not None:
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) traces the model on rank 0 alone to draw its graph. A sharded model runs on all "
                "ranks together, and torch.jit cannot trace it; leave log_graph out, and draw the graph of the plain model before the fit: "
                "logger.experiment.add_graph(model, inputs)"
            )


def check_watched(module: LightningModule) -> None:
    """Raise a ValueError where `wandb.watch` logs weights that are sharded, on the one rank that has a run of wandb.

    That rank would wait for the others until the time-out.
    """
    for name, part in module.named_modules():
        hooks = getattr(
            part, "_wandb_hook_names", ()
        )  # wandb's own attribute, "parameters/" or "gradients/..." for each hook
        if any(hook.startswith("parameters/") for hook in hooks):
            raise ValueError(
                f'wandb.watch(log="all" or "parameters") of {name or type(part).__name__} reads weights on rank 0 alone, and sharded '
                'weights are gathered by all ranks together; use watch(model, log="gradients"), and '
                "lightning_mfsdp.callbacks.NormMonitor for norms of weights"
            )
