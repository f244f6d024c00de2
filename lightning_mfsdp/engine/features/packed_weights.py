"""Packed weights: frozen parameters, such as a base model in 4 bits under adapters, whose numbers are sharded and gathered as bytes.

Rows of such a parameter are no rows of a weight, and its numbers in another dtype would be another weight. So before a unit is sharded,
each becomes an ordinary parameter of bytes, which the engine never casts, since its dtype is an integer's:

    tensors inside (torchao)       all of them, scales too, become one parameter `[bytes]`. A parametrization of the module makes the
                                   tensor again over the gathered bytes, without a copy, where a layer reads its weight
    state beside (bitsandbytes)    packed numbers become uint8, whatever `quant_storage` was, and the layer reads the parameter itself.
                                   The scales in `quant_state` stay whole on each rank, with the first rank's values

What a layer computes with is in the gathered memory, as any weight, and backward gathers it into the same place again.

Alternatives considered: a codec (core/codec.py) quantizes main weights, which a frozen weight does not have, and its bytes have the shape
of the parameter. bitsandbytes' weights as one parameter with their scales: its layers look for `quant_state` at the parameter in
`_parameters`, and state dicts would have other names than without sharding.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from lightning_mfsdp.base.errors import EngineStateError, ShardingError
from lightning_mfsdp.base.packed import has_state_beside, has_tensors_inside, is_packed
from lightning_mfsdp.engine.core.group import owner_of, place_of

__all__ = ["as_bytes", "tensors_beside"]

_TEXT_BYTES = 512
_RECIPE_BYTES = (
    2048  # so long that few recipes need more: an entry of another shape would be named instead of what differs
)
_OF_THIS_RUN = ("device", "requires_grad")  # what a recipe's context has besides
_ALIGNMENT_BYTES = 16  # of each tensor inside: the widest vector load of a GPU thread


def as_bytes(
    module: nn.Module, device: torch.device, is_other: Callable[[nn.Parameter], bool]
) -> list[Callable[[], None]]:
    """Turn the packed weights in `module` into parameters of bytes, on `device`.

    Args:
        module: Its packed parameters are frozen and have values.
        device: Of the mesh. bitsandbytes packs what is not packed yet when it is moved there.
        is_other: Whether a parameter is not to be changed: ignored, or stored by a codec.

    Returns:
        What restores the modules, once their parameters are whole again.

    Raises:
        ShardingError: A packed parameter is trained or on the meta device; with its name.
    """
    undo: list[Callable[[], None]] = []
    become: dict[int, tuple[nn.Parameter, nn.Parameter, _Recipe]] = {}  # several modules may hold one
    for path, child in module.named_modules():
        sites = [
            (key, parameter)
            for key, parameter in child._parameters.items()
            if parameter is not None and is_packed(parameter) and not is_other(parameter)
        ]
        for key, parameter in sites:
            _refuse_unfit(f"{path}.{key}" if path else key, parameter)
        if any(has_state_beside(parameter) for _, parameter in sites):
            child._apply(partial(_moved, device=device), recurse=False)
            undo += [*_keep_format(child), *_save_and_load(child)]
        for key, parameter in sites:
            if has_state_beside(parameter):
                _store_as_bytes(child, parameter)
                continue
            if id(parameter) not in become:
                recipe = _Recipe.of(parameter)
                raw = nn.Parameter(recipe.bytes_of(parameter, device), requires_grad=False)
                become[id(parameter)] = parameter, raw, recipe
            _, raw, recipe = become[id(parameter)]
            setattr(child, key, raw)
            parametrize.register_parametrization(child, key, _FromBytes(recipe), unsafe=True)
            undo.append(partial(_restore, weakref.ref(child), key, recipe))
        if sites:
            undo.append(child.register_forward_hook(_note_versions).remove)
    return undo


def tensors_beside(parameter: nn.Parameter) -> list[Tensor]:
    """What a weight of bitsandbytes has beside its bytes, such as scales; none for any other parameter."""
    return list(_tensors_of(parameter.quant_state)) if has_state_beside(parameter) else []  # type: ignore[attr-defined]


def _tensors_of(state: Any) -> Iterator[Tensor]:
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
        elif type(value) is type(state):  # of the scales' own scales
            yield from _tensors_of(value)


def _note_versions(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: have the backward of `module` compare the versions of its weights, which its library leaves undone.

    What the libraries' functions keep they keep as attributes of a node. Autograd compares versions of what is saved, and so raises where
    an ordinary weight is read that was resharded, or written, since the forward.
    """
    node = output.grad_fn if isinstance(output, Tensor) else None
    if node is None or torch.compiler.is_compiling():
        return
    versions = [(parameter, parameter._version) for parameter in _bytes_of(module) if not _is_left_to_graphs(parameter)]

    def compare(_: Any) -> None:
        for parameter, version in versions:
            if parameter._version != version:
                owner = owner_of(parameter)
                name = "of a module that is no longer sharded" if owner is None else owner[1].name
                raise EngineStateError(
                    f"a backward reads the packed weight {name}, which was resharded or written after the forward that used it. If the "
                    "backward begins at something that a forward leaves elsewhere than in its result, in a hook or in an attribute, pass "
                    'side_doors="follow"; otherwise call it before weights are written'
                )

    node.register_prehook(compare)


