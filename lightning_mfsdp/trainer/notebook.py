"""ForkedLauncher: the processes of a Trainer as forks of this one, and the trained weights back in this one, for notebooks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_mfsdp._lightning_api import MultiProcessingLauncher, Trainer, TrainerFn, WorkerOutput
from lightning_mfsdp.checkpoint.state.full_state import full_state_dict

__all__ = ["ForkedLauncher"]

_SHOWN = 4  # parameters that a message names, however many it is about


class ForkedLauncher(MultiProcessingLauncher):
    """Lightning's launcher of `ddp_notebook`, with weights that are gathered before they come back.

    The forks shard copies of the model; the model of the process that called `fit` stays whole, and holds the trained weights afterwards.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` in forks, and return what rank 0 returned.

        Raises:
            RuntimeError: This process has a process group, which forks would take for theirs.
        """
        if dist.is_initialized():
            raise RuntimeError(
                f"mfsdp_notebook: this process already has a process group of {dist.get_world_size()}, from a fit with devices=1 or from "
                "init_process_group, which forked processes cannot share. Restart the kernel, or call "
                "torch.distributed.destroy_process_group() if nothing that was sharded with it is needed any more"
            )
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> WorkerOutput | None:
        """Gather what the first process needs. Collective."""
        is_fit = trainer.state.fn == TrainerFn.FITTING
        module = trainer.lightning_module
        weights = full_state_dict(module) if is_fit else {}
        if self._strategy.local_rank != 0:
            return None
        path = None
        if is_fit:
            path = str(Path(tempfile.mkdtemp(), "weights.pt"))
            # Buffers that are not in a state dict are needed where the model was built on the meta device.
            others = {name: buffer.cpu() for name, buffer in module.named_buffers() if name not in weights}
            torch.save((weights, others), path)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))

    def _recover_results_in_main_process(self, worker_output: WorkerOutput, trainer: Trainer) -> None:
        """Load the weights, and let Lightning take the rest."""
        if worker_output.weights_path is not None:
            path = Path(worker_output.weights_path)
            module = trainer.lightning_module
            try:  # a fork of this process wrote it, with whatever the model has as extra state
                weights, others = torch.load(path, map_location="cpu", weights_only=False)
            finally:
                path.unlink()
                path.parent.rmdir()
            _materialize(module, others)
            missing, unexpected = module.load_state_dict(weights, strict=False)
            if missing or unexpected:
                names = [*missing, *unexpected]
                few = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                rank_zero_warn(
                    f"mfsdp_notebook: the forked processes trained a model with other parameters ({few}), such as those made in "
                    "configure_model, so these were not copied back. The checkpoint has them: load it from "
                    "trainer.checkpoint_callback.best_model_path"
                )
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)


def _materialize(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Memory on the CPU for parameters and buffers on the meta device; tied ones stay tied, and `buffers` have values."""
    materialized: dict[int, Tensor] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in materialized:
                    empty = torch.empty_like(parameter, device="cpu")
                    materialized[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                child._parameters[name] = materialized[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                full = f"{prefix}.{name}" if prefix else name
                child._buffers[name] = buffers[full] if full in buffers else torch.empty_like(buffer, device="cpu")
