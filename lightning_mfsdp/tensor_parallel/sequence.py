"""Megatron's sequence parallelism: between attention and MLPs, each rank of a tensor axis has a part of every sequence.

Inside a stack of layers, what is whole on every rank otherwise, residuals and the inputs of norms, takes 1/t of the memory. An all-gather
before and a reduce-scatter after each attention or MLP take the place of all-reduces in backward and forward; they move as many numbers.

    stack     the first layer takes its part of the sequences, and the output of the last one is gathered
    inside    a module with layers divided by output features, and one by input features: it gets whole sequences, and returns parts
    others    norms, of which each rank computes its tokens: the gradients of their weights are partial sums

Sequences are divided where a backward may follow: in training mode, or with gradients enabled. Otherwise layers compute as without it, so
evaluation and generation may have sequences of any length.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part
from lightning_mfsdp.tensor_parallel.division import planned_division
from lightning_mfsdp.tensor_parallel.exchange import (
    TensorGroup,
    gathered,
    own_part,
    sequence_gathered,
    sequence_summed,
    summed,
)
from lightning_mfsdp.tensor_parallel.layers import Change
from lightning_mfsdp.tensor_parallel.styles import Style, Target

__all__ = ["SequenceStacks", "find_stacks"]

_NORM = re.compile("Norm")
_SEQUENCE = 1  # the dim of tokens
# Styles of layers divided by output features, and by input features.
_FIRST = ("colwise", "packed_colwise", "colwise_gather_output")
_LAST = ("rowwise", "rowwise_split_input")


@dataclass(frozen=True, kw_only=True)
class _Inside:
    """An attention layer or an MLP: a module with divided layers."""

    name: str
    module: nn.Module
    first: list[nn.Module] = field(default_factory=list)  # divided by output features
    last: list[nn.Module] = field(default_factory=list)  # divided by input features


class SequenceStacks:
    """The stacks of a model in which sequences are divided.

    Args:
        stacks: The layers of each, in order, with their names.
        insides: The modules in them that get whole sequences, by the ids of their divided layers.
    """

    def __init__(self, stacks: Sequence[Mapping[str, nn.Module]], insides: Sequence[_Inside]) -> None:
        self._stacks = stacks
        self._insides = insides
        self._first = {id(layer) for inside in insides for layer in inside.first}
        self._last = {id(layer) for inside in insides for layer in inside.last}

    def before(self, layer: nn.Module, change: Change | None) -> Change | None:
        """What is done to the inputs of a divided layer, in place of `change`."""
        return _Unless(layer, change) if change is not None and id(layer) in self._first else change

    def after(self, layer: nn.Module, change: Change | None) -> Change | None:
        """What is done to its output."""
        return _summed_for(layer) if id(layer) in self._last else change

    def has(self, layer: nn.Module) -> bool:
        """Whether its output is added up into parts of sequences."""
        return id(layer) in self._last

    def whole_parameters(self) -> set[int]:
        """Ids of the modules whose parameters see parts of sequences."""
        return {id(module) for _, module in self._others()}

    def install(self, group: TensorGroup) -> None:
        """Hooks around stacks and modules inside, and a note of the gradients that are partial sums."""
        for stack in self._stacks:
            layers = list(stack.values())
            layers[0].register_forward_pre_hook(_Part(group), with_kwargs=True, prepend=True)
            layers[-1].register_forward_hook(_Whole(group))
        for inside in self._insides:
            inside.module.register_forward_pre_hook(_WholeInput(group), with_kwargs=True, prepend=True)
            for layer in inside.last:
                if "bias" in layer._parameters and layer._parameters["bias"] is not None:
                    planned_division(inside.name, layer).summed["bias"] = group
        for name, module in self._others():
            keys = [key for key, _ in module.named_parameters(recurse=False)]
            planned_division(name, module).summed |= dict.fromkeys(keys, group)

    def _others(self) -> list[tuple[str, nn.Module]]:
        within = {id(part) for inside in self._insides for part in inside.module.modules()}
        return [
            (f"{name}.{path}" if path else name, module)
            for stack in self._stacks
            for name, layer in stack.items()
            for path, module in layer.named_modules()
            if id(module) not in within and next(module.parameters(recurse=False), None) is not None
        ]


def find_stacks(model: nn.Module, targets: Sequence[tuple[Target, Style, Mapping[str, Part]]]) -> SequenceStacks:
    """The stacks of layers between which sequences of a model can be divided.

    Raises:
        ShardingError: There is no stack of layers whose modules are pairs of divided layers and norms; names what does not fit.
    """
    parents = dict(model.named_modules())
    insides: dict[str, _Inside] = {}
    for target, style, _ in targets:
        if target.in_adapter:
            raise ShardingError(
                f"sequence_parallel=True: {target.name} is inside an adapter, whose own factors would see whole sequences on every rank;"
                " leave sequence_parallel out"
            )
        if style.name not in (*_FIRST, *_LAST) or target.key is not None:
            continue
        path = target.name.rpartition(".")[0]
        inside = insides.setdefault(path, _Inside(name=path, module=target.parent))
        (inside.first if style.name in _FIRST else inside.last).append(target.module)
    pairs = {path: inside for path, inside in insides.items() if inside.first and inside.last}
    lists = {path: module for path, module in parents.items() if isinstance(module, nn.ModuleList)}
    stacks: list[dict[str, nn.Module]] = []
    chosen: list[_Inside] = []
    for path, layers in lists.items():
        names = [f"{path}.{key}" if path else key for key, _ in layers.named_children()]
        pairs_of_layers = [
            [pairs[pair_path] for pair_path in pairs if pair_path.startswith(f"{name}.")] for name in names
        ]
        if names and all(pairs_of_layers):
            stacks.append({name: parents[name] for name in names})
            chosen += [inside for pairs_of_layer in pairs_of_layers for inside in pairs_of_layer]
    if not stacks:
        raise ShardingError(
            f"sequence_parallel=True: {type(model).__name__} has no list of layers (nn.ModuleList) in each of which modules have layers"
            ' with the styles "colwise" and "rowwise"; leave sequence_parallel out'
        )
    sequence_stacks = SequenceStacks(stacks, chosen)
    _check(sequence_stacks, stacks, chosen, targets)
    return sequence_stacks


def _check(
    sequence_stacks: SequenceStacks,
    stacks: Sequence[Mapping[str, nn.Module]],
    insides: Sequence[_Inside],
    targets: Sequence[tuple[Target, Style, Mapping[str, Part]]],
) -> None:
    for name, module in sequence_stacks._others():
        if not _NORM.search(type(module).__name__):
            raise ShardingError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) would see parts of sequences, and only norms are known to treat"
                " each token by itself; leave sequence_parallel out"
            )
    for stack in stacks:
        for name, layer in stack.items():
            for path, part in layer.named_modules():
                if isinstance(part, nn.Dropout) and part.p > 0:
                    raise ShardingError(
                        f"sequence_parallel=True: {name}.{path} drops out {part.p:g} of the numbers, and all ranks of a tensor axis would"
                        " drop the same places of different tokens; set it to 0, or leave sequence_parallel out"
                    )
    divided_layers = {id(layer) for inside in insides for layer in (*inside.first, *inside.last)}
    for target, style, _ in targets:
        for inside in insides:
            is_within = target.name.startswith(f"{inside.name}.") and target.key is None
            if (
                is_within
                and id(target.module) not in divided_layers
                and style.name not in ("replicated_with_grad_allreduce", "local_params")
            ):
                raise ShardingError(
                    f"sequence_parallel=True: {target.name} has the style {style.name!r}, which is not supported inside {inside.name}"
                    f" ({type(inside.module).__name__}); leave sequence_parallel out"
                )


def _divides(module: nn.Module) -> bool:
    """Whether a backward may follow this forward. Reentrant checkpoints run the first one without gradients, in training mode."""
    return module.training or torch.is_grad_enabled()


class _Unless:
    """A `Change` that is done where sequences are whole."""

    def __init__(self, layer: nn.Module, change: Change) -> None:
        self._layer = [layer]  # in a list: it is no child of what holds this
        self._change = change

    def __call__(self, tensor: Tensor, group: TensorGroup) -> Tensor:
        return tensor if _divides(self._layer[0]) else self._change(tensor, group)


def _summed_for(layer: nn.Module) -> Change:
    """The sum over ranks of a layer's outputs, of which each keeps its part of the sequences where they are divided."""

    def change(tensor: Tensor, group: TensorGroup) -> Tensor:
        return sequence_summed(tensor, group, _SEQUENCE) if _divides(layer) else summed(tensor, group)

    return change


