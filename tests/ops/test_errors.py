"""Arguments that do not fit are refused with what was expected and what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mfsdp.base import kernels
from lightning_mfsdp.ops import LinearLossHead, chunked_logprobs, linear_cross_entropy, linear_logprobs

HIDDEN, WEIGHT, TARGET = torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: expected a positive number"),
        ({"temperature": float("inf")}, "temperature=inf: expected a positive number"),
        ({"softcap": float("inf")}, "softcap=inf: expected a positive number or None"),
        (
            {"hidden": TARGET[:, None].expand(3, 2)},
            "expected floating-point numbers as its first argument, got torch.int64",
        ),
        ({"softcap": -1.0}, "softcap=-1.0: expected a positive number or None"),
        ({"token_chunk": 0}, "token_chunk=0: expected at least one token, or None"),
        (
            {"sum_dtype": torch.bfloat16},
            "sum_dtype=torch.bfloat16: for products in torch.float32 expected torch.float32, or None",
        ),
        (
            {"hidden": HIDDEN.bfloat16(), "weight": WEIGHT.bfloat16(), "sum_dtype": torch.float16},
            "sum_dtype=torch.float16: expected torch.bfloat16, torch.float32, torch.float64, or None",
        ),
        (
            {"hidden": HIDDEN.bfloat16(), "weight": WEIGHT.bfloat16(), "sum_dtype": torch.float64},
            "sum_dtype=torch.float64: for products in torch.bfloat16 expected torch.float32, torch.bfloat16, or None",
        ),
        (
            {"hidden": torch.zeros(3, 4)},
            r"expected hidden states \[..., H\] and a weight \[V, H\], got \(3, 4\) and \(5, 2\)",
        ),
        ({"bias": torch.zeros(3)}, r"expected a bias of shape \(5,\), one for each row of the weight, got \(3,\)"),
        ({"hidden": HIDDEN.bfloat16()}, "hidden states are torch.bfloat16 and the weight is torch.float32; cast one"),
        (
            {"target": TARGET[:2]},
            r"expected a target of token ids, int64 of shape \(3,\), got torch.int64 of shape \(2,\)",
        ),
        ({"target": TARGET.float()}, "got torch.float32 of shape"),
        (
            {"target": torch.tensor([1, 5, -1])},
            "target has 2 entries outside the vocabulary of 5, first 5; expected 0 to 4, or",
        ),
    ],
)
@pytest.mark.parametrize("function", [linear_logprobs, linear_cross_entropy])
def test_what_does_not_fit_is_refused(function: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, **options}
    with pytest.raises(ValueError, match=message):
        function(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("target"), **arguments)


def test_logits_and_targets_must_fit() -> None:
    with pytest.raises(ValueError, match=r"chunked_logprobs: expected a target of token ids, int64 of shape \(3,\)"):
        chunked_logprobs(torch.zeros(3, 5), TARGET[:1])
    with pytest.raises(ValueError, match="chunked_logprobs: expected floating-point numbers as its first argument"):
        chunked_logprobs(torch.zeros(3, 5, dtype=torch.int64), TARGET)


def test_choices_are_named() -> None:
    with pytest.raises(ValueError, match="reduction: expected 'mean' or 'sum' or 'none', got 'avg'"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET, reduction="avg")
    with pytest.raises(ValueError, match="label_smoothing=2: expected a number from 0 to 1"):
        LinearLossHead(2, 5, label_smoothing=2)
    with pytest.raises(ValueError, match="z_loss=-1: expected a number that is not negative"):
        LinearLossHead(2, 5, z_loss=-1)
    with pytest.raises(ValueError, match="z_loss=nan: expected a number that is not negative"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGET, z_loss=float("nan"))
    with pytest.raises(
        ValueError, match="output: expected 'loss' or 'logprobs' or 'logprobs_and_entropy', got 'entropy'"
    ):
        LinearLossHead(2, 5)(HIDDEN, TARGET, "entropy")


def test_a_missing_triton_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    kernels.has_triton.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert not kernels.has_triton("it is slower")
    assert not kernels.has_triton("it is slower")  # no second warning, which would be an error here
    kernels.has_triton.cache_clear()
