"""What the callback reports: which layers it enabled, what the pages cost, and whether that pays."""

from __future__ import annotations

from dataclasses import asdict

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_mfsdp.base.tables import readable_bytes, table_lines
from lightning_mfsdp.callbacks.paged_stash.layers import StashedLayers
from lightning_mfsdp.moe.stash import RowStash, StashStatistics

__all__ = ["metrics", "report_layers", "report_sizes"]

PREFIX = "paged_stash/"
# Less than a tenth is not worth the copies.
_WORTH = 0.1


def report_layers(stashed: StashedLayers) -> None:
    """Layer by layer, what was enabled, and what was not and why."""
    rows = [["  " + name, type(layer).__name__] for name, layer in stashed.layers.items()]
    refused = [f"  {name}: left alone, {reason}" for name, reason in stashed.refused.items()]
    rank_zero_info(
        "\n".join([f"PagedStash: {len(rows)} layers save their rows in pages", *table_lines(rows), *refused])
    )


def report_sizes(stash: RowStash, recorded: StashStatistics | None) -> None:
    """What the pages cost compared to ordinary saves; a warning if they are not worth it."""
    if recorded is None or not recorded.saves:
        rank_zero_warn(
            "PagedStash: nothing needed pages in the recorded steps, so there are none yet. Either no layer saved anything (do they run in "
            "training_step?), or the backward of each came at once, as that of a single layer does: leave PagedStash out there"
        )
        return
    saved = recorded.ordinary_bytes - recorded.kept_bytes - stash.page_bytes
    share = f"{100 * recorded.live_rows / max(recorded.capacity_rows, 1):.0f} %"
    costs = (
        f"{share} of the rows are live; pages take {readable_bytes(stash.page_bytes)} on the device and {readable_bytes(stash.host_bytes)} "
        f"on the host and what stays beside them {readable_bytes(recorded.kept_bytes)}, where ordinary saves take "
        f"{readable_bytes(recorded.ordinary_bytes)}"
    )
    if saved < _WORTH * recorded.ordinary_bytes:
        why = (
            "It pays where buffers are larger than what lives in them (experts divided over ranks with "
            'expert_dispatcher="all_gather", which have a static capacity) or with host_factor; else leave it out'
        )
        if recorded.live_rows < (1 - _WORTH) * recorded.capacity_rows:
            why = (
                f"Its pages have more rows than are live, as in a small model: a page has room for page_rows={stash.config.page_rows}, and "
                f"there are device_factor={stash.config.device_factor:g} times as many as were needed. Lower these, or leave it out"
            )
        rank_zero_warn(f"PagedStash does not pay here: {costs}. {why}")
    else:
        rank_zero_info(f"PagedStash saves {readable_bytes(saved)}: {costs}")


def metrics(statistics: StashStatistics, growths: int) -> dict[str, float]:
    """The values that are logged."""
    values = {**asdict(statistics), "saved_bytes": statistics.saved_bytes, "growths": growths}
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}
