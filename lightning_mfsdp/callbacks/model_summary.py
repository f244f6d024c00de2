"""ShardedModelSummary: Lightning's table of layers, with this rank's share of each layer next to the whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp._lightning_api import (
    LightningModule,
    ModelSummary,
    Summary,
    Trainer,
    get_formatted_model_size,
    get_human_readable_count,
)
from lightning_mfsdp.engine import units
from lightning_mfsdp.engine.internals import view_of
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["ShardedModelSummary", "ShardedSummary"]

_COLUMN = "Params per rank"


class ShardedModelSummary(ModelSummary):
    """Prints the table of layers when fitting starts, in place of Lightning's own, with a column "Params per rank".

    That column counts the elements of main weights that rank 0 owns and its optimizer updates; rows are whole, so shares of ranks
    differ. Parameters that are not sharded count whole. Two more lines give rank 0's total and the memory its weights keep. Other
    strategies than `MFSDPStrategy` get Lightning's table.

    Args:
        max_depth: Depth of nesting shown. 1: the direct children of the LightningModule; -1: everything; 0: no table.
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__(max_depth)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Summarize on every rank, because an `example_input_array` goes through the sharded model; print on rank 0."""
        if self._max_depth:
            rank_zero_info(f"\n{self._summary(trainer, pl_module)}")

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        if isinstance(trainer.strategy, MFSDPStrategy):
            return ShardedSummary(pl_module, max_depth=self._max_depth)
        return super()._summary(trainer, pl_module)


class ShardedSummary(Summary):
    """The table as an object: Lightning's figures, which are global, and this rank's.

    Args:
        model: A LightningModule under `MFSDPStrategy`.
        max_depth: As for `ShardedModelSummary`.
    """

    def __init__(self, model: LightningModule, max_depth: int = 1) -> None:
        with warnings.catch_warnings():
            # Lightning would derive sizes from the name of the precision; here they come from the weights.
            warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
            super().__init__(model, max_depth=max_depth)

    @property
    def rank_param_nums(self) -> list[int]:
        """Elements on this rank, layer by layer."""
        return [_local_numel(self._model.get_submodule(name).parameters()) for name in self.layer_names]

    @property
    def rank_total_parameters(self) -> int:
        """Elements on this rank, tied ones once."""
        return _local_numel(self._model.parameters())

    @property
    def rank_model_size(self) -> float:
        """Memory that weights keep on this rank, in MB: main weights, additional compute weights, padding."""
        sharded_bytes = sum(view.main_bytes + view.held_bytes for view in units(self._model))
        others = [parameter for parameter in self._model.parameters() if view_of(parameter) is None]
        return (sharded_bytes + sum(_local(parameter).nbytes for parameter in others)) / 1e6

    @property
    def model_size(self) -> float:
        """Size of all main weights of the whole model, whatever this rank has of them, in MB."""
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in self._model.parameters()) / 1e6

    @property
    def total_layer_params(self) -> int:
        """Elements of all layers in the table, once where layers share or contain one another."""
        return sum(parameter.numel() for parameter in self._layer_parameters())

    def _layer_parameters(self) -> list[nn.Parameter]:
        layers = [self._model.get_submodule(name) for name in self.layer_names]
        return list({id(parameter): parameter for layer in layers for parameter in layer.parameters()}.values())

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        names, rows = [name for name, _ in columns], len(columns[0][1])
        shares = self.rank_param_nums
        if rows > len(shares):  # a last row for what is in no layer
            shares.append(self.rank_total_parameters - _local_numel(self._layer_parameters()))
        columns.insert(names.index("Params") + 1, (_COLUMN, [get_human_readable_count(share) for share in shares]))
        return columns

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\n{get_human_readable_count(self.rank_total_parameters):<10}Params on this rank"
            f"\n{get_formatted_model_size(self.rank_model_size):<10}Size of weights kept on this rank (MB)"
        )


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_numel(parameters: Iterable[Tensor]) -> int:
    return sum(_local(parameter).numel() for parameter in parameters)
