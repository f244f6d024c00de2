"""Says in words where the time of a step went, and what to try first."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_mfsdp.base.tables import table_lines
from lightning_mfsdp.profile.breakdown import Breakdown

__all__ = ["advice", "report"]

_UNITS_SHOWN = 3
_WAITS_SHOWN = 3
# What takes less of a step than this is not worth an option.
_SHARE = 0.04


def report(found: Breakdown, head: str) -> str:
    """Tables of the GPU and of the host, in milliseconds a step, and advice.

    Args:
        found: The breakdown.
        head: What it is of.
    """
    lines = [f"{head}: {found.steps} step{'s' if found.steps > 1 else ''} of {_ms(found.step)} ms"]
    if found.has_device:
        lines += table_lines(list(_rows_of_device(found)), right=(1, 2, 3))
        lines.append(
            f"the host: {_ms(found.at_work)} ms at work, {_ms(found.waiting)} waiting for the GPU, {_ms(found.for_data)} for the next batch"
        )
        if found.exposed:
            units = [f"{name} {_ms(time)}" for name, time in list(found.exposed.items())[:_UNITS_SHOWN]]
            lines.append(f"communication that nothing hides, by unit: {', '.join(units)}")
        lines.append(f"try first: {advice(found)}")
    else:
        lines.append("nothing ran on a GPU; what the host did:")
        lines += table_lines(list(_rows_of_host(found)), right=(1, 2))
    return "\n".join(lines)


def _rows_of_device(found: Breakdown) -> Iterator[tuple[str, ...]]:
    yield "", "ms", "of the step", "hidden, ms"
    for kind, time in found.shown.items():
        yield kind, _ms(time), f"{time / found.step:.1%}", _ms(found.hidden[kind]) if kind in found.hidden else ""
    yield "idle", _ms(found.idle), f"{found.idle / found.step:.1%}", ""


def _rows_of_host(found: Breakdown) -> Iterator[tuple[str, ...]]:
    parts = {name.removeprefix("mfsdp "): time for name, time in found.host.items()} | {"next batch": found.for_data}
    parts["the rest"] = parts.pop("the rest", 0.0)  # forward, backward and the loop
    for name, time in parts.items():
        yield name, _ms(time), f"{time / found.step:.1%}"


def advice(found: Breakdown) -> str:
    """The one change that addresses what costs most besides computation."""
    losses = {kind: time for kind, time in found.shown.items() if kind != "compute"} | {"idle": found.idle}
    largest = max(losses, key=lambda kind: losses[kind])
    if losses[largest] < _SHARE * found.step:
        return (
            f"computation is {found.shown.get('compute', 0) / found.step:.0%} of the step: precision (FP8), compile=True, or fewer layers "
            "that are recomputed"
        )
    if largest == "idle":
        return _advice_for_idle(found)
    if largest == "optimizer" and found.optimizer_is_fused:
        return "more microbatches for each step (accumulate_grad_batches), since the optimizer is fused"
    return {
        "optimizer": "a fused optimizer (torch.optim.AdamW(..., fused=True)), or more microbatches for each step",
        "copies on the device": "MixedPrecisionPolicy(keep_compute_shard=True), which casts weights once a step, not for each all-gather",
        "all-gathers": 'reshard_after_forward="auto" or False, a larger batch, or on several nodes outer=NODES',
        "reductions": "MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16), or accumulate_grad_batches",
        "other communication": "a larger batch; with an expert or context axis, ranks of one axis within a node",
        "copies to and from the host": "less offload, or more microbatches for each step; a DataLoader with pin_memory=True",
    }[largest]


def _advice_for_idle(found: Breakdown) -> str:
    if found.idle_for_data > found.idle / 2:
        return "more workers of the DataLoader, with persistent_workers=True: the GPU waits for the next batch"
    waits = [f"{name} ({count:.3g} a step)" for name, count in list(found.waits.items())[:_WAITS_SHOWN]]
    if waits and found.waiting > _SHARE * found.step:
        return (
            f"remove what the host waits for, after which the GPU has nothing to do: {', '.join(waits)}. Log tensors with self.log, not "
            "with .item(), and print nothing of them"
        )
    return "compile=True, cuda_graph=True, blocks_per_unit=2, or a larger batch: the GPU waits for the host"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.2f}"
