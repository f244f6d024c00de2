"""Hooks that have a layer compute with its part of each weight, and the one layer for which hooks are not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.float8 import Float8Linear, float8_linear
from lightning_mfsdp.tensor_parallel.division import check_divided, is_divided
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, copied, copied_end, summed

__all__ = [
    "Change",
    "DividedDropout",
    "LossHeadPart",
    "RopePart",
    "RowwiseLinear",
    "SharedInput",
    "VocabularyPart",
    "WholeDropout",
    "WholeModule",
    "add_bias_after",
    "change_inputs",
    "change_output",
]

# In so many forwards dropout layers look at their inputs: a layer may be used in several places.
_FIRST_FORWARDS = 8

# What is done to a tensor before or after a layer.
Change = Callable[[Tensor, TensorGroup], Tensor]


def change_inputs(module: nn.Module, change: Change, group: TensorGroup) -> Any:
    """Before its forward, change every floating-point tensor among the arguments. Returns the handle of the hook."""
    return module.register_forward_pre_hook(_Before(change, group), with_kwargs=True)


def change_output(module: nn.Module, change: Change, group: TensorGroup) -> Any:
    """After its forward, change the tensor that it returns. Returns the handle of the hook."""
    return module.register_forward_hook(_After(change, group))


def add_bias_after(module: nn.Module, change: Change, group: TensorGroup) -> Any:
    """After the forward of a layer that returns its bias beside the product, change the product and add it. Returns the handle."""
    return module.register_forward_hook(_AddBiasAfter(change, group))


class _Before:
    def __init__(self, change: Change, group: TensorGroup) -> None:
        self._change = change
        self._group = group

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_divided(module)
        return tuple(map(self._changed, args)), {name: self._changed(value) for name, value in kwargs.items()}

    def _changed(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return self._change(value, self._group) if is_number else value


class _After:
    def __init__(self, change: Change, group: TensorGroup) -> None:
        self._change = change
        self._group = group

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        check_divided(module)
        if not isinstance(output, Tensor):
            raise ShardingError(
                f"{type(module).__name__} returned {type(output).__name__} under tensor parallelism, expected a tensor"
            )
        return self._change(output, self._group)


class _AddBiasAfter:
    def __init__(self, change: Change, group: TensorGroup) -> None:
        self._change = change
        self._group = group

    def __call__(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Tensor:
        check_divided(module)
        product, bias = output
        return self._change(product, self._group) + bias


class SharedInput:
    """Layers that get the same tensor from the forward of the module around them: its gradients are added up before one all-reduce."""

    def __init__(self) -> None:
        self._is_open = False  # that forward runs
        self._last: tuple[Tensor, int, Tensor] | None = None

    def install(self, parent: nn.Module) -> list[Any]:
        """Returns the handles of the hooks."""
        closes = parent.register_forward_hook(
            self._close, always_call=True
        )  # else a forward that raised would keep its input
        return [parent.register_forward_pre_hook(self._open), closes]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def copied(self, tensor: Tensor, group: TensorGroup) -> Tensor:
        """A `Change`: as the function, for the first layer; the same tensor for the others."""
        if not self._is_open or not torch.is_grad_enabled():
            return copied(tensor, group)
        if self._last is not None:
            before, version, result = self._last
            if before is tensor and version == tensor._version:  # and was not written in place since
                return result
        result = copied(tensor, group)
        self._last = (tensor, tensor._version, result)
        return result

    def _open(self, module: nn.Module, args: Any) -> None:
        self._is_open = True

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        self._is_open, self._last = False, None


class VocabularyPart:
    """Hooks of an embedding that has a part of the rows: tokens of other ranks become zeros, and the sum over all ranks is whole."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._is_elsewhere: Tensor | None = None  # of the call that runs

    def install(self, module: nn.Embedding) -> list[Any]:
        """Returns the handles of the hooks."""
        before = module.register_forward_pre_hook(self._localize, with_kwargs=True)
        return [before, module.register_forward_hook(self._complete)]

    def _localize(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        check_divided(module)
        tokens: Tensor = args[0] if args else kwargs["input"]
        rows = module.weight.shape[0]
        local = tokens - self._group.rank * rows
        is_elsewhere = torch.zeros_like(tokens, dtype=torch.bool)
        # What no rank has stays out of range on the first or on the last one, where the embedding reports it.
        if self._group.rank > 0:
            is_elsewhere |= local < 0
        if self._group.rank < self._group.size - 1:
            is_elsewhere |= local >= rows
        self._is_elsewhere = is_elsewhere
        return (local.masked_fill(is_elsewhere, 0),), {}

    def _complete(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_elsewhere, self._is_elsewhere = self._is_elsewhere, None
        assert is_elsewhere is not None
        return summed(output.masked_fill(is_elsewhere.unsqueeze(-1), 0), self._group)


class LossHeadPart:
    """Hooks of a `LinearLossHead` that has a part of the rows: losses and log-probabilities are those of the whole vocabulary.

    The functions that compute these add up the gradients of the hidden states. Logits are treated as the output of any other layer.
    """

    def __init__(self, group: TensorGroup, before: Change | None, after: Change | None) -> None:
        self._group = group
        self._before_logits = before
        self._after_logits = after

    def install(self, module: nn.Linear) -> list[Any]:
        """Returns the handles of the hooks."""
        before = module.register_forward_pre_hook(self._before, with_kwargs=True)
        return [before, module.register_forward_hook(self._after, with_kwargs=True)]

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if _has_target(args, kwargs):
            check_divided(module)
            return args, {**kwargs, "vocab_group": self._group.group}
        if self._before_logits is None:
            return args, kwargs
        return _Before(self._before_logits, self._group)(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if _has_target(args, kwargs) or self._after_logits is None:
            return output
        return _After(self._after_logits, self._group)(module, args, output)


def _has_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("target")) is not None


class RopePart:
    """The last numbers of a layer's output are used as they are by the heads of each rank, so their gradients are summed."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, output: Tensor, group: TensorGroup) -> Tensor:
        """A `Change` of the output: its last numbers get the gradients of all ranks."""
        return copied_end(output, group, self._size)


class WholeModule:
    """A hook of a module that no rule is for: its inputs are whole, or the gradients of its parameters would be partial sums unnoticed.

    The first forward that has gradients decides.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_checked = False

    def install(self, module: nn.Module) -> Any:
        """Returns the handle of the hook."""
        return module.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_checked or not torch.is_grad_enabled():
            return
        self._is_checked = True
        if any(isinstance(value, Tensor) and is_divided(value) for value in (*args, *kwargs.values())):
            raise ShardingError(
                f"{self._name} ({type(module).__name__}): its input is a part of a tensor, so the gradients of its parameters are partial"
                f' sums. Add the rule "{_rule(self._name)}": "replicated_with_grad_allreduce" to the plan (model.tp_plan of a transformers'
                " model)."
            )


class WholeDropout:
    """A hook of a dropout layer: its inputs are whole. Ranks draw equal numbers, and would drop the same places of different parts.

    The first forwards of training decide.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unchecked = _FIRST_FORWARDS

    def install(self, module: nn.Module) -> Any:
        """Returns the handle of the hook."""
        return module.register_forward_pre_hook(self._check)

    def _check(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        drops = module.training and getattr(module, "p", 0) > 0
        if not self._unchecked or not drops or not torch.is_grad_enabled():
            return
        self._unchecked -= 1
        if any(isinstance(argument, Tensor) and is_divided(argument) for argument in args):
            raise ShardingError(
                f"{self._name} ({type(module).__name__}): its input is a part of a tensor, and dropout would be equal for the parts of"
                f" different tensor ranks. {_advice(self._name, module)}"
            )


def _advice(name: str, dropout: nn.Module) -> str:
    if type(dropout) is nn.Dropout:
        return f'Add the rule "{_rule(name)}": "dropout_of_parts" to the plan (model.tp_plan of a transformers model).'
    return "Set its probability to 0, or put it where the tensor is whole, such as behind a rowwise layer."


def _rule(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


class DividedDropout(nn.Dropout):
    """Dropout of a part of a tensor, along the last dim. All ranks draw the mask of the whole tensor, as one process would.

    The first forwards with gradients find out whether it is used for whole tensors, too.
    """

    tensor_group: TensorGroup
    name: str
    unchecked: int

    @classmethod
    def install(cls, name: str, module: nn.Module, group: TensorGroup) -> list[Any]:
        """Give an `nn.Dropout` this class, which has other random numbers than hooks could give it. Returns no handles."""
        module.__class__ = cls
        module.tensor_group, module.name, module.unchecked = group, name, _FIRST_FORWARDS  # type: ignore[assignment]
        return []

    def forward(self, input: Tensor) -> Tensor:
        """As of `nn.Dropout`; never in place."""
        if not self.training or self.p == 0:
            return input
        if self.unchecked and input.grad_fn is not None and torch.is_grad_enabled():
            self.unchecked -= 1
            if not is_divided(input):
                raise ShardingError(
                    f"{self.name} has the style 'dropout_of_parts' and got a whole tensor of shape {list(input.shape)}, for which tensor"
                    " ranks would draw different masks. Use one layer for parts and another one for whole tensors, or leave the rule out."
                )
        # Ranks have equal random states, so masks of parts would be equal for different parts of a tensor.
        whole = input.new_ones(*input.shape[:-1], input.shape[-1] * self.tensor_group.size)
        mask = F.dropout(whole, self.p).chunk(self.tensor_group.size, -1)[self.tensor_group.rank]
        return input * mask.contiguous()


class RowwiseLinear(nn.Linear):
    """A linear layer with a part of the columns: the bias is added once, to the sum over all ranks.

    A layer with a bias is given this class, because `nn.Linear` adds its bias to the term of every rank.
    """

    tensor_group: TensorGroup
    total: Change
    multiply: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def install(cls, module: nn.Linear, total: Change, group: TensorGroup) -> None:
        """Give a layer this class. One that multiplies in 8 bits still does."""
        multiply = float8_linear if isinstance(module, Float8Linear) else F.linear
        module.__class__ = cls
        module.tensor_group, module.total, module.multiply = group, total, multiply  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """As of `nn.Linear`; the input is a part, and the output is whole."""
        check_divided(self)
        total = self.total(self.multiply(input, self.weight), self.tensor_group)
        return total + self.bias.to(total.dtype)  # under autocast, the bias has another one
