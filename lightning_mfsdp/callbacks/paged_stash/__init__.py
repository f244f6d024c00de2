"""A paged stash under a Trainer."""

from lightning_mfsdp.callbacks.paged_stash.callback import PagedStash
from lightning_mfsdp.callbacks.paged_stash.picture import draw

__all__ = ["PagedStash", "draw"]
