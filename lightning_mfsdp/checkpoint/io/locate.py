"""From a path or URL to its location."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.remote import RemoteLocation

__all__ = ["locate"]


def locate(path: str | os.PathLike[str]) -> Location:
    """The location that a path or URL names. `file://` and paths without a protocol are local."""
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalLocation(Path(rest if separator else text))
    return RemoteLocation(text)
