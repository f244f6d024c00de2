"""Style: says which parameters of a module are divided, and what is exchanged before and after its forward; with the table of all.

Their names are those of transformers' plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part
from lightning_mfsdp.float8 import MULTIPLE, Float8Linear
from lightning_mfsdp.te import parts as te
from lightning_mfsdp.tensor_parallel.division import planned_division
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, copied, gathered, own_part, summed
from lightning_mfsdp.tensor_parallel.layers import (
    Change,
    DividedDropout,
    LossHeadPart,
    RopePart,
    RowwiseLinear,
    VocabularyPart,
    add_bias_after,
    change_inputs,
    change_output,
)

__all__ = ["REFUSED", "STYLES", "Kind", "Style", "Target", "is_linear", "style_named"]


Kind = Literal["linear", "embedding", "dropout"]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, of PyTorch or of Transformer Engine."""
    return isinstance(module, nn.Linear) or te.is_linear(module)


_CLASSES: Mapping[Kind, type[nn.Module]] = {"linear": nn.Linear, "embedding": nn.Embedding, "dropout": nn.Dropout}
_IS: Mapping[Kind, Callable[[nn.Module], bool]] = {
    "linear": is_linear,
    "embedding": lambda module: isinstance(module, nn.Embedding),
    "dropout": lambda module: type(module) is nn.Dropout,  # the forward of a subclass would be lost
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a rule of a plan matches: a module, or a parameter of a module.

    Attributes:
        name: In the model.
        module: The module, or the one that owns the parameter.
        key: The parameter's name in it; `None`: the rule is for the module.
        parent: The module around it; around the adapter, for a layer inside one.
        in_adapter: It is inside an adapter.
    """

    name: str
    module: nn.Module
    key: str | None
    parent: nn.Module
    in_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class Style:
    """What is done to a target.

    Attributes:
        name: In plans.
        meaning: One line for the documentation.
        divides: "rows": the dim of output features, the last but one of a weight. "columns": the last one, of input features.
        sections: How many weights lie one after the other along that dim.
        kind: Modules it divides; `None`: the rule is for parameters, or for what surrounds them.
        is_for_parameters: It may be given to a parameter.
        before: What is done to the floating-point tensors among the inputs.
        after: What is done to the output.
        sums_gradients: Gradients of the parameters are partial sums.
        takes_parts: The input is a part.
    """

    name: str
    meaning: str
    divides: Literal["rows", "columns"] | None = None
    sections: int = 1
    kind: Kind | None = None
    is_for_parameters: bool = False
    before: Change | None = None
    after: Change | None = None
    sums_gradients: bool = False
    takes_parts: bool = False

    def parts(self, target: Target, group: TensorGroup) -> dict[str, Part]:
        """Which part of each parameter of the target's module `group`'s ranks have.

        Raises:
            ShardingError: The target is not of this style's kind, or its sizes are not divisible.
        """
        if target.key is not None:
            return self._parts_of_parameter(target, target.key, group)
        if self.kind is None:
            if self.divides is not None:
                raise ShardingError(
                    f"{target.name}: the style {self.name!r} is for parameters, and this is a module; name its parameters"
                )
            return {}
        module, expected = target.module, _CLASSES[self.kind]
        if not _IS[self.kind](module):
            raise ShardingError(
                f"{target.name}: the style {self.name!r} is for nn.{expected.__name__}, and this is a {type(module).__module__}."
                f"{type(module).__name__}; choose another style"
            )
        if self.kind == "dropout":
            return {}
        parameters = dict(module.named_parameters(recurse=False))
        if "weight" not in parameters:
            raise ShardingError(
                f"{target.name}: the style {self.name!r} divides its weight, which is no parameter of its own (it has"
                f" {', '.join(parameters) or 'none'}: a parametrization such as weight_norm, or several weights). Build it without, or"
                " leave the rule out."
            )
        if others := sorted(parameters.keys() - {"weight", "bias"}):
            raise ShardingError(
                f"{target.name}: the style {self.name!r} divides weight and bias, and it also has {', '.join(others)}."
                " Leave the rule out."
            )
        self._check_embedding(target)
        if (
            self.divides == "columns"
            and "bias" in parameters
            and type(module) not in (nn.Linear, Float8Linear)
            and not te.is_linear(module)
        ):
            raise ShardingError(
                f"{target.name}: the style {self.name!r} adds the bias of an nn.Linear once, after the sum, and this is its subclass"
                f" {type(module).__name__}. Build it with bias=False, or add the bias in a module around it."
            )
        rows = self.divides == "rows"
        dims = {"weight": 0 if rows else 1, **({"bias": 0} if rows and "bias" in parameters else {})}
        multiple = MULTIPLE if isinstance(module, Float8Linear) else te.multiple_of(module)
        return {
            key: self._part(f"{target.name}.{key}", parameters[key].shape, dim, group, multiple)
            for key, dim in dims.items()
        }

    def _parts_of_parameter(self, target: Target, key: str, group: TensorGroup) -> dict[str, Part]:
        if not self.is_for_parameters:
            raise ShardingError(
                f"{target.name}: the style {self.name!r} is for modules, and this is a parameter; name the module"
            )
        shape = getattr(target.module, key).shape
        if self.divides is None or (self.divides == "columns" and len(shape) < 2):
            return {}
        dim = len(shape) - 1 if self.divides == "columns" else max(len(shape) - 2, 0)
        return {key: self._part(target.name, shape, dim, group)}

    def _part(self, name: str, shape: Any, dim: int, group: TensorGroup, multiple: int = 1) -> Part:
        length = shape[dim]
        if length % (self.sections * group.size):
            sections = "" if self.sections == 1 else f" in {self.sections} sections"
            raise ShardingError(
                f"{name}: the style {self.name!r} divides dim {dim} of its shape {list(shape)}{sections}, and {length} cannot be divided"
                f" over {group.size} tensor ranks. Use a smaller tensor size."
            )
        if (length // group.size) % multiple:
            layer = name.rpartition(".")[0]
            raise ShardingError(
                f"{name}: dim {dim} of its shape {list(shape)} leaves {length // group.size} for each of {group.size} tensor ranks, and"
                f" its FP8 recipe multiplies sizes that are multiples of {multiple}. Pad it, use a smaller tensor size, or leave the layer"
                f" in high precision: keep_high_precision=[{layer!r}]."
            )
        return Part(dim=dim, sections=(length // self.sections,) * self.sections, size=group.size, rank=group.rank)

    def _check_embedding(self, target: Target) -> None:
        module = target.module
        if not isinstance(module, nn.Embedding):
            return
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ShardingError(f"{target.name}: an embedding with {option} cannot be divided. Leave {option} out.")

    def install(
        self, target: Target, group: TensorGroup, parts: Mapping[str, Part], before: Change | None, after: Change | None
    ) -> list[Any]:
        """Note what is to be divided, and install hooks.

        Args:
            target: What a rule matched.
            group: The ranks.
            parts: What `parts` returned.
            before: What is done to the inputs, this style's `before` or a function in its place.
            after: What is done to the output, likewise.

        Returns:
            Handles of the hooks.
        """
        module = target.module
        name = target.name if target.key is None else target.name.rpartition(".")[0]
        division = planned_division(name, module)
        division.parts.update(parts)
        division.by_rule.update(parts)
        if self.sums_gradients and target.key is not None:
            division.summed[target.key] = group
        elif self.sums_gradients:
            for path, child in module.named_modules(prefix=name):
                planned_division(path, child).summed |= dict.fromkeys(
                    (key for key, _ in child.named_parameters(recurse=False)), group
                )
        if target.key is not None:
            return []
        division.attributes.update(self._attributes(module, group))
        if isinstance(module, nn.Embedding) and self.divides == "rows":
            return VocabularyPart(group).install(module)
        from lightning_mfsdp.ops import LinearLossHead  # loaded by programs that use it, or divide weights

        if isinstance(module, LinearLossHead) and self.divides == "rows":
            return LossHeadPart(group, before, after).install(module)
        if self.kind == "dropout":
            return DividedDropout.install(target.name, module, group)
        handles = [] if before is None else [change_inputs(module, before, group)]
        has_bias = self.kind == "linear" and module._parameters.get("bias") is not None
        if self.divides == "columns" and has_bias and te.is_linear(module):
            assert after is not None
            return [*handles, add_bias_after(module, after, group)]
        if self.divides == "columns" and has_bias:
            # A hook would see the output only after the bias was added, before the sum over ranks.
            assert isinstance(module, nn.Linear)
            assert after is not None
            RowwiseLinear.install(module, after, group)
            return handles
        return handles if after is None else [*handles, change_output(module, after, group)]

    def _attributes(self, module: nn.Module, group: TensorGroup) -> dict[str, Any]:
        """Sizes that a module states, as they are for its part."""
        if is_linear(module) and self.divides is not None:
            key = "out_features" if self.divides == "rows" else "in_features"
            is_apart = self.divides == "columns" and te.is_linear(module) and module._parameters.get("bias") is not None
            return {key: getattr(module, key) // group.size, **(te.bias_apart() if is_apart else {})}
        if isinstance(module, nn.Embedding) and self.divides == "columns":
            return {"embedding_dim": module.embedding_dim // group.size}
        if isinstance(module, nn.Embedding) and self.divides == "rows":
            rows = module.num_embeddings // group.size
            padding = None if module.padding_idx is None else module.padding_idx - group.rank * rows
            return {"num_embeddings": rows, "padding_idx": padding if padding in range(rows) else None}
        return {}


@dataclass(frozen=True, kw_only=True)
class _RopeStyle(Style):
    """A projection whose last outputs are used by the heads of each rank without another layer (multi-head latent attention)."""

    def parts(self, target: Target, group: TensorGroup) -> dict[str, Part]:
        if not isinstance(self._size(target), int):
            raise ShardingError(
                f"{target.name}: the style {self.name!r} reads qk_rope_head_dim of the module around it, which has none. Leave"
                " the rule out."
            )
        return super().parts(target, group)

    def install(
        self, target: Target, group: TensorGroup, parts: Mapping[str, Part], before: Change | None, after: Change | None
    ) -> list[Any]:
        return super().install(target, group, parts, before, RopePart(self._size(target)))

    @staticmethod
    def _size(target: Target) -> Any:
        return getattr(target.parent, "qk_rope_head_dim", None)


def _shared(tensor: Tensor, group: TensorGroup) -> Tensor:
    return tensor / group.size


_ALL = (
    Style(
        name="colwise",
        meaning="divided by output features; so is the output",
        divides="rows",
        kind="linear",
        is_for_parameters=True,
        before=copied,
    ),
    Style(
        name="colwise_gather_output",
        meaning="the same, with the whole output gathered; logits of a causal language model stay divided for its loss",
        divides="rows",
        kind="linear",
        before=copied,
        after=gathered,
    ),
    Style(
        name="packed_colwise",
        meaning="two weights one after the other (gate and up), each divided by output features",
        divides="rows",
        sections=2,
        kind="linear",
        is_for_parameters=True,
        before=copied,
    ),
    Style(
        name="rowwise",
        meaning="divided by input features; takes a divided input, and outputs are summed. A bias is whole and added once",
        divides="columns",
        kind="linear",
        is_for_parameters=True,
        after=summed,
        takes_parts=True,
    ),
    Style(
        name="rowwise_split_input",
        meaning="the same for a whole input, of which each rank takes its part",
        divides="columns",
        kind="linear",
        before=own_part,
        after=summed,
    ),
    Style(
        name="packed_rowwise",
        meaning="parameters with two weights one after the other in the last dim",
        divides="columns",
        sections=2,
        is_for_parameters=True,
    ),
    Style(
        name="embedding_rowwise",
        meaning="divided by tokens of the vocabulary; outputs are summed",
        divides="rows",
        kind="embedding",
    ),
    Style(
        name="embedding_colwise",
        meaning="divided by features; outputs are gathered",
        divides="columns",
        kind="embedding",
        after=gathered,
    ),
    Style(
        name="moe_tp_experts",
        meaning="experts whose weights other rules divide by their inner features; outputs are summed",
        before=copied,
        after=summed,
    ),
    Style(
        name="moe_identity_expert",
        meaning="an expert inside such a module that returns its input: each rank returns its share",
        before=_shared,
    ),
    Style(
        name="dropout_of_parts",
        meaning="an nn.Dropout between colwise and rowwise: each rank draws the mask of the whole tensor and uses its part",
        kind="dropout",
    ),
    Style(name="all_reduce", meaning="outputs are summed", after=summed),
    Style(
        name="replicated_with_grad_allreduce",
        meaning="whole parameters that see only the heads of this rank: their gradients are partial sums",
        is_for_parameters=True,
        sums_gradients=True,
    ),
    _RopeStyle(
        name="mla_kv_a_proj",
        meaning="a whole projection; the gradient of its last qk_rope_head_dim outputs is summed",
    ),
    Style(name="replicate", meaning="whole on every rank", is_for_parameters=True),
    Style(name="local_params", meaning="nothing: the module computes with parts of parameters that other rules divide"),
)
STYLES: Mapping[str, Style] = {style.name: style for style in _ALL} | {
    "colwise_rep": next(style for style in _ALL if style.name == "colwise_gather_output"),
    "rowwise_rep": next(style for style in _ALL if style.name == "rowwise_split_input"),
}

# Styles of transformers' plans that are known and not supported, and why.
REFUSED: Mapping[str, str] = {
    "sequence_parallel": "it is an option of apply_plan, for whole stacks of layers",
    "ep_dispatch_experts": "it belongs to a plan of expert parallelism",
    "grouped_gemm": "it belongs to a plan of expert parallelism",
}


def style_named(name: str, rule: str) -> Style:
    """The style of a rule.

    Raises:
        ShardingError: There is none of this name; with the names there are.
    """
    if name in REFUSED:
        raise ShardingError(f"{rule}: the style {name!r} is not supported: {REFUSED[name]}. Leave the rule out.")
    if name not in STYLES:
        raise ShardingError(f"{rule}: unknown style {name!r}, expected one of {', '.join(STYLES)}")
    return STYLES[name]