class _Changed(ABC):
    """A hook that changes the hidden states among the arguments: the first one, or that of this name."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not _divides(module):
            return None
        if args and isinstance(args[0], Tensor):
            return (self.changed(module, args[0]), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": self.changed(module, kwargs["hidden_states"])}
        raise ShardingError(
            f"sequence_parallel=True: {type(module).__name__} was called without hidden states, as its first argument or by that name;"
            " leave sequence_parallel out"
        )

    @abstractmethod
    def changed(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """The tensor that a module gets in place of its hidden states, `[B, S, D]`."""


class _Part(_Changed):
    """A hook before the first layer of a stack, which gets this rank's part of the sequences."""

    def changed(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """This rank's part, `[B, S / t, D]`, of whole sequences."""
        if hidden.ndim != 3 or hidden.shape[_SEQUENCE] % self._group.size:
            raise ShardingError(
                f"sequence_parallel=True: {type(module).__name__} got hidden states of shape {tuple(hidden.shape)}, expected [B, S, D] with"
                f" S divisible by the {self._group.size} tensor ranks. Pad sequences; to generate, call the model's eval() first"
            )
        return own_part(hidden, self._group, _SEQUENCE)


class _WholeInput(_Changed):
    """A hook before a module with divided layers, which gets whole sequences."""

    def changed(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Whole sequences, `[B, S, D]`, of the parts of all ranks."""
        return sequence_gathered(hidden, self._group, _SEQUENCE)


class _Whole:
    """A hook after the last layer of a stack, whose output is gathered."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not _divides(module):
            return None
        if isinstance(output, Tensor):
            return gathered(output, self._group, _SEQUENCE)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (gathered(output[0], self._group, _SEQUENCE), *output[1:])
        raise ShardingError(
            f"sequence_parallel=True: {type(module).__name__} returned {type(output).__name__}, expected hidden states, or a tuple that"
            " begins with them; leave sequence_parallel out"
        )
