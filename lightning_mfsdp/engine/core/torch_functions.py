"""Classifies torch functions by name: what each does with its tensors. `__torch_function__` of sharded tensors checks this first.

describes      p.shape, p.is_leaf, p.numel()        describes a tensor and reads no value
makes_alike    torch.zeros_like(p), p.new_empty(3)  makes another tensor of its shape, dtype or device
copies         p.clone(), p.to(dtype)               the same values in other memory, sharded as they were
computes       p * 2, p.norm(), p[:2], p.T          everything else, except for a few that return a tensor unchanged
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = [
    "computes",
    "copies",
    "describes",
    "is_in_place",
    "makes_alike",
    "makes_number",
    "uses_values",
    "writes_by_position",
    "written_argument",
    "zeroes",
]

_DESCRIBES = frozenset(
    (
        *("__set__", "__delete__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
        *(
            "storage_offset",
            "element_size",
            "untyped_storage",
            "get_device",
            "has_names",
            "_has_symbolic_sizes_strides",
        ),
        *(
            "result_type",
            "can_cast",
            "requires_grad_",
            "retain_grad",
            "register_hook",
            "register_post_accumulate_grad_hook",
        ),
    )
)
# Attributes that expose values.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_TRANSPOSED = frozenset((Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__))  # type: ignore[attr-defined]
_COPIES = frozenset(
    ("clone", "contiguous", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type_as", "type")
)
# Of which nothing can be differentiated, or whose result is sharded as the tensor is.
_SHOWS = frozenset(
    (
        *("__repr__", "__str__", "__format__", "__contains__", "__array__", "numpy", "tolist", "equal", "allclose"),
        *("isclose", "detach", "detach_", "backward", "to_local", "data_ptr", "storage", "_typed_storage"),
        *("pin_memory", "share_memory_"),
    )
)
# They write to positions of a tensor.
_BY_POSITION = frozenset(
    (
        *("__setitem__", "index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "scatter_add_", "put_"),
        *("masked_scatter_", "fill_diagonal_", "triu_", "tril_"),
    )
)


def describes(function: Any) -> bool:
    """Whether it describes a tensor and reads no value."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", "") not in _VALUES
    return name in _DESCRIBES or (name.startswith(("is_", "_is_")) and name != "is_nonzero")


def makes_alike(function: Any) -> bool:
    """Whether it makes another tensor like one, with any values."""
    name = getattr(function, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def copies(function: Any) -> bool:
    """Whether it copies a tensor, perhaps to another dtype, and leaves it sharded as it was."""
    return getattr(function, "__name__", "") in _COPIES


def computes(function: Any) -> bool:
    """Whether it computes with a tensor's values, or exposes some of them."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return function in _TRANSPOSED
    return not (name in _SHOWS or name in _COPIES or describes(function) or makes_alike(function))


def makes_number(function: Any) -> bool:
    """Whether it makes a Python number: `torch.tensor([...])` asks for that where tensors of other classes have no memory."""
    return getattr(function, "__name__", "") in ("__float__", "__int__", "__bool__", "__index__", "__complex__", "item")


def uses_values(function: Any) -> bool:
    """Whether it reads or writes a tensor's values."""
    return not (describes(function) or makes_alike(function) or getattr(function, "__name__", "") == "detach_")


def zeroes(function: Any) -> bool:
    """Whether it sets a tensor, or each of a list, to zero."""
    return getattr(function, "__name__", "") in ("zero_", "_foreach_zero_")


def writes_by_position(function: Any) -> bool:
    """Whether it needs all rows in order to write some."""
    return getattr(function, "__name__", "") in _BY_POSITION


def is_in_place(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it writes to an argument, judging by its name and `out=`."""
    name = getattr(function, "__name__", "")
    return (
        name in ("__setitem__", "all_reduce")
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("out") is not None
    )


def written_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function that writes in place writes to."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[:1] or [kwargs.get("input"), kwargs.get("self"), kwargs.get("tensor")]
