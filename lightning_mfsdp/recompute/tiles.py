"""in_tiles: computes a module that treats each token by itself for pieces of its sequence, one after the other.

Each piece is a checkpoint. Autograd runs later nodes first, so in backward a piece is recomputed and differentiated before the one in front
of it is: activations of one piece exist at a time. Autograd adds up what the pieces contribute to the gradient of a weight before it
passes it on, as for a module that is called several times.

Inputs of all pieces, views of the whole, are saved before the first piece is computed. A checkpoint around the module recomputes up to the
last tensor that was saved in it. That is the input of the last piece if nothing after the module saves a tensor, so it recomputes no piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.recompute.operators import MATMULS, operators_of
from lightning_mfsdp.recompute.replay import keeps_statistics, routers_in

__all__ = ["SavedPiece", "check_kept_operators", "check_token_wise", "in_tiles", "unnoticed_saves"]

# Other tokens of a sequence, or of a batch, have a part in a result.
_MIXING = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.RNNBase),
)
_MIXING_NAMES = re.compile(r"Attention|Attn|MHA|BatchNorm|InstanceNorm")
_SIMPLE = (type(None), bool, int, float, str)


def check_token_wise(name: str, module: nn.Module) -> None:
    """Raise a ValueError if a part of `module` is known to look at other tokens than the one that it computes."""
    for inner, part in reversed(list(module.named_modules())):  # a router is named, not the module around it
        if why := _mixes(part):
            whole = f"{name}.{inner}" if inner else name
            raise ValueError(
                f"Recompute: tiled_modules: {whole}, a {type(part).__name__}, {why}, and pieces of a sequence would change its result; "
                "choose modules that compute each token by itself, such as the MLP"
            )


def _mixes(part: nn.Module) -> str | None:
    """What a module does with several tokens at once, as far as its class says so."""
    if isinstance(part, (nn.LayerNorm, nn.RMSNorm)):
        return "normalizes over several dims" if len(part.normalized_shape) > 1 else None
    if any(routers_in(part)) or getattr(part, "dispatcher", None) is not None:
        return "routes the tokens of a batch together"
    if isinstance(part, _MIXING) or _MIXING_NAMES.search(type(part).__name__) or keeps_statistics(part):
        return "computes several tokens together"
    return None


def check_kept_operators(name: str, save_ops: Iterable[str]) -> None:
    """Raise a ValueError if results of matrix products, inside a tiled module too, are to be kept."""
    if kept := sorted(operators_of(save_ops) & MATMULS):
        raise ValueError(
            f"Recompute: save_ops keeps the results of {kept[0]} in {name} too, for all pieces of tiled_modules at once; leave out "
            'matrix products, as in save_ops=["attention"], or leave out tiled_modules'
        )


class SavedPiece:
    """The input of one piece, saved as autograd saves tensors: a checkpoint around it does not keep it, and recomputes it.

    Args:
        piece: The input.
    """

    def __init__(self, piece: Tensor) -> None:
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        self._handle: Tensor = _Save.apply(leaf, piece.detach())
        self._needs_grad = piece.requires_grad

    def take(self) -> Tensor:
        """The input for another forward, detached from what computed it. Once in each backward."""
        piece: Tensor
        (piece,) = self._handle.grad_fn.saved_tensors  # type: ignore[union-attr]
        return piece.detach().requires_grad_(self._needs_grad)


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def unnoticed_saves() -> AbstractContextManager[Any]:
    """Context in which a checkpoint around does not notice what is saved: tensors without elements, which it need not recompute."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def in_tiles(
    name: str,
    tiles: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    saves: bool,
) -> Tensor:
    """`function(saved, *args, **kwargs)`, piece by piece along dim -2 of the only tensor among its arguments.

    Args:
        name: Of the module, for messages.
        tiles: How many pieces, at most. All but the last have the same length.
        function: From `[..., L, D]` to `[..., L, E]` for any L; `saved` is the piece's `SavedPiece`, or `None`.
        args: Of the module's forward.
        kwargs: Of the module's forward.
        saves: Whether inputs of pieces are saved.

    Returns:
        `[..., S, E]` for a tensor `[..., S, D]`.

    Raises:
        ValueError: There is not exactly one tensor, it has no dim -2, or the result of a piece is not a tensor with a row for each token.
    """
    whole = _only_tensor(name, (*args, *kwargs.values()))
    pieces = torch.split(whole, max(1, -(-whole.shape[-2] // tiles)), dim=-2)
    saved = [SavedPiece(piece) if saves else None for piece in pieces]
    results = []
    for piece, kept in zip(pieces, saved, strict=True):
        positional = [piece if argument is whole else argument for argument in args]
        named = {key: piece if argument is whole else argument for key, argument in kwargs.items()}
        result = function(kept, *positional, **named)
        if not isinstance(result, Tensor) or result.shape[:-1] != piece.shape[:-1]:
            got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"Recompute: tiled_modules: {name} returned {got} for a piece of shape {tuple(piece.shape)}; expected one tensor with a "
                "row for each token, so that the rows of all pieces can be joined; leave this module out"
            )
        results.append(result)
    return results[0] if len(results) == 1 else torch.cat(results, dim=-2)


def _only_tensor(name: str, values: Sequence[Any]) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    others = [type(value).__name__ for value in values if not isinstance(value, (Tensor, *_SIMPLE))]
    if len(tensors) != 1 or others or tensors[0].dim() < 2:
        got = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"Recompute: tiled_modules: {name} was called with tensors of shapes {got}{f' and {others}' if others else ''}; expected one "
            "tensor [..., S, D], and otherwise only numbers, strings and None; leave this module out"
        )
    return tensors[0]
