"""What is known not to be as under DDP yet, and what is refused on purpose."""

from __future__ import annotations

from lightning_mfsdp.engine.errors import EngineStateError

# Row of `rows.tsv` -> the item that will mend it. Whoever mends one takes its rows out.
KNOWN: dict[str, str] = {
    # Both means of its loss have nearly the same gradient of a norm's bias, so what is left in bfloat16 is rounding: 0.4 of its length.
    "clamped_critic-3ranks-optim_grads_params-accumulate1-bf16-mixed": "a tolerance for what cancels",
}

# Client and sharding -> the error and a part of its message. A row whose client is refused passes if this is raised.
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("r1", "optim_grads_params"): (EngineStateError, "backward with create_graph=True needs these weights again later"),
}
