"""ForkedLauncher: the processes of a Trainer as forks of this one, and the trained weights back in this one, for notebooks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mfsdp._lightning_api import MultiProcessingLauncher, Trainer, TrainerFn, WorkerOutput
from lightning_mfsdp.checkpoint.state.whole import full_state_dict

__all__ = ["ForkedLauncher"]

# Names of a message about many.
_SHOWN = 4


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
        weights = full_state_dict(trainer.lightning_module) if is_fit else {}
        if self._strategy.local_rank != 0:
            return None
        path = None
        if is_fit:
            path = str(Path(tempfile.mkdtemp(), "weights.pt"))
            torch.save(weights, path)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))

    def _recover_results_in_main_process(self, worker_output: WorkerOutput, trainer: Trainer) -> None:
        """Load the weights, and let Lightning take the rest."""
        if worker_output.weights_path is not None:
            path = Path(worker_output.weights_path)
            weights = torch.load(path, map_location="cpu", weights_only=True)
            path.unlink()
            path.parent.rmdir()
            module = trainer.lightning_module
            is_meta = any(parameter.is_meta for parameter in module.parameters())
            missing, unexpected = module.load_state_dict(weights, strict=False, assign=is_meta)
            if missing or unexpected:
                names = [*missing, *unexpected]
                few = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                rank_zero_warn(
                    f"mfsdp_notebook: the forked processes trained a model with other parameters ({few}), such as those made in "
                    "configure_model, so these were not copied back. The checkpoint has them: load it from "
                    "trainer.checkpoint_callback.best_model_path"
                )
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)
