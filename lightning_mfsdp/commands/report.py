"""What commands found and did, in lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_mfsdp.base.tables import readable_bytes, table_lines
from lightning_mfsdp.checkpoint.tools.leaves import LIGHTNING_VERSION
from lightning_mfsdp.checkpoint.tools.parts import CheckpointParts
from lightning_mfsdp.checkpoint.tools.summary import OptimizerSummary, Summary
from lightning_mfsdp.checkpoint.tools.verify import Verification

__all__ = ["summary_lines", "verification_lines", "written_lines"]

_MANY = 8


def summary_lines(summary: Summary) -> list[str]:
    """What a checkpoint holds, as two tables."""
    rows = [("checkpoint", summary.path), ("kind", summary.kind + _written_by(summary.writers))]
    if summary.epoch is not None:
        rows.append(("epoch", str(summary.epoch)))
    if summary.global_step is not None:
        rows.append(("global step", str(summary.global_step)))
    if summary.versions:
        rows.append(("versions", ", ".join(f"{name} {number}" for name, number in summary.versions.items())))
    rows.append(
        ("model", f"{summary.tensors:,} tensors, {summary.elements:,} elements, {_sizes(summary.bytes_by_dtype)}")
    )
    rows += [(optimizer.name, _optimizer(optimizer)) for optimizer in summary.optimizers]
    rows += [(key, f"{count:,} tensors of parameters") for key, count in summary.states.items()]
    if summary.rest:
        rows.append(("beside them", _listed(summary.rest)))
    if summary.left_out:
        rows.append(("other entries", _listed(summary.left_out)))
    largest = [("largest tensors", "shape", "dtype", "size", "pieces")] + [
        (tensor.name, _shape(tensor.shape), tensor.dtype, readable_bytes(tensor.size_bytes), str(tensor.pieces))
        for tensor in summary.largest
    ]
    return [*table_lines(rows), *(["", *table_lines(largest)] if summary.largest else [])]


def verification_lines(path: Path, verification: Verification) -> list[str]:
    """What a verification found."""
    read = f", {readable_bytes(verification.read_bytes)} read" if verification.read_bytes else ", not read"
    lines = [f"{path}: {verification.tensors:,} tensors{read}"]
    if verification.nonfinite:
        rows = [("not finite", "NaN", "infinite")]
        rows += [(name, f"{count.nan:,}", f"{count.inf:,}") for name, count in verification.nonfinite.items()]
        lines += table_lines(rows)
    if not verification.problems:
        return [*lines, "no problems"]
    return [*lines, f"problems: {len(verification.problems)}", *(f"  {problem}" for problem in verification.problems)]


def written_lines(output: Path, parts: CheckpointParts) -> list[str]:
    """What was written, and what was not."""
    state = sum(len(optimizer.state) for optimizer in parts.optimizers)
    lines = [f"wrote {output}: {len(parts.model):,} model entries, state of {state:,} parameters in {_count(parts)}"]
    lines += [f"{key}: {len(state):,} tensors of parameters" for key, state in parts.states.items()]
    lines += parts.notes
    if LIGHTNING_VERSION not in parts.rest:
        lines.append(
            "Lightning did not write the source: epochs, steps and learning rate schedules start at the beginning"
        )
    if parts.left_out:
        lines.append(f"left out: {_listed(parts.left_out)}")
    return lines


def _optimizer(optimizer: OptimizerSummary) -> str:
    states = ", ".join(f"{name} x {count:,}" for name, count in optimizer.states.items()) or "no state"
    sizes = f", {_sizes(optimizer.bytes_by_dtype)}" if optimizer.bytes_by_dtype else ""
    groups = "1 group" if optimizer.groups == 1 else f"{optimizer.groups} groups"
    return f"{optimizer.parameters:,} parameters in {groups}: {states}{sizes}"


def _count(parts: CheckpointParts) -> str:
    return "1 optimizer" if len(parts.optimizers) == 1 else f"{len(parts.optimizers)} optimizers"


def _written_by(writers: list[int] | None) -> str:
    if not writers:
        return ""
    if writers == list(range(len(writers))):
        return f", written by {len(writers)} ranks" if len(writers) > 1 else ", written by 1 rank"
    return f", written by ranks {_listed(list(map(str, writers)))}"


def _sizes(by_dtype: Mapping[str, int]) -> str:
    if len(by_dtype) == 1:
        dtype, size = next(iter(by_dtype.items()))
        return f"{readable_bytes(size)} of {dtype}"
    each = ", ".join(f"{dtype} {readable_bytes(size)}" for dtype, size in by_dtype.items())
    return f"{readable_bytes(sum(by_dtype.values()))} ({each})" if by_dtype else readable_bytes(0)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "-"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
