"""apply_plan: has the layers of a model divided and computed as a plan says, which maps names of modules to styles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part, part_of
from lightning_mfsdp.base.transformers_models import models_in
from lightning_mfsdp.tensor_parallel.adapters import inside_adapters, without_adapters
from lightning_mfsdp.tensor_parallel.checks import check_attention, check_experts, check_own_parameters, check_ties
from lightning_mfsdp.tensor_parallel.division import divide
from lightning_mfsdp.tensor_parallel.dtensors import has_dtensors, take_dtensors
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, copied
from lightning_mfsdp.tensor_parallel.layers import DividedDropout, SharedInput, WholeDropout, WholeModule
from lightning_mfsdp.tensor_parallel.logits import DividedLogits
from lightning_mfsdp.tensor_parallel.megatron import has_parts_by_itself, is_part_by_itself, mark_megatron_layers
from lightning_mfsdp.tensor_parallel.sequence import find_stacks
from lightning_mfsdp.tensor_parallel.styles import Style, Target, style_named

__all__ = ["AppliedPlan", "apply_plan"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, kw_only=True)
class AppliedPlan:
    """What `apply_plan` did.

    Attributes:
        styles: By the names of the modules and parameters that rules matched; "DTensor" of parameters that `parallelize_module` divided.
        unused: Rules of a model's own plan that matched nothing: those for layers that its configuration leaves out.
    """

    styles: Mapping[str, str]
    unused: tuple[str, ...]


def apply_plan(
    model: nn.Module, plan: Mapping[str, str] | None, group: dist.ProcessGroup, *, sequence_parallel: bool = False
) -> AppliedPlan:
    """Have the ranks of a tensor axis divide the weights of a model and compute it together.

    All ranks give the model equal inputs, and get equal outputs. Parameters stay the same objects and become plain parts of themselves,
    which `part_of` describes. Gradients of parts are complete, and those of whole parameters are equal on all ranks.
    Parameters on the meta device stay whole until `materialize_divided` or `divide`.

    Args:
        model: With equal values on all ranks.
        plan: Names of modules or parameters to names of styles (`STYLES`). `*` stands for one part of a name, such as the number of a
            layer. `None`: the plans of transformers' models inside, unless `parallelize_module` has divided layers.
        group: The ranks of the axis.
        sequence_parallel: Between attention and MLPs, each rank has a part of every sequence (sequence.py).

    Raises:
        ShardingError: There is no plan, a rule matches nothing, a style is unknown, or something cannot be divided; with its name and
            numbers. Then nothing has changed.
    """
    ranks = TensorGroup.of(group)
    pretrained = dict(models_in(model))
    is_divided_by_torch = has_dtensors(model)
    rules = _rules_of_layers(model)
    if plan is not None or not is_divided_by_torch:
        rules |= plan if plan is not None else _own_rules(pretrained)
    if not rules and not has_parts_by_itself(model) and not is_divided_by_torch:
        raise ShardingError(
            f"{_names(model, pretrained)} has no tensor parallel plan: give one, a mapping of names to styles such as"
            ' {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    matched, unused = _matched(model, rules)
    if unused and (plan is not None or not matched):
        raise ShardingError(
            f"the tensor parallel plan has rules that match nothing in {_names(model, pretrained)}; remove them: {', '.join(unused)}"
        )
    for target, style in matched:
        _check_parameters(target, style)
    targets = [(target, style, style.parts(target, ranks)) for target, style in matched]
    _check(model, targets, ranks)
    stacks = find_stacks(model, targets) if sequence_parallel and ranks.size > 1 else None
    taken = take_dtensors(model, group) if is_divided_by_torch else []
    mark_megatron_layers(model, group)
    heads = _heads(pretrained, targets, ranks) if ranks.size > 1 else {}
    shared = _shared_inputs(targets) if ranks.size > 1 else {}
    for target, style, parts in targets if ranks.size > 1 else ():
        logits, inputs = heads.get(id(target.module)), shared.get(id(target.module))
        before = style.before if inputs is None else inputs.copied
        after = style.after if logits is None else logits.after_head
        if stacks is not None and target.key is None:
            before, after = stacks.before(target.module, before), stacks.after(target.module, after)
        style.install(target, ranks, parts, before, after)
    if stacks is not None:
        stacks.install(ranks)
    if ranks.size > 1:
        _watch_others(model, targets, stacks.whole_parameters() if stacks is not None else set())
    divide(model)
    styles = {target.name: style.name for target, style in matched} | dict.fromkeys(taken, "DTensor")
    return AppliedPlan(styles=styles, unused=tuple(unused))


def _rules_of_layers(model: nn.Module) -> dict[str, str]:
    """The rules that layers state themselves, by an attribute `tensor_plan`: names of their parameters, or "" for the layer."""
    return {
        ".".join(filter(None, (name, key))): style
        for name, layer in model.named_modules()
        for key, style in (getattr(layer, "tensor_plan", None) or {}).items()
    }


def _own_rules(pretrained: Mapping[str, Any]) -> dict[str, str]:
    """Rules of the models' own plans, with names in the module around them."""
    return {
        f"{name}.{rule}" if name else rule: style
        for name, model in pretrained.items()
        for rule, style in (getattr(model, "tp_plan", None) or {}).items()
    }


