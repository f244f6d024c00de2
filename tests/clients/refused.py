"""Clients that are refused on purpose."""

from __future__ import annotations

from lightning_mfsdp import EngineStateError

# Client and sharding -> the error and a part of its message. A row whose client is refused passes if this is raised.
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("r1", "optim_grads_params"): (EngineStateError, "Of a gradient that was taken with create_graph=True"),
}
