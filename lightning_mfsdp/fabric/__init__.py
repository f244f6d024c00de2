"""The same sharding under Lightning Fabric: `Fabric(strategy="mfsdp")`.

Importing this package registers "mfsdp", "mfsdp_optim_grads", "mfsdp_optim" and "mfsdp_no_shard" with Fabric.
"""

from lightning_mfsdp._lightning_api import FABRIC_STRATEGY_REGISTRY
from lightning_mfsdp.fabric.precision import MFSDPFabricPrecision
from lightning_mfsdp.fabric.strategy import MFSDPFabricStrategy

__all__ = ["MFSDPFabricPrecision", "MFSDPFabricStrategy"]

MFSDPFabricStrategy.register_strategies(FABRIC_STRATEGY_REGISTRY)