def _names(model: nn.Module, pretrained: Mapping[str, Any]) -> str:
    return ", ".join(type(inner_model).__name__ for inner_model in pretrained.values()) or type(model).__name__


def _matched(model: nn.Module, rules: Mapping[str, str]) -> tuple[list[tuple[Target, Style]], list[str]]:
    """What each rule matches, and the rules that match nothing."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    targets: list[tuple[Target, Style]] = []
    ruled: dict[tuple[int, str | None], str] = {}  # names of styles
    unused: list[str] = []
    for rule, named in rules.items():
        pattern = re.compile(re.escape(rule).replace(r"\*", "[^.]+"))
        names = [name for name in (*modules, *parameters) if pattern.fullmatch(name)]
        if not names:
            if hidden := [name for name in (*modules, *parameters) if pattern.fullmatch(without_adapters(name))]:
                raise ShardingError(
                    f"{hidden[0]}: an adapter is around it, and the rule {rule!r} of the plan is for what it was before. Leave the adapter"
                    " or the rule out."
                )
            unused.append(rule)
            continue
        style = style_named(named, rule)
        for name in names:
            owner, _, key = name.rpartition(".")
            module = modules[name] if name in modules else modules[owner]
            target = Target(
                name=name, module=module, key=None if name in modules else key, parent=modules[owner] if name else model
            )
            for inner_target, inner_style in inside_adapters(target, style):
                place = id(inner_target.module), inner_target.key
                if place not in ruled:
                    ruled[place] = inner_style.name
                    targets.append((inner_target, inner_style))
                elif ruled[place] != inner_style.name:
                    raise ShardingError(
                        f"{inner_target.name}: rules of the plan give it two styles, {ruled[place]!r} and {inner_style.name!r}; remove one"
                    )
    return targets, unused


def _check_parameters(target: Target, style: Style) -> None:
    parameters = dict(target.module.named_parameters(recurse=False))
    for key in (target.key,) if target.key is not None else parameters if style.kind is not None else ():
        parameter = parameters[key]
        if (
            type(parameter) is not nn.Parameter
            or part_of(parameter) is not None
            or is_part_by_itself(target.module, parameter)
        ):
            raise ShardingError(
                f"{target.name}: {key} is {'a part already' if type(parameter) is nn.Parameter else f'a {type(parameter).__name__}'},"
                " and a plan divides plain whole parameters. Call apply_plan once, before anything else shards or wraps them."
            )
        if parameter.grad is not None:
            raise ShardingError(f"{target.name}: {key} has a gradient. Call apply_plan before the first backward.")


def _check(model: nn.Module, targets: list[tuple[Target, Style, dict[str, Part]]], ranks: TensorGroup) -> None:
    ruled = {(id(target.module), target.key) for target, _, _ in targets if target.key is not None}
    by_module: dict[int, dict[str, Part]] = {}
    for target, _, parts in targets:
        by_module.setdefault(id(target.module), {}).update(parts)
    for target, style, parts in targets if ranks.size > 1 else ():
        if style.after is None and style.kind == "linear" and target.key is None:
            check_attention(target, parts, ranks.size)
            check_own_parameters(target, ruled)
        if style.name == "moe_tp_experts":
            check_experts(target, by_module[id(target.module)])
    check_ties(model, [(target, parts) for target, _, parts in targets])


def _shared_inputs(targets: list[tuple[Target, Style, dict[str, Part]]]) -> dict[int, SharedInput]:
    """By the ids of layers: what those inside one module share that are divided by output features, such as queries, keys and values."""
    siblings: dict[int, list[Target]] = {}
    for target, style, _ in targets:
        if (
            style.before is copied
            and style.kind == "linear"
            and target.key is None
            and target.parent is not target.module
        ):
            siblings.setdefault(id(target.parent), []).append(target)
    by_layer: dict[int, SharedInput] = {}
    for together in siblings.values():
        if len(together) > 1:
            inputs = SharedInput()
            inputs.install(together[0].parent)
            by_layer.update({id(target.module): inputs for target in together})
    return by_layer


def _watch_others(
    model: nn.Module, targets: list[tuple[Target, Style, dict[str, Part]]], seen_as_parts: set[int]
) -> None:
    """Have modules with parameters that no rule is for find out whether one is needed, and dropout refuse parts of tensors."""
    ruled = seen_as_parts | {
        id(inside)
        for target, style, _ in targets
        if style.kind or style.sums_gradients
        for inside in target.module.modules()
    }
    ruled.update(id(target.module) for target, _, _ in targets)
    for name, module in model.named_modules():
        if id(module) not in ruled and next(module.parameters(recurse=False), None) is not None:
            WholeModule(name).install(module)
        if isinstance(module, _DROPOUT) and not isinstance(module, DividedDropout):
            WholeDropout(name).install(module)


def _heads(
    pretrained: Mapping[str, Any], targets: list[tuple[Target, Style, dict[str, Part]]], ranks: TensorGroup
) -> dict[int, DividedLogits]:
    """By the ids of the layers that compute logits: how those stay divided."""
    gathers = {id(target.module) for target, style, _ in targets if style.name == "colwise_gather_output"}
    heads: dict[int, DividedLogits] = {}
    for model in pretrained.values():
        head = model.get_output_embeddings()
        if head is not None and id(head) in gathers and DividedLogits.fits(model):
            heads[id(head)] = DividedLogits(ranks, model.loss_function)
            heads[id(head)].install(model)
    return heads
