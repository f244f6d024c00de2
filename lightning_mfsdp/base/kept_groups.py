"""Keeps process groups that this package makes beside the user's: connections between ranks, communicators, meshes of its own.

Each is made once for a default process group. It costs threads, descriptors and, with NCCL, device memory, and it cannot
be destroyed while another rank may still be in its last collective. So it is kept for the next model or Trainer, which uses it in the same
order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["kept"]

T = TypeVar("T")

_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, object]] = WeakKeyDictionary()


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """A group, a mesh or some of them, made at the first call and found again while the default process group lives.

    Args:
        key: What it is for, and over which ranks; the same on all of them.
        make: Makes it. Collective over its ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "callers ask whether there is a default process group"
    for other in [group for group in _KEPT if group is not world]:  # destroyed, and another made since
        del _KEPT[other]
    kept_of_world = _KEPT.setdefault(world, {})
    if key not in kept_of_world:
        kept_of_world[key] = make()
    return cast(T, kept_of_world[key])
