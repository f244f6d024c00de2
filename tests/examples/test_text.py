from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from examples.lightning_decoder import generate
from examples.text import BYTES, ByteText, decode, encode, load_bytes, unigram_bits_per_byte


def raw(split: str) -> bytes:
    return load_bytes()[split].numpy().tobytes()


def files(split: str) -> list[bytes]:
    return raw(split).split(b"\0")


def test_the_text_is_python_source_and_large_enough_to_learn_from() -> None:
    train = raw("train")
    assert len(train) > 3_000_000
    assert train.count(b"def ") > 10_000
    assert len(load_bytes()["held_out"]) > 100_000


def test_no_held_out_file_is_in_the_training_split() -> None:
    train = set(files("train"))
    assert not [text for text in files("held_out") if len(text) > 200 and text in train]


def test_two_readings_give_the_same_bytes() -> None:
    first = load_bytes()
    load_bytes.cache_clear()
    second = load_bytes()
    assert all(torch.equal(first[split], second[split]) for split in ("train", "held_out"))


def test_a_window_holds_inputs_and_the_bytes_that_follow_them() -> None:
    text = ByteText("train", seq=32)
    window = text[3]
    assert window.dtype is torch.int64
    assert window.shape == (33,)
    assert bytes(window.tolist()) == bytes(load_bytes()["train"][3 * 32 : 4 * 32 + 1])


def test_fewer_windows_are_spread_over_the_whole_split() -> None:
    some = ByteText("held_out", seq=64, windows=10)
    assert len(some) == 10
    starts = [index * some._stride for index in range(10)]
    assert starts[-1] + 64 > 0.85 * len(load_bytes()["held_out"])
    assert some.targets().shape == (640,)


def test_windows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="windows of 64 bytes, 99999999 were asked for"):
        ByteText("held_out", seq=64, windows=99_999_999)
    with pytest.raises(IndexError):
        ByteText("held_out", seq=64, windows=2)[2]


def test_the_unigram_baseline_is_the_cross_entropy_of_byte_frequencies() -> None:
    held_out = ByteText("held_out", seq=64, windows=20)
    counts = Counter(raw("train"))
    total = sum(counts.values()) + BYTES
    targets = held_out.targets().tolist()
    expected = -sum(math.log2((counts[byte] + 1) / total) for byte in targets) / len(targets)
    assert unigram_bits_per_byte(held_out) == pytest.approx(expected)


def test_text_survives_encoding_and_decoding() -> None:
    assert decode(encode("def f(x): return 'é'\n")) == "def f(x): return 'é'\n"


class Successor(torch.nn.Module):
    """Predicts the byte after the last one; remembers how much context it was shown."""

    longest = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        return 50.0 * torch.nn.functional.one_hot((tokens + 1) % BYTES, 2 * BYTES).float()


def test_greedy_generation_takes_the_likeliest_byte_and_shows_no_more_than_the_context() -> None:
    model = Successor()
    assert decode(generate(model, encode("ab"), 6, context=4)) == "abcdefgh"
    assert model.longest == 4
    assert decode(generate(model, encode("ab"), 6, context=8, multiple=8)) == "abcdefgh"
    assert model.longest == 8


def test_sampling_is_the_same_for_the_same_seed_and_stays_within_bytes() -> None:
    def flat(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, tokens.shape[1], 2 * BYTES)

    first, again, other = (generate(flat, encode("a"), 40, context=8, temperature=1.0, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.max() < BYTES
