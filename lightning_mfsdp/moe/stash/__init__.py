"""A paged stash: keeps live rows of experts' saved buffers from forward to backward, in pages, without reading their number on the host."""

from lightning_mfsdp.moe.stash.config import StashConfig
from lightning_mfsdp.moe.stash.pages import PageKind
from lightning_mfsdp.moe.stash.stash import RowStash
from lightning_mfsdp.moe.stash.statistics import Occupancy, StashStatistics

__all__ = ["Occupancy", "PageKind", "RowStash", "StashConfig", "StashStatistics"]
