"""What a batch becomes on each of the ranks that divide its sequences. Without processes: a part depends on sizes alone."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mfsdp.context_parallel.batches import divide
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Method


class Alone(ContextParallel):
    """One of several ranks, without the others."""

    def __init__(self, size: int, rank: int, method: Method = "ulysses") -> None:
        self.size, self.rank, self.method = size, rank, method
        self.cut = None


def parts(batch: Any, size: int, method: Method = "ulysses", dims: Any = None) -> list[Any]:
    return [divide(batch, Alone(size, rank, method), dims)[0] for rank in range(size)]


def together(pieces: list[Tensor], method: Method, dim: int = 1) -> Tensor:
    """Whole sequences of the parts of all ranks."""
    own = 1 if method == "ulysses" else 2
    places = [chunk for rank in range(len(pieces)) for chunk in Alone(len(pieces), rank, method).chunks()]
    chunks = [chunk for piece in pieces for chunk in piece.chunk(own, dim)]
    return torch.cat([chunk for _, chunk in sorted(zip(places, chunks, strict=True), key=lambda item: item[0])], dim)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    size=st.sampled_from([2, 3, 4]),
    method=st.sampled_from(["ulysses", "gather"]),
    rows=st.integers(1, 3),
)
def test_parts_together_are_the_padded_batch(length: int, size: int, method: Method, rows: int) -> None:
    tokens = torch.randint(1, 99, (rows, length))
    positions = torch.arange(length).expand(rows, length)
    batch = {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "position_ids": positions,
        "name": "of the batch",
    }
    pieces = parts(batch, size, method)
    whole = {key: together([piece[key] for piece in pieces], method) for key in batch if key != "name"}
    padded = whole["input_ids"].size(1)
    assert padded % (size if method == "ulysses" else 2 * size) == 0
    assert padded - length < 2 * size
    for key, fill in {"input_ids": 0, "labels": -100, "attention_mask": 0}.items():
        assert torch.equal(whole[key][:, :length], batch[key]), key
        assert (whole[key][:, length:] == fill).all(), key
    assert torch.equal(whole["position_ids"], torch.arange(padded).expand(rows, padded)), "they go on in the padding"
    assert all(piece["name"] == "of the batch" for piece in pieces)
    assert all(piece["labels"].is_contiguous() for piece in pieces)
    assert batch["input_ids"] is tokens, "the batch is not written to"


def test_the_kind_of_a_batch_stays() -> None:
    pair = namedtuple("pair", "tokens targets")
    tokens = torch.arange(8).reshape(1, 8)
    first = parts((tokens, tokens), 2, dims={"0": 1, "1": 1})[0]
    assert type(first) is tuple
    assert type(parts([tokens, tokens], 2, dims={"0": 1, "1": 1})[0]) is list
    second = parts(pair(tokens, tokens), 2, dims={"0": 1, "1": 1})[1]
    assert type(second) is pair
    assert second.targets.tolist() == [[4, 5, 6, 7]]
    mapping = parts(UserDict(input_ids=tokens), 2)[1]
    assert type(mapping) is UserDict
    assert mapping["input_ids"].tolist() == [[4, 5, 6, 7]]
    assert parts(tokens, 2, dims={"0": 1})[0].tolist() == [[0, 1, 2, 3]]


def test_targets_of_a_tuple_are_padded_with_what_no_loss_counts() -> None:
    tokens = torch.arange(1, 6).reshape(1, 5)
    last = parts((tokens, tokens), 2, dims={"0": 1, "1": 1})[1]
    assert last[0].tolist() == [[4, 5, 0]]
    assert last[1].tolist() == [[4, 5, -100]]


def test_another_dim_may_be_the_sequence() -> None:
    features = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(parts({"features": features}, 2, dims={"features": 0})[1]["features"], features[3:])
    assert torch.equal(parts({"features": features.T}, 3, dims={"features": -1})[2]["features"], features.T[:, 4:])


def test_padding_and_documents_are_those_of_whole_sequences() -> None:
    tokens = torch.ones(2, 6, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
    cuts = [divide({"input_ids": tokens, "attention_mask": mask}, Alone(2, rank))[1] for rank in range(2)]
    for cut in cuts:
        assert cut.length == 6
        assert cut.is_real is not None
        assert torch.equal(cut.is_real, mask.bool())
        assert cut.document is None
    packed = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    _, cut = divide({"input_ids": tokens, "position_ids": packed}, Alone(2, 1))
    assert cut.is_real is None
    assert cut.document is not None
    assert cut.document.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]]
    full = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(6).expand(2, 6),
    }
    _, cut = divide(full, Alone(2, 0))
    assert cut.is_real is None, "so attention needs no mask"
    assert cut.document is None
    _, cut = divide({"input_ids": tokens}, Alone(4, 0))
    assert cut.is_real is not None
    assert cut.is_real.tolist() == [[True] * 6 + [False] * 2] * 2, "what was added"


TOKENS = torch.ones(2, 6, dtype=torch.int64)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a kind": (7, None, "a batch of type int cannot be divided; expected a mapping"),
    "nothing known": ((TOKENS, TOKENS), None, r"no entry of the batch .* it has \['0', '1'\].*context_dims"),
    "no tensor": ({"input_ids": TOKENS, "text": "a"}, {"text": 1}, "the batch has str there"),
    "no dim": ({"input_ids": TOKENS}, {"input_ids": 2}, r"a tensor of shape \[2, 6\] there"),
    "a mask of pairs": (
        {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 6, 6)},
        None,
        r"attention_mask has shape \[2, 1, 6, 6\]; expected \[batch, length\]",
    ),
    "perhaps": (
        {"input_ids": TOKENS, "weights": torch.ones(2, 6)},
        None,
        r"'weights' .* shape \[2, 6\].*\{'weights': 1\}",
    ),
    "perhaps, inside": ({"input_ids": TOKENS, "more": [torch.ones(2, 3, 6)]}, None, r"'more\.0' .*\{'more': 2\}"),
    "lengths": ({"input_ids": TOKENS, "labels": torch.ones(2, 5)}, None, r"input_ids 6 and \{'labels': 5\}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_cannot_be_divided_is_refused_by_name(case: str) -> None:
    batch, dims, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        divide(batch, Alone(2, 0), dims)


def test_an_entry_that_only_other_batches_have_may_be_named() -> None:
    part, _ = divide({"input_ids": TOKENS}, Alone(2, 0), {"loss_mask": 1})
    assert part.keys() == {"input_ids"}


class Mine(MutableMapping[str, Any]):
    """Keeps its entries in an attribute, which a shallow copy shares."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_a_mapping_of_ones_own_is_not_written_to() -> None:
    whole = Mine(input_ids=TOKENS)
    part, _ = divide(whole, Alone(2, 0))
    assert type(part) is Mine
    assert part["input_ids"].shape == (2, 3)
    assert whole["input_ids"] is TOKENS


def test_positions_of_one_row_hold_for_all() -> None:
    _, cut = divide({"input_ids": TOKENS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, Alone(2, 0))
    assert cut.document is not None
    assert cut.document.tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_an_entry_that_is_no_sequence_stays_whole_where_that_is_said() -> None:
    square = torch.ones(2, 6)
    part, _ = divide({"input_ids": TOKENS, "features": square}, Alone(2, 0), {"features": None})
    assert part["features"] is square