def _is_left_to_graphs(parameter: nn.Parameter) -> bool:
    """Whether its unit is followed (side_doors.py): what still refers to gathered memory then keeps it, with its values."""
    place = place_of(parameter)
    weights = None if place is None else place[0].weights
    return weights is not None and weights.is_sharded and weights.client.home is None


def _bytes_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are the bytes of packed weights of a module."""
    for parameter in module._parameters.values():
        if parameter is not None and has_state_beside(parameter):
            yield parameter
    for made in getattr(module, "parametrizations", {}).values():
        if isinstance(made[0], _FromBytes):
            yield made.original


def _refuse_unfit(name: str, parameter: nn.Parameter) -> None:
    kind = type(parameter).__name__
    if parameter.is_meta:
        raise ShardingError(
            f"fully_shard: parameter {name} is packed ({kind}) and on the meta device, where it has no numbers; build its module with "
            "memory (from_pretrained(quantization_config=...) of transformers does)"
        )
    if parameter.requires_grad:
        raise ShardingError(
            f"fully_shard: parameter {name} is packed ({kind}) and requires a gradient, which no optimizer could add to packed numbers; "
            "freeze it (requires_grad_(False)) and train adapters beside it, or do not quantize its layer"
        )


# -- tensors inside ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A plain tensor inside: where its bytes are, and how they are read."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    def over(self, raw: Tensor) -> Tensor:
        stop = self.start + self.shape.numel() * self.dtype.itemsize
        return raw[self.start : stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Recipe:
    """How a tensor is made of bytes.

    Attributes:
        kind: Its class.
        inside: By attribute, the tensors inside, which may have others inside.
        context: What the class keeps of itself.
    """

    kind: Any
    inside: dict[str, _Piece | _Recipe]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, start: int = 0) -> _Recipe:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inside: dict[str, _Piece | _Recipe] = {}
        for name in names:
            value = getattr(tensor, name)
            if has_tensors_inside(value):
                inside[name] = nested = cls.of(value, start)
                start = nested.stop
            else:
                inside[name] = _Piece(start, value.dtype, value.shape)
                start += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(type(tensor), inside, context, tensor.size(), tensor.stride())

    @property
    def pieces(self) -> Iterator[_Piece]:
        """All of them, also of tensors inside tensors, in the order of their bytes."""
        for value in self.inside.values():
            if isinstance(value, _Recipe):
                yield from value.pieces
            else:
                yield value

    @property
    def stop(self) -> int:
        """Where the bytes end."""
        ends = [piece.start + piece.shape.numel() * piece.dtype.itemsize for piece in self.pieces]
        return -(-max(ends, default=0) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def described(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, by name: classes, shapes, dtypes, and numbers such as a block size."""
        described = {
            "class": self.kind.__name__,
            "shape": str(list(self.size)),
            **dict(_named_values("context", self.context)),
        }
        for name, value in self.inside.items():
            if isinstance(value, _Recipe):
                described |= {f"{name}.{part}": of_part for part, of_part in value.described().items()}
            else:
                described[name] = f"{value.dtype} {list(value.shape)}"
        return described

    def over(self, raw: Tensor) -> Tensor:
        """The tensor over its bytes, `[bytes]` uint8. Nothing is copied."""
        inside = {name: value.over(raw) for name, value in self.inside.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(inside, self.context, self.size, self.stride)
        return tensor

    def bytes_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Its bytes, `[bytes]` uint8."""
        raw = torch.zeros(self.stop, dtype=torch.uint8, device=device)
        for piece, value in zip(self.pieces, _plain_tensors(tensor), strict=True):
            piece.over(raw).copy_(value)
        return raw


def _named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a value, with a name for each part, as another process would find it: of objects of other kinds only the class."""
    if is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__name__
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    elif hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _OF_THIS_RUN:
                yield from _named_values(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _named_values(f"{name}.{number}", part)
    elif isinstance(value, (Enum, torch.dtype)):
        yield name, str(value)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    else:
        yield name, getattr(value, "__name__", type(value).__name__)


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    if not has_tensors_inside(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _plain_tensors(getattr(tensor, name))


class _FromBytes(nn.Module):
    """Parametrization of a weight: what the module reads is a tensor over the bytes that are its parameter.

    Checkpoints have the recipe as text beside the bytes, since as many bytes may be another weight.
    """

    def __init__(self, recipe: _Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def forward(self, raw: Tensor) -> Tensor:
        with torch.no_grad():
            whole = raw.full_tensor() if isinstance(raw, DTensor) else raw.detach()
            return self._recipe.over(whole)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        text = json.dumps(self._recipe.described()).encode()
        destination[f"{prefix}recipe"] = _padded(
            torch.tensor(list(text), dtype=torch.uint8, device="cpu"), _RECIPE_BYTES
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *_: Any
    ) -> None:
        if f"{prefix}recipe" not in state_dict:
            if strict:
                missing.append(f"{prefix}recipe")
            return
        saved, own = json.loads(bytes(state_dict[f"{prefix}recipe"].tolist())), self._recipe.described()
        names = dict.fromkeys((*own, *saved))
        differing = [
            f"{name} {saved.get(name)} and not {own.get(name)}" for name in names if saved.get(name) != own.get(name)
        ]
        if differing:
            before, after = prefix.rsplit("parametrizations.", 1)
            raise ValueError(_other_weight(f"{before}{after.partition('.')[0]}", differing))


def _restore(reference: weakref.ref[nn.Module], key: str, recipe: _Recipe) -> None:
    """Give a module its packed weight back, over bytes that are whole; modules that share it then share the bytes."""
    module = reference()
    if module is None or not parametrize.is_parametrized(module, key):
        return
    parametrize.remove_parametrizations(module, key, leave_parametrized=False)
    raw: Tensor = getattr(module, key)
    setattr(module, key, nn.Parameter(recipe.over(raw.detach()), requires_grad=False))


# -- state beside ------------------------------------------------------------------------------------------------------


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


def _store_as_bytes(module: nn.Module, parameter: Any) -> None:
    """Of packed numbers in a floating dtype, as FSDP of PyTorch needs them, only the bytes count; a cast would change them."""
    if parameter.dtype is not torch.uint8:
        parameter.data = parameter.data.view(torch.uint8).view(-1, 1)
    parameter.quant_storage = torch.uint8
    if "quant_storage" in vars(module):
        module.quant_storage = parameter.quant_storage


def _save_and_load(module: nn.Module) -> list[Callable[[], None]]:
    """Have a layer's checkpoint restore what it holds of the scales as text: their mean, where they are quantized, too (`nested_offset`).

    The text has as many bytes as digits, so it is padded: an entry of a state dict has one shape.
    """
    return [
        module.register_state_dict_post_hook(_pad_text).remove,
        module.register_load_state_dict_pre_hook(_load_text).remove,
    ]


def _texts(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The entries of a layer that are text, with the parameter that each is about."""
    for key, parameter in module._parameters.items():
        for name in [name for name in state_dict if name.startswith(f"{prefix}{key}.quant_state.")]:
            yield name, parameter


def _pad_text(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, _ in _texts(module, state_dict, prefix):
        text = state_dict[name]
        state_dict[name] = _padded(text, _TEXT_BYTES)


def _padded(text: Tensor, multiple: int) -> Tensor:
    """Text, `[bytes]` uint8, with spaces at its end, since an entry of a state dict has one shape."""
    return nn.functional.pad(text, (0, -len(text) % multiple), value=ord(" "))


def _other_weight(name: str, differing: list[str]) -> str:
    return f"{name}: the checkpoint has a packed weight of {', '.join(differing)}; load it into a model whose weights were quantized alike"


def _load_text(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in _texts(module, state_dict, prefix):
        state, saved = parameter.quant_state, json.loads(bytes(state_dict[name].tolist()))
        own = {"shape": list(state.shape), "blocksize": state.blocksize, "quant_type": state.quant_type}
        differing = [
            f"{key} {saved[key]} and not {value}" for key, value in own.items() if saved.get(key, value) != value
        ]
        if differing:  # as many bytes may be another weight
            raise ValueError(_other_weight(name.partition(".quant_state.")[0], differing))
        offset = saved.get("nested_offset")
        if offset is not None and state.offset is not None:
            state.offset.fill_(offset)


def _keep_format(module: Any) -> list[Callable[[], None]]:
    """Keep a layer of bitsandbytes from packing its bytes again in an evaluation on a CPU with AVX512, for good and for this rank alone."""
    repacks = vars(module).get("support_avx512bf16_for_cpu", False)
    if not repacks:
        return []
    module.support_avx512bf16_for_cpu = False
    this = weakref.ref(module)

    def restore() -> None:
        if (layer := this()) is not None:
            layer.support_avx512bf16_for_cpu = repacks

    return [restore]
