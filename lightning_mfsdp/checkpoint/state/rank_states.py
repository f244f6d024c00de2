"""States that each rank has for itself, such as random numbers: together one tensor of bytes, of which each writes and reads its own rows.

    rank_states             {"bytes": uint8 tensor}: what `torch.save` writes of each rank's state, one after the other
    meta.pt                 where they begin (`RANK_INDEX`)

Earlier versions gathered them to all ranks, and had them as a list in `meta.pt`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import torch
from torch import Tensor

from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.io.trust import WEIGHTS_ONLY, RefusedError, is_trusted, refusal, refused_class
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.on_disk import TensorOnDisk
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES
from lightning_mfsdp.engine.internals import Piece

__all__ = ["RANK_BYTES", "RANK_INDEX", "RANK_STATES", "RankStates", "rank_states_in", "shared_rank_states"]

RANK_STATES = "rank_states"
RANK_INDEX = "rank_states_index"
RANK_BYTES = "bytes"


def shared_rank_states(state: Mapping[str, Any], ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What this rank writes of all states, and their index on rank 0. All ranks call it.

    Args:
        state: Of this rank, with "data_rank", "data_size" and "gradients".
        ranks: All of them.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    described = ranks.to_first((len(own), state["data_rank"], bool(state["gradients"])))
    places: list[tuple[range, int]] | None = None
    index: dict[str, Any] = {}
    if described is not None:
        bounds = list(accumulate((length for length, _, _ in described), initial=0))
        places = [(range(*pair), bounds[-1]) for pair in pairwise(bounds)]
        index = {
            "bounds": torch.tensor(bounds, device="cpu"),
            "data_size": state["data_size"],
            "data_ranks": torch.tensor([data_rank for _, data_rank, _ in described], device="cpu"),
            "gradients": any(has_gradients for _, _, has_gradients in described),
        }
    rows, total = ranks.for_each(places)
    return {RANK_BYTES: DcpShard.of(own, Piece(shape=torch.Size([total]), rows=rows))}, index


def rank_states_in(checkpoint: dict[str, Any], weights_only: bool | None) -> Sequence[Mapping[str, Any]] | None:
    """Take the states of ranks out of Lightning's dictionary; `None` if there are none."""
    index = checkpoint.pop(RANK_INDEX, None)
    saved = checkpoint.get(PARAMETER_STATES, {}).pop(RANK_STATES, None)
    if index is None or saved is None:
        listed: Sequence[Mapping[str, Any]] | None = checkpoint.get(RANK_STATES)
        return listed
    data = saved[RANK_BYTES]
    read = data.rows if isinstance(data, TensorOnDisk) else lambda rows, _: data[rows.start : rows.stop]
    return RankStates(read, index, weights_only)


class RankStates(Sequence[Mapping[str, Any]]):
    """The states that ranks have saved, each of which is read when it is asked for.

    Args:
        read: Reads rows of the tensor that holds them; some ranks call it together.
        index: As saved.
        weights_only: As for `torch.load`.
    """

    def __init__(
        self, read: Callable[[range, Ranks], Tensor], index: Mapping[str, Any], weights_only: bool | None
    ) -> None:
        self._read_rows, self._index, self._weights_only = read, index, weights_only
        self._read: dict[int, Mapping[str, Any]] = {}

    @property
    def data_size(self) -> int:
        """How many ranks had different batches."""
        size: int = self._index["data_size"]
        return size

    @property
    def has_gradients(self) -> bool:
        """Whether any state has gradients."""
        return bool(self._index["gradients"])

    def rank_of(self, data_rank: int) -> int:
        """The first rank with these batches."""
        return int((self._index["data_ranks"] == data_rank).nonzero()[0])

    def __len__(self) -> int:
        return len(self._index["bounds"]) - 1

    @overload
    def __getitem__(self, rank: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        rank = range(len(self))[rank]
        if rank not in self._read:
            self.read(rank, Ranks.alone())
        return self._read[rank]

    def read(self, rank: int, ranks: Ranks) -> None:
        """Read a state. All of `ranks` call it, each for the state that it needs."""
        rows = range(*self._index["bounds"][rank : rank + 2].tolist())
        data = io.BytesIO(self._read_rows(rows, ranks).numpy().tobytes())
        try:
            state: Mapping[str, Any] = torch.load(
                data, map_location="cpu", weights_only=not is_trusted(self._weights_only)
            )
        except pickle.UnpicklingError as error:
            raise RefusedError(refusal(f"the state of rank {rank}", refused_class(error), WEIGHTS_ONLY)) from error
        self._read[rank] = state
