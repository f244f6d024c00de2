"""What is known not to be as under DDP yet, and what is refused on purpose."""

from __future__ import annotations

from lightning_mfsdp.engine.errors import EngineStateError

# Row of `rows.tsv` -> the item that will mend it. Whoever mends one takes its rows out.
KNOWN: dict[str, str] = {
    "dqn-2ranks-optim_grads_params-accumulate3-64-true": "item 1",
    "dqn-3ranks-optim_grads_params-accumulate1-bf16-mixed-resume": "item 1",
    "soft_dqn-2ranks-optim_grads_params-accumulate1-32-true": "item 1",
    "soft_dqn-3ranks-optim_grads_params-accumulate3-bf16-mixed-resume": "item 1",
    "wgan-2ranks-optim_grads_params-accumulate1-32-true": "item 1",
    "wgan-3ranks-optim_grads_params-accumulate3-bf16-mixed-resume": "item 1",
    "clamped_critic-2ranks-optim_grads_params-accumulate1-64-true": "item 1",
    "clamped_critic-3ranks-optim_grads_params-accumulate1-bf16-mixed": "item 1",
    "byol-2ranks-optim-accumulate1-64-true": "item 1",
    "byol-2ranks-optim_grads_params-accumulate1-32-true": "item 1",
    "byol-3ranks-optim_grads_params-accumulate3-bf16-mixed-recompute-resume": "item 1",
    "dino-2ranks-optim_grads_params-accumulate1-32-true-recompute": "item 1",
    "dino-3ranks-optim_grads_params-accumulate3-bf16-mixed-resume": "item 1",
    "moco-2ranks-optim_grads_params-accumulate1-64-true-recompute": "item 1",
    "moco-2ranks-optim_grads_params-accumulate1-bf16-mixed": "item 1",
    "moco-3ranks-optim_grads-accumulate3-64-true-recompute-resume": "item 1",
    "multitask-2ranks-no_shard-accumulate3-bf16-mixed-recompute": "item 4",
    "multitask-3ranks-optim_grads_params-accumulate1-64-true-resume": "item 4",
    "ppo-2ranks-optim-accumulate1-bf16-mixed": "item 2",
    "ppo-3ranks-optim_grads_params-accumulate3-32-true-resume": "item 2",
    "generate-2ranks-optim_grads_params-accumulate1-64-true-recompute-resume": "item 12",
    "generate-3ranks-optim_grads-accumulate3-bf16-mixed": "item 12",
}

# Client and sharding -> the error and a part of its message. A row whose client is refused passes if this is raised.
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("r1", "optim_grads_params"): (EngineStateError, "backward with create_graph=True needs these weights again later"),
}
