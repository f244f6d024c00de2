"""Compares a policy with a precision string: a contradiction in what is computed is refused, other differences are reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lightning_mfsdp.engine import MixedPrecisionPolicy

__all__ = ["refuse_contradiction", "replaced_fields"]

# Compute dtypes that a policy may have with each string, its own dtype first. Under autocast float32 weights are cast where they are used.
_COMPUTE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "32-true": (torch.float32,),
    "bf16-mixed": (torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16,),
    "16-mixed": (torch.float16, torch.float32),
    "16-true": (torch.float16,),
    "64-true": (torch.float64,),
    "transformer-engine": (torch.bfloat16, torch.float32),
    "fp8": (torch.bfloat16, torch.float32),
}
# Dtypes of main weights, which the optimizer updates, that a policy may have: float32 loses nothing, except of float64.
_MAIN_DTYPES = {
    name: dtypes if name == "64-true" else tuple(dict.fromkeys((*dtypes, torch.float32)))
    for name, dtypes in _COMPUTE_DTYPES.items()
}


def refuse_contradiction(precision: str, policy: MixedPrecisionPolicy, plugin: str) -> None:
    """Check that a policy is compatible with a precision string.

    Args:
        precision: One of the strings.
        policy: Given by the user.
        plugin: Name of the class that takes both, for the message.

    Raises:
        ValueError: They contradict each other on what is computed, or on what the optimizer updates.
    """
    for field, dtypes_of in (("compute_dtype", _COMPUTE_DTYPES), ("main_params_dtype", _MAIN_DTYPES)):
        dtype, allowed = getattr(policy, field), dtypes_of[precision]
        if dtype is None or dtype in allowed:
            continue
        fitting = [
            f'"{name}"'
            for name, dtypes in dtypes_of.items()
            if dtypes[0] is dtype and name not in ("transformer-engine", "fp8")
        ]
        ways = f"use precision={' or '.join(fitting)}, if the policy is meant"
        default = ""
        if precision == "32-true":
            default = " (also the default if no precision is passed)"
            ways += (
                f', or plugins=[{plugin}("32-true", policy=policy)], where the policy decides alone, without autocast'
            )
        raise ValueError(
            f"precision={precision!r}{default} and policy.{field}={dtype} contradict each other: expected "
            f"{' or '.join(map(str, allowed))}, or None, beside that precision. Set {field} so, or {ways}"
        )


def replaced_fields(precision: str, policy: MixedPrecisionPolicy, alone: MixedPrecisionPolicy) -> str:
    """A sentence on how a policy differs from the string's; empty if it does not.

    Args:
        precision: The string.
        policy: The one in use.
        alone: The policy that the string stands for.
    """
    changed = [
        f"{field.name}={_in_short(value)} instead of {_in_short(usual)}"
        for field in dataclasses.fields(policy)
        if (value := getattr(policy, field.name)) != (usual := getattr(alone, field.name))
        and field.name != "weight_codecs"
    ]
    if not changed:
        return ""
    return f"mfsdp: the policy replaces what precision={precision!r} stands for: {', '.join(changed)}"


def _in_short(value: Any) -> str:
    """A value of a field, without a list of many classes."""
    return f"{len(value)} kinds of modules" if isinstance(value, tuple) and len(value) > 2 else repr(value)
