"""A paged stash: keeps the live rows of experts' saved buffers from forward to backward, in pages, without asking the host how many."""

from lightning_mfsdp.moe.stash.config import StashConfig
from lightning_mfsdp.moe.stash.pages import PageKind
from lightning_mfsdp.moe.stash.stash import RowStash
from lightning_mfsdp.moe.stash.statistics import Occupancy, StashStatistics

__all__ = ["Occupancy", "PageKind", "RowStash", "StashConfig", "StashStatistics"]
