"""Opens a checkpoint of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_mfsdp.checkpoint.io.location import META_FILE, MODULE_VERSIONS, TIED_WEIGHTS
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.state.rank_states import RANK_BYTES, RANK_INDEX, RANK_STATES, RankStates
from lightning_mfsdp.checkpoint.tools.deepspeed import open_deepspeed
from lightning_mfsdp.checkpoint.tools.deepspeed_files import is_deepspeed
from lightning_mfsdp.checkpoint.tools.leaves import (
    LIGHTNING_VERSION,
    OpenedCheckpoint,
    StoredCheckpoint,
    StoredTensor,
    check_table_of_contents,
    leaves_of_file,
    load_file,
)

__all__ = ["open_checkpoint"]


def open_checkpoint(path: Path, *, trust: bool = False) -> OpenedCheckpoint:
    """Open a directory of torch.distributed.checkpoint or of DeepSpeed, or a file of `torch.save`; tensor data is not read.

    Raises:
        CheckpointError: There is none of them, or it cannot be read.
    """
    if is_deepspeed(path):
        return open_deepspeed(path, trust=trust)
    if path.is_dir():
        check_table_of_contents(path)
        stored = StoredCheckpoint(path, trust=trust)
        rest = {}
        if (path / META_FILE).is_file():
            rest = load_file(path / META_FILE, trust=trust)
            if not isinstance(rest, dict):
                raise CheckpointError(
                    f"{path / META_FILE}: expected a dictionary, as this strategy saves it, got {type(rest).__name__}"
                )
        tied = rest.pop(TIED_WEIGHTS, {})
        versions = rest.pop(MODULE_VERSIONS, {}).get("model")
        leaves = stored.leaves
        of_ranks = leaves.pop((RANK_STATES, RANK_BYTES), None)
        if RANK_INDEX in rest and isinstance(of_ranks, StoredTensor):
            of_all = RankStates(of_ranks.rows_of_one_save, rest[RANK_INDEX], weights_only=not trust)
            rest = dict((RANK_STATES, of_all) if key == RANK_INDEX else (key, value) for key, value in rest.items())
        return OpenedCheckpoint(
            leaves=leaves,
            rest=rest,
            tied=tied,
            versions=versions,
            metadata=stored.metadata,
            kind="sharded directory",
        )
    content = load_file(path, trust=trust)
    if not isinstance(content, Mapping) or LIGHTNING_VERSION not in content:
        return OpenedCheckpoint(leaves=leaves_of_file(content))
    states = ("state_dict", "optimizer_states")
    return OpenedCheckpoint(
        leaves=leaves_of_file({key: content[key] for key in states if key in content}),
        rest={key: value for key, value in content.items() if key not in states},
        versions=getattr(content.get("state_dict"), "_metadata", None),
    )
