"""A paged stash under a Trainer."""

from lightning_mfsdp.callbacks.paged_stash.callback import PagedStash

__all__ = ["PagedStash"]
