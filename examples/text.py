"""Real text that every machine has: the source code of the Python standard library, read as bytes.

Nothing is downloaded. The files are taken in a fixed order and split by file, so no held-out file is ever seen in
training, and every process of a job builds the very same data.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256
"""Size of the alphabet."""

_HELD_OUT_SHARE = 16  # one file in so many is held out
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class ByteText(Dataset[Tensor]):
    """Windows of consecutive bytes, as a map-style dataset.

    Item `i` is an int64 tensor of shape [seq + 1]: the first `seq` entries are inputs, the last `seq` are the bytes that
    follow them. Windows overlap only in that one byte.

    Args:
        split: `"train"` or `"held_out"`.
        seq: Inputs per window, in bytes.
        windows: Keep only so many windows, evenly spaced over the split; None keeps all.

    Raises:
        ValueError: The split has fewer windows than asked for.
    """

    def __init__(self, split: Literal["train", "held_out"], seq: int, windows: int | None = None) -> None:
        self.text = load_bytes()[split]
        self.seq = seq
        available = (len(self.text) - 1) // seq
        self.windows = available if windows is None else windows
        if not 0 < self.windows <= available:
            raise ValueError(
                f"the {split} split has {available} windows of {seq} bytes, {windows} were asked for; use fewer windows"
                " or a smaller seq"
            )
        self._stride = available // self.windows * seq

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        start = index * self._stride
        return self.text[start : start + self.seq + 1].long()

    def targets(self) -> Tensor:
        """Every byte this dataset asks a model to predict: int64, 1-D."""
        return torch.cat([self[index][1:] for index in range(len(self))])


@functools.cache
def load_bytes() -> dict[str, Tensor]:
    """Both splits as 1-D uint8 tensors, keyed `"train"` and `"held_out"`.

    A zero byte, which no source file contains, ends every file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted(path.as_posix() for path in paths if not _SKIPPED_FOLDERS.intersection(path.parts))
    texts = {"train": bytearray(), "held_out": bytearray()}
    for name in names:
        # A checksum of the name rather than a count: a file that one Python version adds then moves no other file.
        split = "train" if zlib.crc32(name.encode()) % _HELD_OUT_SHARE else "held_out"
        texts[split] += (root / name).read_bytes() + b"\0"
    return {split: torch.frombuffer(text, dtype=torch.uint8) for split, text in texts.items()}


def unigram_bits_per_byte(held_out: ByteText) -> float:
    """Bits per byte of the best model that ignores context: the training split's byte frequencies, scored on `held_out`.

    A model that has learned anything beyond how often each byte occurs scores lower.
    """
    # One of each byte is added, so that a byte that training never saw costs many bits but not infinitely many.
    counts = torch.bincount(load_bytes()["train"], minlength=BYTES).double() + 1
    bits = -(counts / counts.sum()).log2()
    return bits[held_out.targets()].mean().item()


def encode(text: str) -> Tensor:
    """Bytes of `text` as int64, 1-D."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Text of a 1-D tensor of byte values; bytes that are not valid UTF-8 are replaced."""
    return bytes(tokens.tolist()).decode(errors="replace")
