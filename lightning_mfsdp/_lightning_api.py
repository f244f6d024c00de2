"""Everything that this package imports from Lightning at run time, including private names, in one place.

Lightning is published twice: as `lightning.pytorch` and as `pytorch_lightning`, two copies of one code that share no class. A strategy
fits the Trainer of the copy that it derives from. Which copy this process uses is decided here, once, by the environment variable
LIGHTNING_MFSDP_NAMESPACE; type checkers always see the first. Tested with Lightning 2.6.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "FABRIC_STRATEGY_REGISTRY",
    "LIGHTNING_VERSION",
    "NAMESPACE",
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "CheckpointCallback",
    "CheckpointIO",
    "DoublePrecision",
    "FabricBackwardSyncControl",
    "FabricDoublePrecision",
    "FabricHalfPrecision",
    "FabricLauncher",
    "FabricMixedPrecision",
    "FabricMultiProcessingLauncher",
    "FabricParallelStrategy",
    "FabricPrecision",
    "FabricTransformerEnginePrecision",
    "GradClipAlgorithmType",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "Launcher",
    "LightningModule",
    "LightningOptimizer",
    "MisconfigurationException",
    "MixedPrecision",
    "MockOptimizer",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "MultiProcessingLauncher",
    "OnExceptionCheckpoint",
    "ParallelStrategy",
    "PossibleUserWarning",
    "Precision",
    "PrefetchDataFetcher",
    "PyTorchProfiler",
    "SIGTERMException",
    "SLURMEnvironment",
    "StochasticWeightAveraging",
    "StrategyRegistry",
    "Summary",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "WorkerOutput",
    "collect_rng_states",
    "default_process_group_backend",
    "get_available_flops",
    "get_formatted_model_size",
    "get_human_readable_count",
    "init_dist_connection",
    "is_param_in_hook_signature",
    "reset_seed",
    "set_rng_states",
    "sync_if_available",
    "to_uncompiled",
    "unwrap_fabric_objects",
]

NAMESPACE = os.environ.get("LIGHTNING_MFSDP_NAMESPACE", "lightning.pytorch")

if NAMESPACE not in ("lightning.pytorch", "pytorch_lightning"):
    raise ImportError(
        f'LIGHTNING_MFSDP_NAMESPACE={NAMESPACE!r}: expected "lightning.pytorch" or "pytorch_lightning", the name by which you import '
        "Lightning"
    )

if TYPE_CHECKING or NAMESPACE == "lightning.pytorch":
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins import DoublePrecision as FabricDoublePrecision
    from lightning.fabric.plugins import HalfPrecision as FabricHalfPrecision
    from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.fabric.plugins import TransformerEnginePrecision as FabricTransformerEnginePrecision
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGY_REGISTRY
    from lightning.fabric.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as FabricMultiProcessingLauncher,
    )
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning.fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as FabricBackwardSyncControl
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_process_group_backend,
    )
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as sync_if_available
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.throughput import get_available_flops
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.fabric.wrappers import _unwrap_objects as unwrap_fabric_objects
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        BaseFinetuning,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        ThroughputMonitor,
        WeightAveraging,
    )
    from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.profilers import PyTorchProfiler
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as Launcher
    from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.compile import to_uncompiled
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
    from lightning.pytorch.utilities.model_summary.model_summary import (
        get_formatted_model_size,
        get_human_readable_count,
    )
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    from lightning_fabric.plugins import CheckpointIO
    from lightning_fabric.plugins import DoublePrecision as FabricDoublePrecision
    from lightning_fabric.plugins import HalfPrecision as FabricHalfPrecision
    from lightning_fabric.plugins import MixedPrecision as FabricMixedPrecision
    from lightning_fabric.plugins import Precision as FabricPrecision
    from lightning_fabric.plugins import TransformerEnginePrecision as FabricTransformerEnginePrecision
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGY_REGISTRY
    from lightning_fabric.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as FabricMultiProcessingLauncher,
    )
    from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
    from lightning_fabric.strategies.parallel import ParallelStrategy as FabricParallelStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl as FabricBackwardSyncControl
    from lightning_fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_process_group_backend,
    )
    from lightning_fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning_fabric.utilities.distributed import _sync_ddp_if_available as sync_if_available
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.seed import _collect_rng_states as collect_rng_states
    from lightning_fabric.utilities.seed import _set_rng_states as set_rng_states
    from lightning_fabric.utilities.seed import reset_seed
    from lightning_fabric.utilities.throughput import get_available_flops
    from lightning_fabric.utilities.warnings import PossibleUserWarning
    from lightning_fabric.wrappers import _unwrap_objects as unwrap_fabric_objects
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        BackboneFinetuning,
        BaseFinetuning,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        ThroughputMonitor,
        WeightAveraging,
    )
    from pytorch_lightning.callbacks import Checkpoint as CheckpointCallback
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.core.optimizer import _MockOptimizer as MockOptimizer
    from pytorch_lightning.loggers import TensorBoardLogger
    from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from pytorch_lightning.profilers import PyTorchProfiler
    from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher as Launcher
    from pytorch_lightning.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import GradClipAlgorithmType
    from pytorch_lightning.utilities.compile import to_uncompiled
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_summary.model_summary import ModelSummary as Summary
    from pytorch_lightning.utilities.model_summary.model_summary import (
        get_formatted_model_size,
        get_human_readable_count,
    )
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

LIGHTNING_VERSION: str = import_module(NAMESPACE).__version__
